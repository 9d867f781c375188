"""A CDI-capable engine's part: puts the edits of named CDI devices into an OCI configuration.

Small and on its own on purpose: it stands for containerd or CRI-O, which know nothing of gpulet, and the tests hold
`injection/oci.py` against it. Rules: the Container Device Interface specification 1.1.0, sections "Specs" and "OCI
Edits"; like containerd's library it applies a spec's own edits once, before those of the first of its devices.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpulet.errors import EngineError

Edits = dict[str, Any]


def find(names: Sequence[str], folders: Iterable[Path]) -> list[Edits]:
    """The edits for these qualified names, in order. A folder later in the list wins over an earlier one."""
    known: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]] = {}
    for folder in folders:
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.suffix in (".json", ".yaml"):
                spec = yaml.safe_load(path.read_text())
                for device in spec.get("devices", ()):
                    known[f"{spec['kind']}={device['name']}"] = (path, spec, device)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise EngineError(
            "unresolvable CDI devices",
            seen=", ".join(unknown),
            wanted=f"one of {', '.join(sorted(known)) or 'none: no spec was found'}",
            remedy="see which specs the engine reads",
        )
    edits: list[Edits] = []
    applied: set[Path] = set()
    for name in names:
        path, spec, device = known[name]
        if path not in applied:
            applied.add(path)
            edits.append(spec.get("containerEdits") or {})
        edits.append(device.get("containerEdits") or {})
    return edits


def apply(config: dict[str, Any], edits: Iterable[Edits]) -> None:
    """Puts the edits into the configuration, in place."""
    linux = config.setdefault("linux", {})
    rules = linux.setdefault("resources", {}).setdefault("devices", [])
    nodes = linux.setdefault("devices", [])
    mounts = config.setdefault("mounts", [])
    for edit in edits:
        _env(config["process"], edit.get("env", ()))
        for node in edit.get("deviceNodes", ()):
            device = _device(node)
            nodes[:] = [other for other in nodes if other["path"] != device["path"]]
            nodes.append(device)
            rules.append(
                {
                    "allow": True,
                    "type": device["type"],
                    "major": device["major"],
                    "minor": device["minor"],
                    "access": node.get("permissions", "rwm"),
                }
            )
        for mount in edit.get("mounts", ()):
            mounts[:] = [other for other in mounts if other["destination"] != mount["containerPath"]]
            entry = {"source": mount["hostPath"], "destination": mount["containerPath"]}
            mounts.append(entry | {key: mount[key] for key in ("type", "options") if key in mount})
        for hook in edit.get("hooks", ()):
            entry = {key: hook[key] for key in ("path", "args", "env", "timeout") if key in hook}
            config.setdefault("hooks", {}).setdefault(hook["hookName"], []).append(entry)
        gids = config["process"].setdefault("user", {}).setdefault("additionalGids", [])
        gids.extend(gid for gid in edit.get("additionalGids", ()) if gid and gid not in gids)
    mounts.sort(key=lambda mount: os.path.normpath(mount["destination"]).count("/"))


def _env(process: dict[str, Any], additions: Iterable[str]) -> None:
    env = process.setdefault("env", [])
    for addition in additions:
        name = addition.partition("=")[0]
        env[:] = [entry for entry in env if entry.partition("=")[0] != name]
        env.append(addition)


def _device(node: dict[str, Any]) -> dict[str, Any]:
    """An OCI device from a CDI node; what the spec leaves out is read from the host's node."""
    found = os.lstat(node.get("hostPath", node["path"]))
    if not stat.S_ISCHR(found.st_mode):
        raise EngineError("CDI device node", seen=node.get("hostPath", node["path"]), wanted="a character device")
    # "major" left out stands for both numbers: 0 is no character device's major, while a minor 0 is left out as well
    numbers = (node["major"], node.get("minor", 0)) if node.get("major") else _numbers(found.st_rdev)
    mode = node.get("fileMode", stat.S_IMODE(found.st_mode))
    device = {"path": node["path"], "type": "c", "major": numbers[0], "minor": numbers[1], "fileMode": mode}
    return device | {key: node[key] for key in ("uid", "gid") if key in node}


def _numbers(device: int) -> tuple[int, int]:
    return os.major(device), os.minor(device)
