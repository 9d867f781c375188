"""One Injection: everything that is to be done to one container, decided once and carried out in one of four ways.

Paths named `path` or `target` are as the container sees them; `source` and `host_path` are the host's.
`why` says which rule and which fact put the item there, for `gpulet explain`. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.value import Value

ROOT = -1  # a node's owner that is said to be root: 0 is what nobody says anything of


class DeviceNode(Value):
    """A device node in the container. mode: permission bits; uid, gid: 0 for the container's user, ROOT for root;
    access: the cgroup rule's letters out of "rwm"."""

    path: str
    host_path: str
    major: int
    minor: int
    type: str = "c"
    mode: int = 0o666
    uid: int = 0
    gid: int = 0
    access: str = "rwm"
    why: str = ""


class Mount(Value):
    """A bind mount. kind: "library", "library32", "binary", "firmware", "socket", "config" or "other"."""

    source: str
    path: str
    options: tuple[str, ...] = ("ro", "nosuid", "nodev", "rbind", "rprivate")
    kind: str = "other"
    type: str = ""
    why: str = ""


class SymLink(Value):
    """A symbolic link at `path` whose text is `target`."""

    target: str
    path: str
    why: str = ""

    def leads_to(self) -> str:
        """The path that the link ends at, by its text."""
        if self.target.startswith("/"):
            return os.path.normpath(self.target)
        return os.path.normpath(f"{self.path.rpartition('/')[0]}/{self.target}")


class Hook(Value):
    """An OCI hook that is not ours: kept as it stands. stage: "prestart", "createRuntime", ..."""

    stage: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int = 0


class RootfsWork(Value):
    """What is to be prepared inside the root file system, beneath it and nowhere else.

    links: symbolic links; folders: library folders that go first in the loader's cache; host_driver: the driver's
    version where the image's forward-compatibility libraries are to be weighed against it, else ""; host_cuda: the
    CUDA version for the same on Tegra; compat_folder: where the image keeps those libraries; freeze_device_nodes:
    hide ModifyDeviceFiles so that the driver makes no device nodes in the container; profile_minors: GPU minors for
    EGLVisibleDGPUDevices in the application profile, () for none; device_links: links beside device nodes, each wanted
    only where the node that it leads to is in the container.
    """

    links: tuple[SymLink, ...] = ()
    folders: tuple[str, ...] = ()
    host_driver: str = ""
    host_cuda: str = ""
    compat_folder: str = "/usr/local/cuda/compat"
    freeze_device_nodes: bool = False
    profile_minors: tuple[int, ...] = ()
    device_links: tuple[SymLink, ...] = ()

    def empty(self) -> bool:
        """Whether nothing at all is to be done."""
        return not (
            self.links
            or self.folders
            or self.host_driver
            or self.host_cuda
            or self.freeze_device_nodes
            or self.profile_minors
            or self.device_links
        )


class Injection(Value):
    """Everything for one container. env: (name, value) pairs that replace the container's; gids: additional groups;
    proc_gpus: PCI bus ids whose /proc/driver/nvidia/gpus folder a live container is to see; proc_mig: capability
    files (/proc/driver/nvidia/capabilities/.../access) for the same; net_devices: (name on the host, name in the
    container); intel_rdt: fields of linux.intelRdt as pairs.
    """

    devices: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    gids: tuple[int, ...] = ()
    hooks: tuple[Hook, ...] = ()
    rootfs: RootfsWork = RootfsWork()
    proc_gpus: tuple[str, ...] = ()
    proc_mig: tuple[str, ...] = ()
    net_devices: tuple[tuple[str, str], ...] = ()
    intel_rdt: tuple[tuple[str, object], ...] = ()
