"""The values that tell of a driver's files. Loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.value import Value


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
