"""Which Python runs the launchers.

The distribution's own, where it is of the version that runs now and complete: it isn't removed with a virtual
environment or a version manager, and starts a millisecond sooner than an interpreter that lives in a shared library.
Else the one that this process's virtual environment was made from.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gpulet.engines.pack import STANDARD

USUAL = Path("/usr/bin")
_QUESTION = """
import importlib.util, json, sys
found = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
magic = importlib.util.MAGIC_NUMBER.hex()
print(json.dumps([magic, sys.hexversion >> 16, {name: spec and (spec.origin or "") for name, spec in found.items()}]))
"""


@functools.cache
def best(usual: Path = USUAL) -> tuple[str, Mapping[str, str]]:
    """The interpreter's absolute path, and where it has the modules that the launchers load (see `standard`)."""
    beneath = getattr(sys, "_base_executable", "") or sys.executable
    candidates = [str(usual / f"python{sys.version_info.major}.{sys.version_info.minor}"), beneath, sys.executable]
    for path in dict.fromkeys(candidates):
        modules = standard(path)
        if modules is not None:
            return path, modules
    return sys.executable, {}


def standard(path: str) -> dict[str, str] | None:
    """Where an interpreter has its own modules that the launchers load: name -> its file, or "built-in". None where it
    isn't one of this version, lacks one of them or can't be run."""
    try:
        command = [path, "-IS", "-c", _QUESTION, *STANDARD]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        magic, version, found = json.loads(said)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if magic != importlib.util.MAGIC_NUMBER.hex() or version != sys.hexversion >> 16:
        return None
    return found if all(found.values()) else None
