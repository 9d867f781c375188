"""Which device nodes go into a container. Pure; loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.errors import UnknownDevice
from gpulet.injection.capabilities import Capabilities
from gpulet.injection.model import DeviceNode
from gpulet.node.devices import CAPS_FOLDER, NVIDIA_MAJOR, kernel_major
from gpulet.node.gpu import CharDevice, Gpu, MigDevice, NodeFacts
from gpulet.node.paths import below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HIDDEN = 65534  # user_namespaces(7): what a group that isn't mapped is shown as; the number is no group's of its own
UVM = "/dev/nvidia-uvm"
NO_UVM = f"CUDA won't work: no {UVM} of the loaded driver; run: modprobe nvidia_uvm && nvidia-modprobe -u -c 0"
_CONTROL_MINORS = {"/dev/nvidiactl": 255, "/dev/nvidia-modeset": 254}  # fixed numbers under major 195


def _node(found: CharDevice, why: str) -> DeviceNode:
    return DeviceNode(
        found.path, found.host_path, found.major, found.minor, mode=found.mode, uid=found.uid, gid=found.gid, why=why
    )


class Nodes:
    """Device nodes by path: as they are on the node, else from the numbers that the kernel has for them."""

    def __init__(self, facts: NodeFacts, dev_root: str) -> None:
        self.facts = facts
        self.root = dev_root or facts.dev_root
        self.known = {node.path: node for node in facts.nodes}
        self.wsl = "/dev/dxg" in self.known  # WSL has this node alone, whatever the GPUs

    def get(self, path: str, major: int, minor: int, why: str) -> DeviceNode | None:
        """The node at `path`; made up from major and minor where it isn't in /dev, None where those are unknown."""
        if path in self.known:
            return _node(self.known[path], why)
        if major < 0 or minor < 0:
            return None
        return DeviceNode(path, below(self.root, path), major, minor, why=why)

    def starting(self, beginnings: tuple[str, ...], why: str) -> Iterator[DeviceNode]:
        return (_node(node, why) for path, node in sorted(self.known.items()) if path.startswith(beginnings))

    def nvidia(self, minor: int, why: str) -> DeviceNode:
        path = f"/dev/nvidia{minor}"
        return self.get(path, NVIDIA_MAJOR, minor, why) or DeviceNode(path, path, NVIDIA_MAJOR, minor, why=why)

    def cap(self, minor: int, why: str) -> DeviceNode | None:
        return self.get(f"{CAPS_FOLDER}/nvidia-cap{minor}", self.facts.major("nvidia-caps"), minor, why)


def _control_paths(capabilities: Capabilities) -> list[str]:
    paths = ["/dev/nvidiactl"]
    if capabilities.compute_libraries:
        paths += [UVM, "/dev/nvidia-uvm-tools"]
    if "display" in capabilities:
        paths.append("/dev/nvidia-modeset")
    return paths


def control_nodes(nodes: Nodes, capabilities: Capabilities) -> Iterator[DeviceNode]:
    if nodes.wsl:
        yield _node(nodes.known["/dev/dxg"], "the only node of WSL")
        return
    for path in _control_paths(capabilities):
        major = NVIDIA_MAJOR if path == "/dev/nvidiactl" else -1  # the others only where they exist
        node = nodes.get(path, major, _CONTROL_MINORS.get(path, -1), "control node")
        if node is not None:
            yield node


def unready(facts: NodeFacts, capabilities: Iterable[str]) -> tuple[str, ...]:
    """The control nodes that a container with these capabilities needs and that this node lacks, or has by a number
    which isn't the driver's any more: those of modules that nothing has loaded yet, or since the last start."""
    known = Nodes(facts, "").known
    if "/dev/dxg" in known:
        return ()

    def ready(path: str) -> bool:
        return path in known and kernel_major(facts, path) in (-1, known[path].major)

    return tuple(path for path in _control_paths(Capabilities(capabilities)) if not ready(path))


def gpu_nodes(nodes: Nodes, gpu: Gpu) -> Iterator[DeviceNode]:
    if not nodes.wsl and gpu.minor >= 0:  # a Tegra's own GPU has no node of this kind
        yield nodes.nvidia(gpu.minor, f"GPU {gpu.index}")


def drm_nodes(nodes: Nodes, gpu: Gpu) -> Iterator[DeviceNode]:
    paths = (f"/dev/dri/{name}" for name in gpu.drm)
    return (_node(nodes.known[path], f"GPU {gpu.index}") for path in paths if path in nodes.known)


def mig_nodes(nodes: Nodes, mig: MigDevice) -> Iterator[DeviceNode]:
    why = f"MIG device {mig.uuid or f'{mig.gpu}/{mig.gi}/{mig.ci}'}"
    yield nodes.nvidia(mig.gpu_minor, why)
    for minor, instance in ((mig.gi_minor, f"GPU instance {mig.gi}"), (mig.ci_minor, f"compute instance {mig.ci}")):
        node = nodes.cap(minor, f"{why}, {instance}")
        if node is None:
            raise UnknownDevice(
                f"no capability device of {instance} of GPU {mig.gpu}",
                seen=f"minor {minor}, major {nodes.facts.major('nvidia-caps')}",
                wanted=f"a node in {CAPS_FOLDER}, or nvidia-caps in /proc/devices and its minor in mig-minors",
                remedy="create them with: nvidia-modprobe -c 0",
            )
        yield node


def gids_of(devices: Iterable[DeviceNode]) -> tuple[int, ...]:
    """Groups without which a process of the container could not open a node; none that our own user namespace hides."""
    return tuple(sorted({node.gid for node in devices if node.gid not in (0, HIDDEN) and node.mode & 0o006 != 0o006}))
