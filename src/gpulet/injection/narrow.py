"""Leaves out of an Injection the driver files of capabilities that a container didn't ask for.

A CDI specification holds everything a driver has. What build.py decides while it makes an Injection is decided here for
one that comes out of a specification, by the same table of file names; a file that the table doesn't know stays.
Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.injection.capabilities import Capabilities
from gpulet.injection.model import Injection, RootfsWork, SymLink
from gpulet.node import driver_table as table
from gpulet.node.driver_files import DriverFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_DRM = "/dev/dri/"
_OPTIONS = frozenset({"ro", "nosuid", "nodev"})


def narrow(injection: Injection, capabilities: Iterable[str], *, drm: bool = False) -> Injection:
    """The same with the files of these capabilities alone, and without the links that would then lead nowhere.

    drm: nodes in /dev/dri are for drawing here; in other vendors' specifications they may be for computing.
    """
    asked = Capabilities(capabilities)
    if drm and not asked.graphics:
        injection = _without_drawing(injection)
    left_out = {mount.path for mount in injection.mounts if not _stays(mount.path, asked)}
    if not left_out:
        return injection
    mounts = tuple(mount for mount in injection.mounts if mount.path not in left_out)
    links = _leading_somewhere(injection.rootfs.links, left_out)
    return injection.replace(mounts=mounts, rootfs=injection.rootfs.replace(links=links))


def narrow_config(
    config: dict[str, Any], work: RootfsWork, capabilities: Iterable[str]
) -> tuple[dict[str, Any], RootfsWork]:
    """The same for a config.json into which an engine has put a specification, and for the work of its hooks. Only a
    mount as specifications have them counts: of a file that lies at the same place beneath the driver's root, with
    options that people's own mounts don't have."""
    asked = Capabilities(capabilities)
    mounts = config.get("mounts") or []
    left_out = {path for path in map(_specified, mounts) if path and not _stays(path, asked)}
    if not left_out:
        return config, work
    config = {**config, "mounts": [entry for entry in mounts if _specified(entry) not in left_out]}
    return config, work.replace(links=_leading_somewhere(work.links, left_out))


def _specified(entry: dict[str, Any]) -> str:
    """The place of a mount that may be of a specification, "" for another."""
    path, options = str(entry.get("destination") or ""), set(entry.get("options") or ())
    alike = options >= _OPTIONS and options & {"bind", "rbind"}
    return path if alike and str(entry.get("source") or "").endswith(path) else ""


def _without_drawing(injection: Injection) -> Injection:
    work = injection.rootfs
    return injection.replace(
        devices=tuple(node for node in injection.devices if not node.path.startswith(_DRM)),
        rootfs=work.replace(
            links=tuple(link for link in work.links if not link.path.startswith(_DRM)),
            device_links=tuple(link for link in work.device_links if not link.path.startswith(_DRM)),
            profile_minors=(),
        ),
    )


def _stays(path: str, asked: Capabilities) -> bool:
    capability = capability_of(path)
    if capability is None:
        return True
    kind = "binary" if path.rpartition("/")[2] in table.BINARIES else "library"
    return bool(asked.wants(DriverFile(path, path, kind, capability)))


def capability_of(path: str) -> str | None:
    """The capability of a driver's file by its path in the container; None where it is no file of the table."""
    name = path.rpartition("/")[2]
    if path in table.CONFIGURATION:
        return table.CONFIGURATION[path]
    if name in table.BINARIES:
        return table.BINARIES[name]
    stem, suffix, _ = name.partition(".so")
    return table.CAPABILITY_OF_LIBRARY.get(stem) if suffix else None


def _leading_somewhere(links: tuple[SymLink, ...], left_out: set[str]) -> tuple[SymLink, ...]:
    """Links go in chains (libcuda.so -> libcuda.so.1 -> libcuda.so.570.86.15): whoever leads to a gone one goes too."""
    gone = set(left_out)
    while True:
        more = {link.path for link in links if link.path not in gone and _target(link) in gone}
        if not more:
            return tuple(link for link in links if link.path not in gone)
        gone |= more


def _target(link: SymLink) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(link.path), link.target))
