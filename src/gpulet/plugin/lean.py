"""Imports without what they would take along for nothing.

asyncio and prometheus-client load OpenSSL wherever Python has it (ssl, and _hashlib by way of urllib): 7 MB of a daemon
that should stay small on every node, for connections that nobody makes through them. Only apiserver.py speaks TLS, and
loads it when it does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

# Modules of the standard library that keep what `import ssl` gave them: later importers must get them anew.
_MARKED = ("hashlib", "http.client", "http.server", "urllib.request", "wsgiref.simple_server", "socketserver")


class _NoTls(ModuleType):
    """In ssl's place: every name is a class without meaning, enough for annotations and default values."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextlib.contextmanager
def without_tls() -> Iterator[None]:
    """What is imported here does without OpenSSL, unless that is loaded already."""
    if "ssl" in sys.modules:
        yield
        return
    before = set(sys.modules)
    sys.modules["ssl"] = _NoTls("ssl")
    hidden = "_hashlib" not in sys.modules
    if hidden:
        sys.modules["_hashlib"] = None  # type: ignore[assignment]  # hashlib has its own functions too
    try:
        yield
    finally:
        del sys.modules["ssl"]
        if hidden:
            del sys.modules["_hashlib"]
        for name in _MARKED:
            if name not in before:
                sys.modules.pop(name, None)
