"""The values that tell of a driver's files. Loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.node import driver_table as table
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class DriverFile(Value):
    """One file or folder of the driver.

    path: as seen below the root, which is where the container gets it; source: on the host; kind: "library",
    "library32", "binary", "firmware", "socket", "config" or "xorg"; capability: one of driver_table's; soname: of a
    library; links: (text, path) of symbolic links to be made with it.
    """

    path: str
    source: str
    kind: str
    capability: str = ""
    soname: str = ""
    links: tuple[tuple[str, str], ...] = ()

    @property
    def folder(self) -> str:
        """The folder that holds it."""
        return self.path.rpartition("/")[0]


class Missing(Value):
    """A file that a driver should have and that wasn't found; looked: the places, below the root."""

    name: str
    looked: tuple[str, ...]


class DriverFiles(Value):
    """What was found beneath `root`. folders: the driver's 64-bit library folders, first the one with libcuda."""

    root: str
    version: str
    files: tuple[DriverFile, ...] = ()
    missing: tuple[Missing, ...] = ()
    folders: tuple[str, ...] = ()


def lacking(files: DriverFiles, capabilities: Iterable[str] = tuple(table.ESSENTIAL)) -> tuple[str, ...]:
    """What of these driver capabilities, by default the essential ones, isn't installed on the host, a line for each:
    "compute: no libcuda.so.1", "video: no file of it". Distributions pack some parts of a driver apart.
    """
    libraries = [file for file in files.files if file.kind == "library"]
    stems = {file.path.rpartition("/")[2].partition(".so")[0] for file in libraries}
    have = {"compat32" if file.kind == "library32" else file.capability for file in files.files}
    have |= {"display"} if table.GRAPHICS in have else set()
    all_of_one = any(not file.capability for file in libraries)  # WSL: each container gets each library
    found = []
    for name in capabilities:
        library = table.ESSENTIAL.get(name)
        if library and library not in stems:
            found.append(f"{name}: no {library}.so.1")
        elif not library and not all_of_one and name not in have:
            found.append(f"{name}: no file of it")
    return tuple(found)
