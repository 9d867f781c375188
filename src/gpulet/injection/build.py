"""What goes into a container: the one place that decides it. Facts, driver files and a request make an Injection.

Pure: everything that has to be looked up on the node is in the facts and the driver's files. Loaded by the programs
in launch/.
"""

from __future__ import annotations

from gpulet.errors import UnknownDevice
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from gpulet.injection.select import Selection, select
from gpulet.node.devices import CAPS_FOLDER, IMEX_FOLDER, NVIDIA_MAJOR
from gpulet.node.driver import DriverFile, DriverFiles
from gpulet.node.gpu import CharDevice, Gpu, MigDevice, NodeFacts
from gpulet.node.paths import below
from gpulet.node.procfs import pci_name
from gpulet.request.model import Request
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Layout", "Selection", "build", "common", "device", "imex", "merge", "select"]

ALL = ("all",)
_CONTROL_MINORS = {"/dev/nvidiactl": 255, "/dev/nvidia-modeset": 254}  # fixed numbers under major 195
_CAPABILITIES = "/proc/driver/nvidia/capabilities"
_FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_SOCKET_OPTIONS = ("nosuid", "nodev", "noexec", "rbind", "rprivate")
GATED = {  # request -> beginnings of the device nodes' paths, mounts (kind, path) that come with them
    "gds": (("/dev/nvidia-fs",), ("/run/udev", "/etc/cufile.json")),
    "mofed": (("/dev/infiniband/uverbs", "/dev/infiniband/rdma_cm"), ()),
    "gdrcopy": (("/dev/gdrdrv",), ()),
    "nvswitch": (("/dev/nvidia-nvswitch",), ()),
}


class Layout(Value):
    """The container's folders for libraries and binaries; "" keeps the path that a file has below the driver root."""

    libraries: str = ""
    libraries32: str = ""
    binaries: str = ""


class _Capabilities:
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


# -- device nodes --


def _node(found: CharDevice, why: str) -> DeviceNode:
    return DeviceNode(
        found.path, found.host_path, found.major, found.minor, mode=found.mode, uid=found.uid, gid=found.gid, why=why
    )


class _Nodes:
    """Device nodes by path: as they are on the node, else from the numbers that the kernel has for them."""

    def __init__(self, facts: NodeFacts, dev_root: str) -> None:
        self.facts = facts
        self.root = dev_root or facts.dev_root
        self.known = {node.path: node for node in facts.nodes}

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


def _control_nodes(nodes: _Nodes, capabilities: _Capabilities) -> Iterator[DeviceNode]:
    if "/dev/dxg" in nodes.known:  # WSL has this one alone
        yield _node(nodes.known["/dev/dxg"], "the only node of WSL")
        return
    paths = ["/dev/nvidiactl"]
    if capabilities.compute_libraries:
        paths += ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    if "display" in capabilities:
        paths.append("/dev/nvidia-modeset")
    for path in paths:
        major = NVIDIA_MAJOR if path == "/dev/nvidiactl" else -1  # the others only where they exist
        node = nodes.get(path, major, _CONTROL_MINORS.get(path, -1), "control node")
        if node is not None:
            yield node


def _gpu_nodes(nodes: _Nodes, gpu: Gpu, capabilities: _Capabilities, why: str) -> Iterator[DeviceNode]:
    yield nodes.nvidia(gpu.minor, why)
    if capabilities.graphics:
        for name in gpu.drm:
            if f"/dev/dri/{name}" in nodes.known:
                yield _node(nodes.known[f"/dev/dri/{name}"], why)


def _mig_nodes(nodes: _Nodes, mig: MigDevice) -> Iterator[DeviceNode]:
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


def _gids(devices: Iterable[DeviceNode]) -> tuple[int, ...]:
    """Groups without which a process of the container could not open a node."""
    return tuple(sorted({node.gid for node in devices if node.gid and node.mode & 0o006 != 0o006}))


# -- files --


def _target(file: DriverFile, layout: Layout) -> str:
    """Where the container gets the file."""
    folder = {"library": layout.libraries, "library32": layout.libraries32, "binary": layout.binaries}.get(file.kind)
    return f"{folder}/{file.path.rpartition('/')[2]}" if folder else file.path


def _links(file: DriverFile, target: str) -> Iterator[SymLink]:
    old, new = file.folder, target.rpartition("/")[0]
    for text, path in file.links:
        moved = new + path[len(old) :] if path.startswith(old + "/") else path
        yield SymLink(text, moved, f"goes with {target}")


def _mounts(files: DriverFiles, capabilities: _Capabilities, layout: Layout, sockets: bool, mps: bool) -> Injection:
    mounts: list[Mount] = []
    links: list[SymLink] = []
    folders: dict[str, None] = {}
    for file in files.files:
        reason = capabilities.wants(file)
        if not reason or (file.kind == "socket" and not (mps if file.path.endswith("/nvidia-mps") else sockets)):
            continue
        target = _target(file, layout)
        options = _SOCKET_OPTIONS if file.kind == "socket" else _FILE_OPTIONS
        why = "every container gets it" if reason == "always" else f"driver capability {reason}"
        mounts.append(Mount(file.source, target, options, file.kind, why=why))
        links.extend(_links(file, target))
        if file.kind in ("library", "library32"):
            folders[target.rpartition("/")[0]] = None
    return Injection(mounts=tuple(mounts), rootfs=RootfsWork(tuple(dict.fromkeys(links)), tuple(folders)))


# -- the parts of an injection --


def common(
    facts: NodeFacts,
    files: DriverFiles,
    capabilities: Iterable[str] = ALL,
    *,
    dev_root: str = "",
    layout: Layout | None = None,
    sockets: bool = True,
    mps: bool = True,
) -> Injection:
    """What a container gets whichever GPUs it has: control nodes, driver files, links, the work in its root."""
    asked = _Capabilities(capabilities)
    nodes = tuple(_control_nodes(_Nodes(facts, dev_root), asked))
    placed = _mounts(files, asked, layout or Layout(), sockets, mps)
    rootfs = placed.rootfs.replace(
        host_driver=(facts.driver or files.version) if asked.compute_libraries else "", freeze_device_nodes=True
    )
    return Injection(nodes, placed.mounts, _environment(placed.mounts), _gids(nodes), rootfs=rootfs)


def _environment(mounts: Iterable[Mount]) -> tuple[tuple[str, str], ...]:
    """Where libcuda lies, for programs that look for it themselves; and "void", so that a runtime further down (a
    container in the container) leaves alone what has been done already.
    """
    named = (mount.path.rpartition("/") for mount in mounts if mount.kind == "library")
    cuda = dict.fromkeys(folder for folder, _, name in named if name.startswith("libcuda.so."))
    found = (("NVIDIA_CTK_LIBCUDA_DIR", ":".join(cuda)),) if cuda else ()
    return (*found, ("NVIDIA_VISIBLE_DEVICES", "void"))


def device(
    facts: NodeFacts, selection: Selection, capabilities: Iterable[str] = ALL, *, dev_root: str = ""
) -> Injection:
    """What belongs to the selected GPUs and MIG devices alone. Raises UnknownDevice where a MIG device has no nodes."""
    asked = _Capabilities(capabilities)
    nodes = _Nodes(facts, dev_root)
    found: list[DeviceNode] = []
    links: list[SymLink] = []
    for gpu in selection.gpus:
        found.extend(_gpu_nodes(nodes, gpu, asked, f"GPU {gpu.index}"))
        if asked.graphics:
            links.extend(SymLink(text, path, f"GPU {gpu.index}") for text, path in gpu.drm_links)
    for mig in selection.migs:
        found.extend(_mig_nodes(nodes, mig))
    unique = {node.path: node for node in reversed(found)}  # the first reason stays
    minors = {gpu.minor for gpu in selection.gpus} | {mig.gpu_minor for mig in selection.migs}
    return Injection(
        tuple(unique[path] for path in sorted(unique)),
        gids=_gids(unique.values()),
        rootfs=RootfsWork(tuple(links), profile_minors=tuple(sorted(minors)) if asked.graphics else ()),
        proc_gpus=tuple(pci_name(bus_id) for bus_id in selection.bus_ids(facts)),
        proc_mig=tuple(
            f"{_CAPABILITIES}/gpu{mig.gpu_minor}/mig/gi{mig.gi}{part}/access"
            for mig in selection.migs
            for part in ("", f"/ci{mig.ci}")
        ),
    )


def imex(facts: NodeFacts, channels: Iterable[str], *, dev_root: str = "") -> Injection:
    """The nodes of IMEX channels, given as numbers or "all". Raises UnknownDevice for one that isn't there."""
    names = list(channels)
    wanted = [str(number) for number in facts.imex] if "all" in names else list(dict.fromkeys(names))
    root = dev_root or facts.dev_root
    found = []
    for name in wanted:
        if not (name.isascii() and name.isdigit()) or int(name) not in facts.imex:
            raise UnknownDevice(
                "unknown IMEX channel",
                seen=name,
                wanted=f"one of {', '.join(map(str, facts.imex[:8])) or 'none at all'}"
                + (f" ... ({len(facts.imex)} in all)" if len(facts.imex) > 8 else ""),
                remedy=f"create channels with: nvidia-modprobe -i {name}" if name.isdigit() else "give its number",
            )
        path = f"{IMEX_FOLDER}/channel{int(name)}"
        major = facts.major("nvidia-caps-imex-channels")
        found.append(DeviceNode(path, below(root, path), major, int(name), why="IMEX channel asked for"))
    return Injection(tuple(found))


def gated(facts: NodeFacts, names: Iterable[str], *, root: str = "/", dev_root: str = "") -> Injection:
    """Devices that a container must ask for by name (see GATED). Those absent from the node give nothing."""
    nodes = _Nodes(facts, dev_root)
    found: list[DeviceNode] = []
    mounts: list[Mount] = []
    for name in names:
        beginnings, paths = GATED[name]
        these = list(nodes.starting(beginnings, f"asked for as {name}"))
        found.extend(these)
        if these:
            mounts.extend(Mount(below(root, path), path, _FILE_OPTIONS, why=f"goes with {name}") for path in paths)
    return Injection(tuple(found), tuple(mounts), gids=_gids(found))


def _mig_management(facts: NodeFacts, request: Request, selection: Selection, dev_root: str) -> Injection:
    """The capability devices with which a container may partition ("config") or watch ("monitor") MIG."""
    nodes = _Nodes(facts, dev_root)
    asked = ((request.mig_config, facts.mig_minors[0], "config"), (request.mig_monitor, facts.mig_minors[1], "monitor"))
    found: list[DeviceNode] = []
    paths: list[str] = []
    for value, minor, name in asked:
        node = nodes.cap(minor, f"MIG {name} asked for") if value else None
        if node is not None:
            found.append(node)
            paths.append(f"{_CAPABILITIES}/mig/{name}")
    if found:
        for gpu in selection.gpus:
            for mig in gpu.mig:
                found.extend(_mig_nodes(nodes, mig))
    return Injection(tuple(found), proc_mig=tuple(paths))


def merge(parts: Iterable[Injection]) -> Injection:
    """Several injections as one: lists joined, each item once; of two nodes or mounts at one path the first stays."""
    parts = list(parts)
    devices: dict[str, DeviceNode] = {}
    mounts: dict[str, Mount] = {}
    for part in parts:
        for node in part.devices:
            devices.setdefault(node.path, node)
        for mount in part.mounts:
            mounts.setdefault(mount.path, mount)
    works = [part.rootfs for part in parts]
    return Injection(
        tuple(devices.values()),
        tuple(mounts.values()),
        tuple(dict(pair for part in parts for pair in part.env).items()),
        tuple(sorted({gid for part in parts for gid in part.gids})),
        tuple(dict.fromkeys(hook for part in parts for hook in part.hooks)),
        RootfsWork(
            tuple(dict.fromkeys(link for work in works for link in work.links)),
            tuple(dict.fromkeys(folder for work in works for folder in work.folders)),
            next((work.host_driver for work in works if work.host_driver), ""),
            next((work.host_cuda for work in works if work.host_cuda), ""),
            next(
                (work.compat_folder for work in works if work.host_driver or work.host_cuda), RootfsWork.compat_folder
            ),
            any(work.freeze_device_nodes for work in works),
            tuple(sorted({minor for work in works for minor in work.profile_minors})),
        ),
        tuple(dict.fromkeys(bus_id for part in parts for bus_id in part.proc_gpus)),
        tuple(dict.fromkeys(path for part in parts for path in part.proc_mig)),
    )


def build(
    facts: NodeFacts,
    files: DriverFiles,
    request: Request,
    *,
    dev_root: str = "",
    layout: Layout | None = None,
    sockets: bool = True,
    mps: bool = True,
) -> Injection:
    """Everything for one container. Empty where the request is.

    dev_root: the folder whose dev/ holds the nodes ("" for the facts'); layout: the container's folders for libraries
    and binaries, where they aren't to be the driver root's; sockets, mps: whether the daemons' sockets and the MPS
    folder go in. Raises UnknownDevice for an id or channel that isn't on this node.
    """
    if not request:
        return Injection()
    selection = select(facts, request.devices)
    parts = [
        common(facts, files, request.capabilities, dev_root=dev_root, layout=layout, sockets=sockets, mps=mps),
        device(facts, selection, request.capabilities, dev_root=dev_root),
        imex(facts, request.imex, dev_root=dev_root),
        gated(facts, request.gated, root=files.root, dev_root=dev_root),
        _mig_management(facts, request, selection, dev_root),
    ]
    return merge(parts)
