"""CDI specs of the kinds beside plain GPUs: WSL, management, and devices that a container must ask for by name."""

from __future__ import annotations

from gpulet.errors import CdiError
from gpulet.injection import build
from gpulet.injection.cdi_calls import HookCalls
from gpulet.injection.cdi_spec import HostPaths, assemble, edits_of
from gpulet.injection.model import DeviceNode, Injection
from gpulet.node.devices import IMEX_FOLDER
from gpulet.node.gpu import NodeFacts
from gpulet.node.paths import below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gpulet.node.driver import DriverFile, DriverFiles

VOID = {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
_NOT_GPUS = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")  # nodes of other drivers that share the prefix


def gated_spec(
    facts: NodeFacts,
    name: str,
    *,
    vendor: str = "nvidia.com",
    cls: str = "",
    root: str = "/",
    host_dev_root: str = "",
    paths: HostPaths | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The spec of "gds", "mofed", "gdrcopy" or "nvswitch": one device "all". Raises CdiError where there is none."""
    injection = build.gated(facts, (name,), root=root)
    if not injection.devices:
        raise CdiError(
            f"no device of {name} here",
            seen="no node " + " or ".join(build.GATED[name][0]),
            remedy="load its kernel module first",
        )
    paths = paths or HostPaths(dev_root=facts.dev_root, host_dev_root=host_dev_root)
    return assemble(f"{vendor}/{cls or name}", {"all": edits_of(injection, paths)}, VOID, annotations or {})


def wsl_spec(
    facts: NodeFacts,
    files: DriverFiles,
    *,
    vendor: str = "nvidia.com",
    cls: str = "gpu",
    calls: HookCalls | None = None,
    annotations: Mapping[str, str] | None = None,
    paths: HostPaths | None = None,
) -> dict[str, Any]:
    """The spec of a node under Windows: one device "all", since one node leads to every GPU.

    calls, paths: see HookCalls, HostPaths.
    """
    shared = build.common(facts, files, mps=False)
    if [node.path for node in shared.devices] != ["/dev/dxg"]:
        raise CdiError("no /dev/dxg", seen=below(facts.dev_root, "/dev"), remedy="update WSL: wsl --update")
    # Nothing in /proc/driver/nvidia to freeze, and no forward compatibility: Windows' driver serves CUDA.
    work = shared.rootfs.replace(freeze_device_nodes=False, host_driver="")
    common = edits_of(shared.replace(devices=(), rootfs=work), paths, calls)
    every = edits_of(Injection(shared.devices), paths)
    return assemble(f"{vendor}/{cls}", {"all": every}, common, annotations or {})


def management_spec(
    facts: NodeFacts,
    files: DriverFiles,
    *,
    vendor: str = "management.nvidia.com",
    cls: str = "gpu",
    calls: HookCalls | None = None,
    annotations: Mapping[str, str] | None = None,
    paths: HostPaths | None = None,
) -> dict[str, Any]:
    """The spec for containers that manage the driver itself: every NVIDIA node, no hook against making more, and
    nothing that only serves to draw. calls, paths: see HookCalls, HostPaths.
    """
    nodes = [
        DeviceNode(node.path, node.host_path, node.major, node.minor, mode=node.mode, uid=node.uid, gid=node.gid)
        for node in facts.nodes
        if node.path.startswith("/dev/nvidia") and not node.path[len("/dev/") :].startswith(_NOT_GPUS)
    ]
    major = facts.major("nvidia-caps-imex-channels")
    for number in facts.imex:
        path = f"{IMEX_FOLDER}/channel{number}"
        nodes.append(DeviceNode(path, below(facts.dev_root, path), major, number))
    if not nodes:
        raise CdiError("no NVIDIA device nodes", seen=below(facts.dev_root, "/dev"), remedy="run: nvidia-modprobe -u")
    managing = files.replace(files=tuple(file for file in files.files if not _only_draws(file)))
    shared = build.common(facts, managing, mps=False)
    work = shared.rootfs.replace(freeze_device_nodes=False)
    common = edits_of(shared.replace(devices=(), gids=(), rootfs=work), paths, calls)
    every = edits_of(Injection(tuple(nodes)), paths)
    return assemble(f"{vendor}/{cls}", {"all": every}, common, annotations or {})


def _only_draws(file: DriverFile) -> bool:
    """Configuration for graphics, X.Org's modules, EGL platforms, and the second word size that games want. The other
    graphics libraries are told apart by nobody: they have the driver's own version.
    """
    name = file.path.rpartition("/")[2]
    platform = name.startswith("libnvidia-egl-") or name == "nvidia-xconfig"
    return platform or file.kind in ("config", "xorg", "library32")
