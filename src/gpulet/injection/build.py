"""What goes into a container: the one place that decides it. Facts, driver files and a request make an Injection.

Everything that has to be looked up on the node is in the facts and the driver's files, but for the two files that
`gated` looks for. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.errors import UnknownDevice
from gpulet.injection.capabilities import Capabilities
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from gpulet.injection.nodes import Nodes, control_nodes, drm_nodes, gids_of, gpu_nodes, mig_nodes
from gpulet.injection.select import Selection, select
from gpulet.node.devices import IMEX_FOLDER
from gpulet.node.driver import DriverFile, DriverFiles
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.node.paths import below
from gpulet.node.procfs import pci_name
from gpulet.request.model import Request
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Layout", "Selection", "build", "common", "device", "imex", "merge", "select"]

ALL = ("all",)
_CAPABILITIES = "/proc/driver/nvidia/capabilities"
_FILE_OPTIONS = ("ro", "nosuid", "nodev", "rbind", "rprivate")
_SOCKET_OPTIONS = ("nosuid", "nodev", "noexec", "rbind", "rprivate")
_CONSUMER = ("GEFORCE", "TITAN")
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


def _mounts(files: DriverFiles, capabilities: Capabilities, layout: Layout, sockets: bool, mps: bool) -> Injection:
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


def forward_compatible(gpus: Iterable[Gpu]) -> bool:
    """Whether an image's newer libcuda may run on all of these GPUs: on consumer GPUs CUDA ends with error 804.

    By brand where NVML told it, else by the model's name. The lists of brands (nvmlBrandType_t) in such libraries
    themselves leave out the same ones.
    """
    return not any(name in f"{gpu.brand} {gpu.name}".upper() for gpu in gpus for name in _CONSUMER)


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
    asked = Capabilities(capabilities)
    nodes = tuple(control_nodes(Nodes(facts, dev_root), asked))
    placed = _mounts(files, asked, layout or Layout(), sockets, mps)
    able = asked.compute_libraries and (not facts.gpus or any(forward_compatible([gpu]) for gpu in facts.gpus))
    rootfs = placed.rootfs.replace(
        host_driver=(facts.driver or files.version) if able else "", freeze_device_nodes=True
    )
    return Injection(nodes, placed.mounts, _environment(placed.mounts), gids_of(nodes), rootfs=rootfs)


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
    asked = Capabilities(capabilities)
    nodes = Nodes(facts, dev_root)
    found: list[DeviceNode] = []
    links: list[SymLink] = []
    for gpu in selection.gpus:
        found.extend(gpu_nodes(nodes, gpu))
    for mig in selection.migs:
        found.extend(mig_nodes(nodes, mig))
    for gpu in _drawing(facts, selection) if asked.graphics else ():
        found.extend(drm_nodes(nodes, gpu))
        links.extend(SymLink(text, path, f"GPU {gpu.index}") for text, path in gpu.drm_links)
    unique = {node.path: node for node in reversed(found)}  # the first reason stays
    minors = {gpu.minor for gpu in selection.gpus} | {mig.gpu_minor for mig in selection.migs}
    return Injection(
        tuple(unique[path] for path in sorted(unique)),
        gids=gids_of(unique.values()),
        rootfs=RootfsWork(tuple(links), profile_minors=tuple(sorted(minors)) if asked.graphics else ()),
        proc_gpus=tuple(pci_name(bus_id) for bus_id in selection.bus_ids(facts)),
        proc_mig=tuple(
            f"{_CAPABILITIES}/gpu{mig.gpu_minor}/mig/gi{mig.gi}{part}/access"
            for mig in selection.migs
            for part in ("", f"/ci{mig.ci}")
        ),
    )


def _drawing(facts: NodeFacts, selection: Selection) -> list[Gpu]:
    """The GPUs that can draw for this selection: a partitioned one can't, but in a MIG device made for graphics."""
    able = {mig.gpu for mig in selection.migs if "gfx" in mig.profile}
    able |= {gpu.index for gpu in selection.gpus if not gpu.mig_enabled}
    return [gpu for gpu in facts.gpus if gpu.index in able]


def imex(facts: NodeFacts, channels: Iterable[str], *, dev_root: str = "") -> Injection:
    """The nodes of IMEX channels, given as numbers or "all". Raises UnknownDevice for one that isn't there."""
    names = list(channels)
    wanted = [str(number) for number in facts.imex] if "all" in names else list(dict.fromkeys(names))
    root = dev_root or facts.dev_root
    found = []
    for name in wanted:
        if not (name.isascii() and name.isdigit() and len(name) < 10) or int(name) not in facts.imex:
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
    """Devices that a container must ask for by name (see GATED), and the files that go with them. What is absent from
    the node gives nothing: a mount without a source would keep the container from starting.
    """
    nodes = Nodes(facts, dev_root)
    found: list[DeviceNode] = []
    mounts: list[Mount] = []
    for name in names:
        beginnings, paths = GATED[name]
        these = list(nodes.starting(beginnings, f"asked for as {name}"))
        found.extend(these)
        there = (path for path in paths if these and os.path.exists(below(root, path)))
        mounts.extend(Mount(below(root, path), path, _FILE_OPTIONS, why=f"goes with {name}") for path in there)
    return Injection(tuple(found), tuple(mounts), gids=gids_of(found))


def _mig_management(facts: NodeFacts, request: Request, selection: Selection, dev_root: str) -> Injection:
    """The capability devices with which a container may partition ("config") or watch ("monitor") MIG."""
    nodes = Nodes(facts, dev_root)
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
                found.extend(mig_nodes(nodes, mig))
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
            tuple(dict.fromkeys(link for work in works for link in work.device_links)),
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
    selection = Selection() if Nodes(facts, dev_root).wsl else select(facts, request.devices)
    parts = [
        common(facts, files, request.capabilities, dev_root=dev_root, layout=layout, sockets=sockets, mps=mps),
        device(facts, selection, request.capabilities, dev_root=dev_root),
        imex(facts, request.imex, dev_root=dev_root),
        gated(facts, request.gated, root=files.root, dev_root=dev_root),
        _mig_management(facts, request, selection, dev_root),
    ]
    whole = merge(parts)
    if forward_compatible(selection.gpus):
        return whole
    return whole.replace(rootfs=whole.rootfs.replace(host_driver=""))
