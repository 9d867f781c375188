"""Programs to be measured beside ours: each named by an environment variable, none needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from gpulet.errors import UsageError


@dataclass(frozen=True)
class Peers:
    """Absolute paths, "" where none was named. Variables: PEER_ and the field's name in capitals.

    runtime, hook, ctk, cdi_hook, container_cli: NVIDIA's container toolkit; device_plugin: its Kubernetes plugin.
    """

    runtime: str = ""
    hook: str = ""
    ctk: str = ""
    cdi_hook: str = ""
    container_cli: str = ""
    device_plugin: str = ""


def from_environ(environ: Mapping[str, str]) -> Peers:
    """The peers that the environment names. Raises UsageError for one that is no program."""
    found = {}
    for field in fields(Peers):
        name = f"PEER_{field.name.upper()}"
        path = environ.get(name, "")
        if path and not os.access(path, os.X_OK):
            raise UsageError(name, seen=path, wanted="the path of a program")
        found[field.name] = os.path.abspath(path) if path else ""
    return Peers(**found)
