"""Facts about the node without NVML: /proc/driver/nvidia, /proc/devices, /dev and /sys.

Initialising NVML takes seconds on a node whose driver isn't kept loaded; reading these takes about a millisecond. What
can't be known this way: MIG UUIDs and NVML's MIG slots, compute capability, memory, links. The layout of the files is
the NVIDIA kernel module's (README of the driver, chapter "The /proc interface"); mig-minors is described in the MIG
user guide. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.errors import NodeError
from gpulet.node import devices
from gpulet.node.gpu import Gpu, Lost, MigDevice, NodeFacts
from gpulet.node.paths import below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DRIVER = "/proc/driver/nvidia"
MIG_MINORS = "/proc/driver/nvidia-caps/mig-minors"

# The CUDA version of each driver branch (CUDA toolkit release notes, table of driver versions), ascending.
_CUDA_OF_BRANCH = (
    (384, "9.0"), (390, "9.1"), (396, "9.2"), (410, "10.0"), (418, "10.1"), (440, "10.2"), (450, "11.0"),
    (455, "11.1"), (460, "11.2"), (465, "11.3"), (470, "11.4"), (495, "11.5"), (510, "11.6"), (515, "11.7"),
    (520, "11.8"), (525, "12.0"), (530, "12.1"), (535, "12.2"), (545, "12.3"), (550, "12.4"), (555, "12.5"),
    (560, "12.6"), (565, "12.7"), (570, "12.8"), (575, "12.9"), (580, "13.0"),
)  # fmt: skip


def read_text(path: str) -> str | None:
    """The file's text, or None where it can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def proc_root(root: str) -> str:
    """The folder whose proc/ tells about the driver: `root` where it has a proc/driver/nvidia, else "/"."""
    return root if os.path.isdir(below(root, DRIVER)) else "/"


def sys_root(root: str) -> str:
    """The folder whose sys/ tells about PCI devices: `root` where it has one, else "/"."""
    return root if os.path.isdir(below(root, "/sys/bus/pci/devices")) else "/"


def pci_name(bus_id: str) -> str:
    """A bus id as sysfs and /proc/driver/nvidia/gpus spell it: domain of four digits where that is enough."""
    return bus_id[4:] if len(bus_id) == 16 and bus_id.startswith("0000") else bus_id


def nvml_bus_id(bus_id: str) -> str:
    """A bus id as NVML spells it: domain of eight digits; in lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain:0>8}:{rest}"


def cuda_of(driver: str) -> str:
    """The CUDA version that a driver version brings ("12.8" of "570.86.15"), "" where unknown."""
    major = driver.partition(".")[0]
    if not major.isdigit() or int(major) < _CUDA_OF_BRANCH[0][0] or int(major) >= _CUDA_OF_BRANCH[-1][0] + 10:
        return ""
    return [cuda for branch, cuda in _CUDA_OF_BRANCH if branch <= int(major)][-1]


def parse_version(text: str) -> str:
    """The driver version in /proc/driver/nvidia/version ("570.86.15"), "" where there is none."""
    for word in text.partition("\n")[0].split():
        parts = word.split(".")
        if len(parts) in (2, 3) and all(part.isdigit() for part in parts) and len(parts[0]) >= 3:
            return word
    return ""


def driver_version(root: str = "/") -> str:
    """The version of the kernel module that runs, "" where none is loaded."""
    return parse_version(read_text(below(proc_root(root), DRIVER + "/version")) or "")


def parse_information(text: str) -> dict[str, str]:
    """The "Key: value" lines of one GPU's `information` file."""
    pairs = (line.partition(":") for line in text.split("\n"))
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _gpu(root: str, proc: str, dev: str, folder: str, index: int) -> Gpu | Lost:
    bus_id = nvml_bus_id(folder)
    text = read_text(below(proc, f"{DRIVER}/gpus/{folder}/information"))
    if text is None:
        return Lost(index, "its information file can't be read", bus_id)
    said = parse_information(text)
    uuid = said.get("GPU UUID", "")
    if "?" in uuid:  # the driver knows it only once the GPU has been initialised
        uuid = ""
    if said.get("GPU Excluded", "No") == "Yes":
        return Lost(index, "excluded by the driver's NVreg_ExcludedGpus", bus_id, uuid)
    minor = said.get("Device Minor", "")
    if not minor.isdigit():
        return Lost(index, f"the driver gives no device minor (seen {minor!r})", bus_id, uuid)
    sysfs = sys_root(root)
    drm, links = devices.drm_of(sysfs, dev, pci_name(bus_id))
    numa = (read_text(below(sysfs, f"/sys/bus/pci/devices/{pci_name(bus_id)}/numa_node")) or "").strip()
    return Gpu(
        index,
        int(minor),
        uuid,
        bus_id,
        name=said.get("Model", ""),
        numa=int(numa) if numa.isdigit() else -1,
        drm=drm,
        drm_links=links,
    )


def _sorted_numbers(folder: str, prefix: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(
        int(name[len(prefix) :]) for name in names if name.startswith(prefix) and name[len(prefix) :].isdigit()
    )


class CapMinors:
    """The nvidia-caps minors in mig-minors: lines "config N", "gpu0/gi1/access N", "gpu0/gi1/ci0/access N"."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._text = "\n" + (read_text(below(proc, MIG_MINORS)) or "")

    def of(self, key: str) -> int:
        """The minor of one line, -1 where it isn't there. The file has a thousand lines, so they aren't all parsed."""
        start = self._text.find(f"\n{key} ")
        if start < 0:
            return -1
        number = self._text[start + len(key) + 2 :].partition("\n")[0].strip()
        return int(number) if number.isdigit() else -1

    def access(self, gpu_minor: int, path: str) -> int:
        """The minor behind .../capabilities/gpu<minor>/mig/<path>/access, -1 where unknown."""
        known = self.of(f"gpu{gpu_minor}/{path}/access")
        if known >= 0:
            return known
        text = read_text(below(self._proc, f"{DRIVER}/capabilities/gpu{gpu_minor}/mig/{path}/access")) or ""
        number = parse_information(text).get("DeviceFileMinor", "")
        return int(number) if number.isdigit() else -1


def _mig_devices(proc: str, gpu: Gpu, minors: CapMinors) -> tuple[MigDevice, ...]:
    folder = below(proc, f"{DRIVER}/capabilities/gpu{gpu.minor}/mig")
    return tuple(
        MigDevice(
            f"MIG-{gpu.uuid}/{gi}/{ci}" if gpu.uuid else "",
            gpu.index,
            gpu.minor,
            -1,
            gi,
            ci,
            gi_minor=minors.access(gpu.minor, f"gi{gi}"),
            ci_minor=minors.access(gpu.minor, f"gi{gi}/ci{ci}"),
        )
        for gi in _sorted_numbers(folder, "gi")
        for ci in _sorted_numbers(f"{folder}/gi{gi}", "ci")
    )


def _with_mig(gpus: list[Gpu], migs: list[MigDevice], given: list[MigDevice]) -> Iterator[Gpu]:
    """The GPUs with the MIG devices that were given, those partitioned ones too of which none was."""
    parents = {mig.gpu for mig in migs}
    for gpu in gpus:
        mine = tuple(mig for mig in given if mig.gpu == gpu.index)
        yield gpu.replace(mig=mine, mig_enabled=True, mig_capable=True) if gpu.index in parents else gpu


def _gpu_node(gpu: Gpu) -> tuple[str, ...]:
    return (f"/dev/nvidia{gpu.minor}",)


def _mig_nodes(mig: MigDevice) -> tuple[str, ...]:
    return tuple(f"{devices.CAPS_FOLDER}/nvidia-cap{minor}" for minor in (mig.gi_minor, mig.ci_minor))


def needs_nvml(facts: NodeFacts, ids: Iterable[str]) -> bool:
    """Whether `ids` name something that only NVML knows: a MIG device by its new-style UUID or its slot, a GPU by a
    UUID that the driver doesn't tell before the GPU is initialised.
    """
    if facts.source == "nvml":
        return False
    unknown_uuid = any(not gpu.uuid for gpu in facts.gpus)
    for device in ids:
        if device.upper().startswith("MIG-") and not device.upper().startswith("MIG-GPU-"):
            return True
        if device.count(":") == 1 and device.replace(":", "").isdigit():
            return True
        if unknown_uuid and device.upper().startswith(("GPU-", "MIG-")):
            return True
    return False


def facts(root: str = "/", dev_root: str = "", *, every: bool = False) -> NodeFacts:
    """Facts from procfs. `root`: the driver root; its own proc/ counts where it has a driver's. `dev_root`: the folder
    whose dev/ holds the nodes, "" for the driver root's where it has one, else "/".

    A GPU's index is its place in the order of PCI addresses among those that the driver serves and that this node was
    given (see `devices.given`), as NVML counts; `every` counts the others too. A MIG device's slot is -1 and its UUID
    the old-style one, since procfs has no other. Raises NodeError where no kernel module has left a
    /proc/driver/nvidia and there is no /dev/dxg (WSL) either, or the driver root is no folder.
    """
    root = root or "/"
    if not os.path.isdir(root):
        raise NodeError(
            "no driver root",
            seen=root,
            wanted="a folder",
            remedy="correct nvidia-container-cli.root in config.toml, or --driver-root (/ for the host's driver)",
        )
    proc, dev = proc_root(root), devices.choose_dev_root(root, dev_root)
    if not os.path.isdir(below(proc, DRIVER)) and devices.char_device(dev, "/dev/dxg") is None:
        raise NodeError(
            "no NVIDIA kernel module",
            seen=f"neither {below(proc, DRIVER)} nor {below(dev, '/dev/dxg')}",
            remedy="load it with: modprobe nvidia"
            + ("" if root == "/" else f"; or correct the driver root, which is {root}"),
        )
    try:
        folders = sorted(os.listdir(below(proc, DRIVER + "/gpus")), key=nvml_bus_id)
    except OSError:
        folders = []
    gpus: list[Gpu] = []
    lost: list[Lost] = []
    for folder in folders:
        gpu = _gpu(root, proc, dev, folder, len(gpus))
        if isinstance(gpu, Lost):
            lost.append(gpu)
        else:
            gpus.append(gpu)
    nodes = devices.scan(dev, [name for gpu in gpus for name in gpu.drm])
    ours = gpus if every else devices.given(gpus, _gpu_node, nodes, dev)
    withheld = tuple(gpu.bus_id for gpu in gpus if gpu not in ours) if len(ours) < len(gpus) else ()
    if withheld:
        ours = [gpu.replace(index=index) for index, gpu in enumerate(ours)]
    minors = CapMinors(proc)
    migs = [mig for gpu in ours for mig in _mig_devices(proc, gpu, minors)]
    driver = driver_version(root)
    return NodeFacts(
        tuple(_with_mig(ours, migs, migs if every else devices.given(migs, _mig_nodes, nodes, dev))),
        "procfs",
        driver=driver,
        cuda=cuda_of(driver),
        lost=tuple(lost),
        withheld=withheld,
        majors=devices.parse_majors(read_text(below(proc, "/proc/devices")) or ""),
        imex=devices.imex_channels(dev),
        nodes=nodes,
        mig_minors=(minors.of("config"), minors.of("monitor")),
        dev_root=dev,
    )
