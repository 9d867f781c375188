"""Why a CDI name can or can't be used: what an engine scans, what it finds there, and what comes nearest."""

from __future__ import annotations

import difflib
import os
from typing import Any

from gpulet.errors import CdiError
from gpulet.injection import cdi_rules, cdi_targets
from gpulet.injection.cdi_registry import DEFAULT_FOLDERS, Registry


def explain(name: str, engine: str = "", folders: tuple[str, ...] = ()) -> dict[str, Any]:
    """{"ok", "name", "folders", "lines"}: the findings as lines, in the order in which an engine would meet them.

    engine: "podman" or "podman=4.9"; folders: instead of those that the engine scans.
    """
    if engine:
        cdi_targets.known(engine)
    scanned = folders or (cdi_targets.folders(engine) if engine else DEFAULT_FOLDERS)
    registry = Registry(scanned)
    lines = [*_folders(scanned), *_files(registry)]
    found = _name(name, registry)
    lines += _shadowed(registry, name)
    if registry.source(name):
        problems = [*_limit(registry, name, engine), *_use(registry, name)]
    else:
        problems = [*found, *_near(name, registry), *_elsewhere(name, scanned)]
    ok = bool(registry.source(name)) and not problems
    shown = name if name.strip() == name and name.isprintable() else repr(name)
    verdict = f"{shown} can be used: {registry.source(name)} defines it" if ok else f"{shown} can't be used"
    return {"ok": ok, "name": name, "folders": list(scanned), "lines": [*lines, *problems, verdict]}


def _folders(scanned: tuple[str, ...]) -> list[str]:
    lines = []
    real: dict[str, str] = {}
    for folder in scanned:
        target = os.path.realpath(folder)
        if not os.path.isdir(folder):
            lines.append(f"folder {folder}: not there")
        elif not os.access(folder, os.R_OK | os.X_OK):
            lines.append(f"folder {folder}: not readable for uid {os.geteuid()}; rootless engines run as you")
        elif target in real:
            lines.append(f"folder {folder}: the same as {real[target]}")
        else:
            lines.append(f"folder {folder}: scanned")
        real.setdefault(target, folder)
    return lines


def _files(registry: Registry) -> list[str]:
    lines = [
        f"file {spec.path}: CDI {spec.spec['cdiVersion']}, {spec.kind}, {len(spec.spec['devices'])} devices"
        for spec in registry.specs
    ]
    return lines + [f"not loaded: {error}" for error in registry.errors.values()]


def _name(name: str, registry: Registry) -> list[str]:
    if name in registry.conflicts:
        return [f"defined more than once in one folder, so by none: {', '.join(registry.conflicts[name])}"]
    try:
        cdi_rules.split_name(name)
    except CdiError as error:
        return [str(error), "a qualified name has the form vendor/class=device"]
    return []


def _shadowed(registry: Registry, name: str) -> list[str]:
    used = registry.source(name)
    others = [file.path for file in registry.specs if used and name in dict(file.qualified()) and file.path != used]
    return [f"{path} defines it too, but {os.path.dirname(used)} has priority" for path in others]


def _limit(registry: Registry, name: str, engine: str) -> list[str]:
    if "=" not in engine:
        return []
    path, highest = registry.source(name), cdi_targets.limit(engine)
    (spec,) = [file.spec for file in registry.specs if file.path == path]
    if cdi_rules.parse_version(spec["cdiVersion"]) <= cdi_rules.parse_version(highest):
        return []
    mend = f"gpulet cdi generate --target {engine} --output {path}"
    return [f"{path} is CDI {spec['cdiVersion']}, {engine} reads up to {highest}; mend it with: {mend}"]


def _use(registry: Registry, name: str) -> list[str]:
    try:
        injection = registry.resolve([name])
    except CdiError as error:
        return [str(error)]
    closed = [node.host_path for node in injection.devices if not os.access(node.host_path, os.R_OK | os.W_OK)]
    return [f"{path} may not be opened by uid {os.geteuid()}" for path in closed if os.path.exists(path)]


def _near(name: str, registry: Registry) -> list[str]:
    kind, _, device = name.partition("=")
    names = registry.names()
    near = difflib.get_close_matches(name, names, 3, 0.75)
    others = [other for other in names if other.partition("=")[2] == device and other not in near]
    kinds = sorted({file.kind for file in registry.specs})
    lines = [f"near it: {', '.join(near)}"] if near else []
    lines += [f"another kind has that device: {', '.join(others)}"] if others else []
    if kind not in kinds and cdi_rules.is_qualified(name):
        lines.append(f"no file defines kind {kind}" + (f", there are {', '.join(kinds)}" if kinds else ""))
    return lines


def _elsewhere(name: str, scanned: tuple[str, ...]) -> list[str]:
    """Folders that some tools write to though engines don't scan them: /run/cdi where /var/run is no link to /run."""
    known = {os.path.realpath(folder) for folder in scanned}
    others = [folder for folder in ("/run/cdi", "/var/run/cdi", "/etc/cdi") if os.path.realpath(folder) not in known]
    found = [folder for folder in others if Registry([folder]).source(name)]
    return [f"{folder} has it, but is not scanned" for folder in found]
