"""The folders and files that finding a driver's files and device nodes looks into: while none of them has changed,
neither has what was found. For memory.py; not loaded where that remembers an answer.
"""

from __future__ import annotations

import os

from gpulet.injection.build import GATED
from gpulet.node import driver
from gpulet.node import driver_table as table
from gpulet.node.paths import below, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# what may gain or lose nodes while a driver runs
DEVICES = (
    "/dev", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels", "/dev/dri", "/dev/dri/by-path", "/dev/infiniband",
)  # fmt: skip


def looked_into(
    files: driver.DriverFiles, dev_root: str, ldcache: str = "", gated: Iterable[str] = ()
) -> tuple[str, ...]:
    """The places as host paths, each once. dev_root: the folder whose dev/ holds the nodes; ldcache: as for `find`;
    gated: as a Request has it."""
    root = files.root
    triplet = table.TRIPLETS.get(os.uname().machine, ("", ""))[1]
    folders = [*driver.library_folders(root, ldcache), *(f.format(triplet32=triplet) for f in table.FOLDERS_32)]
    folders += [*table.BINARY_FOLDERS, *table.XORG_FOLDERS]
    folders += [f"{folder}/{name}" for folder in files.folders for name in ("vdpau", *table.XORG_BESIDE)]
    folders += [_folder(file.path) for file in files.files if file.kind != "socket"]
    for path in table.CONFIGURATION:
        name = path.removeprefix("/etc").removeprefix("/usr/share")
        folders += [_folder(base + name) for base in (*table.CONFIGURATION_FOLDERS, "")]
    folders += driver.firmware_folders(files.version)
    services = [place for _capability, places in table.SOCKETS for place in places]  # their folders change all the time
    beside = [path for name in gated for path in GATED[name][1]]
    places = [ldcache or "/etc/ld.so.cache", *services, *beside]
    for folder in dict.fromkeys(folders):
        places += [folder, resolve(root, folder)] if folder else []  # a link on the way may change, or lead elsewhere
    found = [below(root, path) for path in places]
    return tuple(dict.fromkeys([*found, *(below(dev_root, place) for place in DEVICES)]))


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
