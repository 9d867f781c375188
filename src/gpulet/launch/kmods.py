"""load-kmods: the driver's kernel modules loaded and its device nodes made, where a node lacks them.

Nothing here may stop a container: what fails is told and left. In a user namespace nothing is tried, as neither can be
done there. Numbers, owner and mode of the nodes: kernel documentation admin-guide/devices.txt (195), and the driver's
parameters DeviceFileUID, DeviceFileGID, DeviceFileMode and ModifyDeviceFiles (driver README, "nvidia-modprobe").
"""

from __future__ import annotations

import os
import stat

from gpulet.errors import NodeError
from gpulet.node import devices, procfs
from gpulet.node.paths import below, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpulet.node.gpu import NodeFacts

    Tell = Callable[[str], None]

MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset")
MODPROBE = "/sbin/modprobe"
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor; the class of display controllers
WHOLE = 4294967295  # identities that a machine's own user namespace maps


def prepare(
    root: str, facts: NodeFacts | None, channels: Iterable[str], tell: Tell, *, every: bool = False
) -> NodeFacts | None:
    """Loads and makes what is missing. Answers new facts where anything changed, else `facts`.

    facts: from procfs, None where the driver isn't loaded; channels: IMEX channels whose nodes are wanted too;
    every: as for procfs.facts. Without, a node that is itself a container gives itself no GPU that it wasn't given.
    """
    if not able(root):
        return facts
    loaded = [load(root, name, tell) for name in _missing_modules(root, facts)]
    if any(loaded):
        facts = _look(root, every)
    made = [make(root, *node, _parameters(root), tell) for node in missing_nodes(facts, channels)]
    return _look(root, every) if any(made) else facts


def make_ready(root: str, tell: Tell) -> NodeFacts | None:
    """The same for a node that nobody has looked at yet. Answers what is there then, whoever made it: containers that
    start at the same moment all come here."""
    prepare(root, _look(root, False), (), tell)
    return _look(root, False)


def _look(root: str, every: bool) -> NodeFacts | None:
    try:
        return procfs.facts(root, every=every)
    except NodeError:
        return None


def in_user_namespace(proc: str = "/proc") -> bool:
    """Whether this process's identities aren't the machine's own."""
    try:
        with open(f"{proc}/self/uid_map", encoding="ascii") as file:
            fields = file.read().split()
    except OSError:
        return False
    return fields != ["0", "0", str(WHOLE)]


def able(root: str) -> bool:
    """Whether this is the place for it: not in a user namespace, and not where the nodes would go into this machine's
    /dev by numbers that are those of another kernel's /proc."""
    foreign = procfs.proc_root(root) != "/" and devices.choose_dev_root(root) == "/"
    return not foreign and not in_user_namespace()


# -- modules


def _missing_modules(root: str, facts: NodeFacts | None) -> Iterator[str]:
    if facts is None:
        if has_gpu(root):
            yield from MODULES
        return
    if procfs.proc_root(root) != "/":
        return  # a tree with a /proc of its own is no running kernel
    if facts.major("nvidia-uvm") < 0:
        yield "nvidia_uvm"
    if not os.path.exists("/sys/module/nvidia_modeset/initstate"):
        yield "nvidia_modeset"


def has_gpu(root: str) -> bool:
    """Whether a display controller of NVIDIA's is on the PCI bus."""
    folder = below(procfs.sys_root(root), "/sys/bus/pci/devices")
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        vendor, kind = (procfs.read_text(f"{folder}/{name}/{fact}") or "" for fact in ("vendor", "class"))
        if vendor.startswith(NVIDIA) and kind.startswith(DISPLAY):
            return True
    return False


def load(root: str, module: str, tell: Tell) -> bool:
    """Runs modprobe beneath the driver root, with nothing but its folder in its environment."""
    program = (procfs.read_text("/proc/sys/kernel/modprobe") or "").strip() or MODPROBE
    child = os.fork()
    if not child:
        try:
            if root not in ("", "/"):
                os.chroot(root)
            os.chdir("/")
            os.execve(program, [program, module], {"PATH": "/sbin:/usr/sbin"})
        except OSError:
            pass
        os._exit(127)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tell(f"{program} {module}: {'done' if code == 0 else f'exit code {code}'}")
    return code == 0


# -- device nodes


def missing_nodes(facts: NodeFacts | None, channels: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """(path, major, minor) of each node that the driver has a number for and that isn't in /dev."""
    if facts is None:
        return
    there = {node.path: (node.major, node.minor) for node in facts.nodes}
    for path, major, minor in wanted_nodes(facts, channels):
        if major >= 0 and there.get(path) != (major, minor):
            imex = path.startswith(devices.IMEX_FOLDER) and minor in facts.imex
            if not imex:
                yield path, major, minor


def wanted_nodes(facts: NodeFacts, channels: Iterable[str]) -> Iterator[tuple[str, int, int]]:
    """(path, major, minor) of each node that a node with these facts should have; major -1 where it isn't known."""
    nvidia, uvm, caps = devices.NVIDIA_MAJOR, facts.major("nvidia-uvm"), facts.major("nvidia-caps")
    yield "/dev/nvidiactl", nvidia, 255
    for gpu in facts.gpus:  # minors as the driver gives them; counting PCI devices would be wrong where one is missing
        yield f"/dev/nvidia{gpu.minor}", nvidia, gpu.minor
    yield "/dev/nvidia-uvm", uvm, 0
    yield "/dev/nvidia-uvm-tools", uvm, 1
    if os.path.exists("/sys/module/nvidia_modeset/initstate"):
        yield "/dev/nvidia-modeset", nvidia, 254
    for gpu in facts.gpus:
        for mig in gpu.mig:
            for minor in (mig.gi_minor, mig.ci_minor):
                if minor >= 0:
                    yield f"{devices.CAPS_FOLDER}/nvidia-cap{minor}", caps, minor
    for minor in facts.mig_minors if any(gpu.mig_capable for gpu in facts.gpus) else ():
        if minor >= 0:
            yield f"{devices.CAPS_FOLDER}/nvidia-cap{minor}", caps, minor
    for channel in channels:
        yield f"{devices.IMEX_FOLDER}/channel{channel}", facts.major("nvidia-caps-imex-channels"), int(channel)


class Parameters:
    """What the driver says of device nodes: whether to make them, their owner and mode."""

    def __init__(self, text: str) -> None:
        said = procfs.parse_information(text)

        def number(name: str, default: int) -> int:
            value = said.get(name, "")
            return int(value) if value.isdigit() else default

        self.modify = number("ModifyDeviceFiles", 1) == 1
        self.owner = (number("DeviceFileUID", 0), number("DeviceFileGID", 0))
        self.mode = number("DeviceFileMode", 0o666) & 0o777


def _parameters(root: str) -> Parameters:
    return Parameters(procfs.read_text(below(procfs.proc_root(root), f"{procfs.DRIVER}/params")) or "")


def make(root: str, path: str, major: int, minor: int, said: Parameters, tell: Tell) -> bool:
    """Makes a node beneath the root, in place of one of other numbers. Answers whether it did."""
    if not said.modify:
        return False
    dev = devices.choose_dev_root(root)
    here = below(dev, resolve(dev, path))
    folder, _, name = here.rpartition("/")
    aside = f"{folder}/.{name}.{os.getpid()}"  # containers that start at the same moment see it whole, and always
    try:
        if os.path.exists(here) and os.stat(here).st_rdev == os.makedev(major, minor):
            return False  # behind a link, as with a driver in a container
        os.makedirs(folder, 0o755, exist_ok=True)
        os.mknod(aside, stat.S_IFCHR | said.mode, os.makedev(major, minor))
        try:
            os.chmod(aside, said.mode)  # whatever the umask was
            os.chown(aside, *said.owner)
            os.rename(aside, here)
        except OSError:
            os.unlink(aside)
            raise
    except OSError as error:
        tell(f"make device {here}: {error.strerror}")
        return False
    tell(f"make device {here} {major}:{minor}")
    return True
