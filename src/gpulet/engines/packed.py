"""Imports gpulet's modules out of one file, so that starting costs one open instead of a search for each module.

A launcher runs this module's code, found at the head of the pack (`engines/pack.py` writes it), before it imports
anything. A module whose source is not the one that was packed, by size and time of change, is left to the ordinary
import, and so is everything where the pack is absent, damaged or another interpreter's: it costs milliseconds and
nothing else.

What a module imports as it is loaded is known, so it is made beforehand and put where the import will find it: asking
Python's import machinery for each of thirty modules takes a millisecond more than making them.
"""

from __future__ import annotations

import gc
import marshal
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _frozen_importlib import ModuleSpec
    from types import ModuleType
    from typing import Any

    # module -> (offset, -1 for a library in C; length; path of its source; size; time of change in ns; whether it is a
    # package; the modules that it asks for as it is loaded, in order)
    Index = dict[str, tuple[int, int, str, int, int, bool, tuple[str, ...]]]


class Pack:
    """A finder and loader for sys.meta_path."""

    def __init__(self, descriptor: int, base: int, index: Index) -> None:
        self.descriptor = descriptor
        self.base = base
        self.index = index
        self.spec: Any = sys.modules["_frozen_importlib"].ModuleSpec

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The way to load a module, None where it isn't packed or its source has changed since."""
        if name not in self.index or not self.is_current(name):
            return None
        offset, _, source, _, _, package, _ = self.index[name]
        if offset < 0:
            by_file: Any = sys.modules["_frozen_importlib_external"]
            loader = by_file.ExtensionFileLoader(name, source)
            return self.spec(name, loader, origin=source)  # type: ignore[no-any-return]
        spec: ModuleSpec = self.spec(name, self, origin=source, is_package=package)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(source.rpartition("/")[0])
        return spec

    def is_current(self, name: str) -> bool:
        """Whether a module's source is the one that was packed."""
        offset, _, source, size, changed, _, _ = self.index[name]
        try:
            found = posix.stat(source)
        except OSError:
            return False
        return offset < 0 or (found.st_size, found.st_mtime_ns) == (size, changed)

    def unchanged(self) -> bool:
        """Whether every module's source is still the one that was packed."""
        return all(map(self.is_current, self.index))

    def folders(self) -> list[tuple[int, int]]:
        """A state of the folders that the sources lie in, another one once files have been put there or taken away."""
        found = []
        for folder in sorted({entry[2].rpartition("/")[0] for entry in self.index.values()}):
            state = posix.stat(folder)
            found.append((state.st_ino, state.st_mtime_ns))
        return found

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        self._make_needed(module.__name__)
        self._fill(module)

    def _make_needed(self, name: str) -> None:
        for other in self.index[name][6]:
            if other not in sys.modules and other in self.index and self.is_current(other):
                self._make(other)

    def _make(self, name: str) -> None:
        """A module without the import machinery: nobody else is importing in this process yet."""
        module = type(sys)(name)
        parent, _, last = name.rpartition(".")
        module.__package__ = parent
        if self.index[name][5]:
            module.__package__ = name
            module.__path__ = [self.index[name][2].rpartition("/")[0]]
        sys.modules[name] = module
        try:
            self._make_needed(name)
            self._fill(module)
        except BaseException:
            del sys.modules[name]
            raise
        if parent:
            setattr(sys.modules[parent], last, module)

    def _fill(self, module: ModuleType) -> None:
        name = module.__name__
        offset, length, source, *_ = self.index[name]
        module.__file__ = source
        try:
            code = marshal.loads(posix.pread(self.descriptor, length, self.base + offset))
        except (OSError, ValueError, EOFError, TypeError):
            code = None
        if type(code) is not type(install.__code__):
            self.index = {}  # the rest of it is no better
            by_file: Any = sys.modules["_frozen_importlib_external"]
            code = by_file.SourceFileLoader(name, source).get_code(name)
        exec(code, module.__dict__)


class _Mapping:
    """Stands in for the abstract classes that os.environ is made from; what isn't here comes from the real one."""

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def get(self, key: object, default: object = None) -> object:
        try:
            return self[key]  # type: ignore[index]
        except KeyError:
            return default

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        from _collections_abc import MutableMapping

        return getattr(MutableMapping, name).__get__(self)


def _check_methods(kind: type, *methods: str) -> Any:
    from _collections_abc import _check_methods as real  # type: ignore[attr-defined]

    return real(kind, *methods)


def import_os() -> None:
    """Imports `os` without _collections_abc, whose twenty-five abstract classes take half a millisecond to make. What
    imports that later gets the real one."""
    name = "_collections_abc"
    if "os" in sys.modules or name in sys.modules:
        return
    stand_in: Any = type(sys)(name)
    stand_in.Mapping = stand_in.MutableMapping = _Mapping
    stand_in._check_methods = _check_methods
    sys.modules[name] = stand_in
    try:
        import os  # noqa: F401
    except (ImportError, AttributeError, TypeError):  # another `os` than the one that is known: the ordinary import
        sys.modules.pop("os", None)
    finally:
        del sys.modules[name]


def install(descriptor: int, base: int, index: Index) -> None:
    """Puts a pack in front of the ordinary import. base: where the modules begin in the file."""
    gc.disable()
    import_os()
    finder: Any = Pack(descriptor, base, index)
    sys.meta_path.insert(0, finder)
