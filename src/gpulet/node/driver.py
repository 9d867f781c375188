"""The user-space driver's files beneath a root, by driver capability; what isn't there, and where we looked.

Only files of the running driver's version count. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.errors import DriverNotFound
from gpulet.node import driver_table as table
from gpulet.node.devices import choose_dev_root
from gpulet.node.driver_files import DriverFile, DriverFiles, Missing
from gpulet.node.driver_search import Search, cached_folders, firmware_folders, library_folders
from gpulet.node.paths import below
from gpulet.node.procfs import driver_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DriverFile", "DriverFiles", "Missing", "cached_folders", "find", "firmware_folders", "library_folders"]


def _folders32() -> list[str]:
    triplet = table.TRIPLETS.get(os.uname().machine, ("", ""))[1]
    return [folder.format(triplet32=triplet) for folder in table.FOLDERS_32 if triplet or "{" not in folder]


def _name(file: DriverFile) -> str:
    """A library's name without ".so" and version."""
    return file.path.rpartition("/")[2].partition(".so.")[0]


def _missing(files: Sequence[DriverFile], looked: Sequence[str]) -> Iterator[Missing]:
    stems = {_name(file) for file in files if file.kind == "library"}
    for capability in table.LIBRARIES:
        for stem in table.LIBRARIES[capability]:
            if stem not in stems:
                yield Missing(stem + ".so", tuple(looked))
    names = {file.path.rpartition("/")[2] for file in files if file.kind == "binary"}
    for name in table.BINARIES:
        if name not in names:
            yield Missing(name, table.BINARY_FOLDERS)


def find(
    root: str = "/",
    *,
    version: str = "",
    ldcache: str = "",
    search: Sequence[str] = (),
    drop: Sequence[str] = (),
    neutral: bool = False,
    config_search: Sequence[str] = (),
) -> DriverFiles:
    """The driver's files beneath `root`.

    version: of the running driver; "" asks the kernel module, then the libraries' own names. ldcache: a loader cache
    below the root to use instead of its own. search: library folders that are looked at first. drop: kinds not to
    look for. neutral: also the libraries that applications link with instead of a vendor's
    (driver_table.NEUTRAL_LIBRARIES). config_search: folders of the host to look for configuration in, instead of the
    root's.
    Raises DriverNotFound, naming every folder, where there is no driver library.
    """
    root = root or "/"
    if os.path.exists(below(choose_dev_root(root), "/dev/dxg")):
        from gpulet.node import wsl

        return wsl.find(root, version)
    look = Search(root, ldcache, search)
    running = version or driver_version(root)
    version = running or look.version()
    folders = look.folders(look.wanted, version, 64) if version else []
    if not folders:
        on_disk = look.version()
        raise DriverNotFound(
            f"no driver library of version {version or 'any'} beneath {root}",
            seen=f"libraries of version {on_disk}" if on_disk else "none",
            wanted="libcuda or libnvidia-ml in one of " + " ".join(dict.fromkeys(look.wanted)),
            remedy="reboot or reload the kernel module" if on_disk else "install the driver, or set the driver root",
        )
    narrow = () if "library32" in drop else look.folders(_folders32(), version, 32)
    folders32 = [folder for folder in narrow if folder not in folders]
    own = list(look.libraries(folders, version, "library"))
    others: dict[str, Callable[[], Iterator[DriverFile]]] = {
        "library32": lambda: look.libraries(folders32, version, "library32"),
        "binary": look.binaries,
        "firmware": lambda: look.firmware(version),
        "socket": look.sockets,
        "config": lambda: look.configuration(config_search),
        "xorg": lambda: look.xorg(folders, version),
    }
    files = [
        *own,
        *look.of_own_version([f for f in look.wanted if f not in folders], {_name(file) for file in own}),
        *(look.neutral(folders) if neutral else ()),
        *(file for kind, search_for in others.items() if kind not in drop for file in search_for()),
    ]
    kept = tuple(file for file in dict.fromkeys(files) if file.kind not in drop)
    return DriverFiles(root, version, kept, tuple(_missing(kept, folders)), tuple(folders))
