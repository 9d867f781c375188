"""Ask a simulated node's NVML in a process of its own: nvidia-ml-py keeps one library for the life of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_HEAD = """
import ctypes, json, sys
import pynvml as n
n.nvmlLib = ctypes.CDLL(sys.argv[1])
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except n.NVMLError as error:
        return {"error": error.value}
"""


def ask(library: Path | str, code: str) -> Any:
    """Run Python `code`, which has nvidia-ml-py as `n`, `attempt(function, ...)`; returns its `answer`."""
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + code + "\nprint(json.dumps(answer))", str(library)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
