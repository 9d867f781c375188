"""What the driver capabilities that a container asks for let in. Pure; loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.node.driver_files import DriverFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class Capabilities:
    """The driver capabilities asked for, as questions."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.everything = "all" in self.names

    def __contains__(self, name: str) -> bool:
        return self.everything or name in self.names

    @property
    def compute_libraries(self) -> bool:
        """Video needs the compute libraries too, though not the compute programs."""
        return "compute" in self or "video" in self

    @property
    def graphics(self) -> bool:
        return "graphics" in self or "display" in self

    def wants(self, file: DriverFile) -> str:
        """The capability that lets a file in, "always" for a file that every container gets, "" for none."""
        if file.capability == "":
            return "always"
        if self.everything:
            return "all"
        if file.kind == "library32" and "compat32" not in self.names:
            return ""
        if file.capability == "compute" and file.kind != "binary" and self.compute_libraries:
            return "compute" if "compute" in self else "video"
        if file.capability == "graphics" and self.graphics:
            return "graphics" if "graphics" in self else "display"
        return file.capability if file.capability in self.names else ""
