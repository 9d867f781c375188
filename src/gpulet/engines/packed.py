"""Imports gpulet's modules out of one file, so that starting costs one open instead of a search for each module.

A launcher runs this module's code, found at the head of the pack (`engines/pack.py` writes it), before it imports
anything. A module whose source is not the one that was packed, by size and time of change, is left to the ordinary
import, and so is everything where the pack is absent or another interpreter's: it costs milliseconds and nothing else.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _frozen_importlib import ModuleSpec
    from types import ModuleType
    from typing import Any

    # module -> (offset, length, path of its source, size, time of change in ns, whether it is a package)
    Index = dict[str, tuple[int, int, str, int, int, bool]]


class Pack:
    """A finder and loader for sys.meta_path."""

    def __init__(self, descriptor: int, base: int, index: Index) -> None:
        self.descriptor = descriptor
        self.base = base
        self.index = index
        self.spec: Any = sys.modules["_frozen_importlib"].ModuleSpec

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        entry = self.index.get(name)
        if entry is None:
            return None
        try:
            found = os.stat(entry[2])
        except OSError:
            return None
        if (found.st_size, found.st_mtime_ns) != entry[3:5]:
            return None
        spec: ModuleSpec = self.spec(name, self, origin=entry[2], is_package=entry[5])
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(os.path.dirname(entry[2]))
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        offset, length, path, *_ = self.index[module.__name__]
        module.__file__ = path
        exec(marshal.loads(os.pread(self.descriptor, length, self.base + offset)), module.__dict__)


def install(descriptor: int, base: int, index: Index) -> None:
    """Puts a pack in front of the ordinary import. base: where the modules begin in the file."""
    finder: Any = Pack(descriptor, base, index)
    sys.meta_path.insert(0, finder)
