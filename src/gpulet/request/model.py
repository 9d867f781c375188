"""What one container asks for, as a value. Loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.value import Value


class Request(Value):
    """One container's request, after policy.

    source: "volume-mounts", "cdi-annotations", "environment", "legacy-image", "ledger", or "" where the container
    asks for nothing (or may have nothing) and is left alone. devices: ids as asked for ("0", "0:1", "GPU-...",
    "MIG-...", "all", or CDI names "vendor/class=name"); () with a source means driver files and no GPU ("none").
    variable: the environment variable concerned, "" where none. capabilities: driver capabilities, sorted.
    requirements: NVIDIA_REQUIRE_* expressions. imex: channel numbers as text. gated: of "gds", "mofed", "gdrcopy",
    "nvswitch". mig_config, mig_monitor: the raw values. reason: one line for people.
    """

    source: str = ""
    devices: tuple[str, ...] = ()
    variable: str = ""
    capabilities: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    imex: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()
    mig_config: str = ""
    mig_monitor: str = ""
    privileged: bool = False
    reason: str = ""

    def __bool__(self) -> bool:
        """Whether anything is to be done for the container."""
        return bool(self.source)
