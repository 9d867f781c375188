"""Imports without what they would take along for nothing, in a daemon that should stay small on every node.

asyncio and prometheus-client load OpenSSL wherever Python has it (ssl, and _hashlib by way of urllib): 7 MB, for
connections that nobody makes through them. Only apiserver.py speaks TLS, and loads it when it does. prometheus-client
also brings HTTP servers and clients of its own, 3 MB, where endpoint.py answers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

SERVING = ("http.server", "socketserver", "wsgiref.simple_server", "urllib.request", "urllib.error")
# Modules of the standard library that keep what `import ssl` gave them: later importers must get them anew.
_MARKED = ("hashlib", "http.client", *SERVING)


class _Nothing(ModuleType):
    """In a module's place: every name is a class without meaning, enough for annotations, defaults and base classes."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def one_arena() -> None:
    """Have glibc keep one heap for all threads to come, as M_ARENA_MAX of mallopt(3): theirs would each keep what was
    once needed for a list of thousands of devices, and under Python's lock they don't allocate at the same time."""
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library has none
    if mallopt:
        mallopt(-8, 1)


@contextlib.contextmanager
def without(*names: str) -> Iterator[None]:
    """What is imported here does without these modules, unless they are loaded already. Later importers get them."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = _Nothing(name)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def without_tls(*more: str) -> Iterator[None]:
    """What is imported here does without OpenSSL and these modules, unless they are loaded already."""
    if "ssl" in sys.modules:
        with without(*more):
            yield
        return
    before = set(sys.modules)
    own_hashes = "_hashlib" not in sys.modules
    if own_hashes:
        sys.modules["_hashlib"] = None  # type: ignore[assignment]  # hashlib has its own functions too
    try:
        with without("ssl", *more):
            yield
    finally:
        if own_hashes:
            del sys.modules["_hashlib"]
        for name in _MARKED:
            if name not in before:
                sys.modules.pop(name, None)
