"""Find libnvidia-ml.so.1 beneath a driver root and make nvidia-ml-py use that very file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from threading import RLock

import pynvml

from gpulet.node import elf, nvml_errors
from gpulet.node.driver import library_folders
from gpulet.node.paths import below, resolve

SONAME = "libnvidia-ml.so.1"
_OTHER_BITS = 32 if ctypes.sizeof(ctypes.c_void_p) == 8 else 64  # a cache lists both word sizes
_lock = RLock()
_used = ""


def candidates(root: str, search: Sequence[str] = ()) -> list[str]:
    """Every path below `root` where the library may be, in the order tried. search: as for `library_folders`."""
    return [f"{folder}/{SONAME}" for folder in library_folders(root, search=search)]


def locate(root: str, search: Sequence[str] = ()) -> str:
    """The library's host path, links followed beneath the root; the bare soname where it isn't found beneath "/".

    Raises NvmlError (12) where it isn't beneath another root: the loader's path would give some other tree's library.
    """
    looked = candidates(root, search)
    for path in looked:
        real = below(root, resolve(root, path))
        if os.path.isfile(real) and elf.bits(real) != _OTHER_BITS:
            return real
    if root in ("", "/"):
        return SONAME
    raise nvml_errors.library_not_found(root, [below(root, path) for path in looked])


def use(root: str, search: Sequence[str] = ()) -> str:
    """Load the root's library and have nvidia-ml-py call it; the path that was loaded.

    nvidia-ml-py loads by soname and keeps what it got for the life of the process. It is given the library by
    absolute path instead, so that what is asked is this root's, also where a process looks at several roots.
    """
    global _used
    path = locate(root, search)
    with _lock:
        if path != _used:
            try:
                library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                if path != SONAME:
                    raise nvml_errors.library_unusable(path, str(error)) from error
                looked = [below(root, name) for name in candidates(root, search)]
                raise nvml_errors.library_not_found(root, looked, str(error)) from error
            pynvml._nvmlGetFunctionPointer_cache.clear()
            pynvml.nvmlLib = library
            _used = path
    return path
