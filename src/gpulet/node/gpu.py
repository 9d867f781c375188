"""The facts about one node's GPUs, as values. Who asks fills in what it knows; the rest keeps its default.

Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.value import Value


class Link(Value):
    """How one GPU reaches another: the PCIe level of their nearest common point and the NVLinks between them.

    level: "board", "switch", "switches", "host-bridge", "numa", "system" (nvmlGpuTopologyLevel_t 0, 10, 20, 30, 40, 50)
    or "" where unknown; nvlinks counts active NVLinks, those through an NVSwitch included.
    """

    peer: int
    level: str = ""
    nvlinks: int = 0


class MigDevice(Value):
    """One MIG device: a compute instance (ci) of a GPU instance (gi) of a parent GPU.

    slot: NVML's MIG index on the parent (holes are possible); profile: "1g.10gb" and the like; memory in bytes;
    placement: (first memory slice, number of slices); *_minor: nvidia-caps device minors, -1 where unknown.
    """

    uuid: str
    gpu: int
    gpu_minor: int
    slot: int
    gi: int
    ci: int
    profile: str = ""
    memory: int = 0
    placement: tuple[int, int] = (0, 0)
    gi_minor: int = -1
    ci_minor: int = -1


class CharDevice(Value):
    """A character device node found on this node. path: as a container is to see it; host_path: where it lies;
    mode: permission bits.
    """

    path: str
    host_path: str
    major: int
    minor: int
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


class Gpu(Value):
    """One GPU that answered.

    index: NVML's; minor: of /dev/nvidia<minor>, not always the index; bus_id: NVML's form "00000000:19:00.0" in
    lower case, "" of one that is no PCI device but part of a Tegra (its minor is -1 then); arch: compute capability
    "9.0"; memory in bytes; numa: -1 where unknown; drm: names of its nodes in /dev/dri; drm_links: (text, path) of its
    links in /dev/dri/by-path; coherent: it shares the processor's page tables (ATS), as on a Grace superchip.
    """

    index: int
    minor: int
    uuid: str
    bus_id: str
    name: str = ""
    brand: str = ""
    arch: str = ""
    memory: int = 0
    numa: int = -1
    serial: str = ""
    mig_capable: bool = False
    mig_enabled: bool = False
    mig: tuple[MigDevice, ...] = ()
    links: tuple[Link, ...] = ()
    drm: tuple[str, ...] = ()
    drm_links: tuple[tuple[str, str], ...] = ()
    coherent: bool = False


class Lost(Value):
    """A GPU that is there but can't be used, and why; never hides the healthy ones."""

    index: int
    reason: str
    bus_id: str = ""
    uuid: str = ""

    @property
    def name(self) -> str:
        """What is known of it: "GPU 4", or "GPU 4 GPU-3f... 00000000:1b:00.0"."""
        return " ".join(filter(None, (f"GPU {self.index}", self.uuid, self.bus_id)))


class NodeFacts(Value):
    """What one look at the node found.

    source: "nvml", "procfs", or "tegra" (node/tegra.py; the plugin also says "wsl"); driver: "570.86.15" or "";
    cuda: "12.8" or ""; majors: /proc/devices entries that concern NVIDIA, name -> character major, sorted; imex:
    channel numbers present in /dev; nodes: the NVIDIA, DRM and fabric device nodes found, IMEX channels excepted
    (there can be thousands); mig_minors: nvidia-caps minors of "config" and "monitor", -1 where there is none;
    dev_root: the folder whose dev/ was looked into; nvml: the library's own version; withheld: PCI addresses of GPUs
    that the kernel has and that this node, being itself a container, wasn't given (source "procfs").
    """

    gpus: tuple[Gpu, ...]
    source: str
    driver: str = ""
    cuda: str = ""
    lost: tuple[Lost, ...] = ()
    majors: tuple[tuple[str, int], ...] = ()
    imex: tuple[int, ...] = ()
    nodes: tuple[CharDevice, ...] = ()
    mig_minors: tuple[int, int] = (-1, -1)
    dev_root: str = "/"
    nvml: str = ""
    withheld: tuple[str, ...] = ()

    def major(self, name: str) -> int:
        """The character major of a driver's name in /proc/devices, -1 where it isn't there."""
        return dict(self.majors).get(name, -1)
