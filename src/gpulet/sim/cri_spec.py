"""A container's config.json as containerd writes it, before any runtime has seen it.

What containerd 2 and the kubelet really write was taken from bundles of a real cluster: the order of the environment
(the image's, then the plugin's, then the Pod's own, later values replacing earlier ones), the CRI annotations, the
cgroup path with the Pod's UID, and the namespaces shared with the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpulet.sim import cdi_engine
from gpulet.sim.allocation import Allocation
from gpulet.sim.images import image_env
from gpulet.sim.pods import ContainerSpec, Pod

# what containerd gives a container that isn't privileged
CAPABILITIES = [
    *("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID"),
    *("CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL"),
    "CAP_AUDIT_WRITE",
]
# what a privileged one has besides
PRIVILEGED = [
    *CAPABILITIES,
    *("CAP_SYS_ADMIN", "CAP_SYS_PTRACE", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_NICE", "CAP_SYS_TIME"),
    *("CAP_NET_ADMIN", "CAP_DAC_READ_SEARCH", "CAP_IPC_LOCK", "CAP_LEASE", "CAP_AUDIT_CONTROL"),
]
MASKED = ["/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]


def oci_config(
    pod: Pod,
    spec: ContainerSpec | None,
    allocation: Allocation | None,
    *,
    args: Sequence[str],
    sandbox_pid: int = 0,
    cgroups_path: str,
    cdi_annotations: bool = False,
) -> dict[str, Any]:
    """One container's config.json, before any shim has seen it. No spec: the sandbox's."""
    plugin_env = [f"{name}={value}" for name, value in sorted(allocation.envs.items())] if allocation else []
    pod_env = [f"{name}={value}" for name, value in spec.env] if spec else []
    privileged = bool(spec and spec.privileged)
    shared = {"ipc": sandbox_pid, "uts": sandbox_pid, "network": sandbox_pid}
    namespaces: list[dict[str, str]] = [{"type": "pid"}, {"type": "mount"}]
    for kind, pid in shared.items():
        path = {"path": f"/proc/{pid}/ns/{'net' if kind == 'network' else kind}"} if pid else {}
        namespaces.append({"type": kind} | path)
    config: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": (spec.run_as_user if spec else 0) or 0, "gid": 0},
            "args": list(args),
            "env": merge_env(image_env(spec.image if spec else ""), [f"HOSTNAME={pod.name}"], plugin_env, pod_env),
            "cwd": "/",
            "capabilities": dict.fromkeys(
                ("bounding", "effective", "permitted"), PRIVILEGED if privileged else CAPABILITIES
            ),
            "oomScoreAdj": 1000,  # the highest value: raising is always allowed, lowering needs CAP_SYS_RESOURCE
            "noNewPrivileges": False,
        },
        "root": {"path": "rootfs"},
        "mounts": _mounts(allocation),
        "annotations": _annotations(pod, spec),
        "linux": {
            "resources": {"devices": [{"allow": privileged, "access": "rwm"}], "cpu": {"shares": 2}},
            "cgroupsPath": cgroups_path,
            "namespaces": namespaces,
            "maskedPaths": [] if privileged else MASKED,
            "readonlyPaths": [] if privileged else READ_ONLY,
        },
    }
    if allocation:
        devices = [
            {"path": device.container_path, "hostPath": device.host_path, "permissions": device.permissions}
            for device in allocation.devices
        ]
        cdi_engine.apply(config, [{"deviceNodes": devices}])
        if cdi_annotations:
            config["annotations"].update(allocation.annotations)
    return config


def _annotations(pod: Pod, spec: ContainerSpec | None) -> dict[str, str]:
    """The CRI keys that containerd writes."""
    prefix = "io.kubernetes.cri."
    annotations = {
        f"{prefix}container-type": "container" if spec else "sandbox",
        f"{prefix}sandbox-id": pod.uid,
        f"{prefix}sandbox-name": pod.name,
        f"{prefix}sandbox-namespace": pod.namespace,
        f"{prefix}sandbox-uid": pod.uid,
    }
    if spec:
        annotations |= {f"{prefix}container-name": spec.name, f"{prefix}image-name": spec.image}
    return annotations


def _mounts(allocation: Allocation | None) -> list[dict[str, Any]]:
    tmpfs = ["nosuid", "strictatime", "mode=755", "size=65536k"]
    pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"]
    rows: list[tuple[str, str, list[str]]] = [
        ("/proc", "proc", ["nosuid", "noexec", "nodev"]),
        ("/dev", "tmpfs", tmpfs),
        ("/dev/pts", "devpts", pts),
        ("/dev/mqueue", "mqueue", ["nosuid", "noexec", "nodev"]),
        ("/dev/shm", "tmpfs", ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
        ("/sys", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
    ]
    mounts: list[dict[str, Any]] = [
        {"destination": path, "type": kind, "source": kind, "options": options} for path, kind, options in rows
    ]
    for mount in allocation.mounts if allocation else ():
        options = ["rbind", "rprivate", "ro" if mount.read_only else "rw"]
        mounts.append(
            {"destination": mount.container_path, "type": "bind", "source": mount.host_path, "options": options}
        )
    return mounts


def merge_env(*lists: Sequence[str]) -> list[str]:
    """Joins lists of "NAME=value"; a later value replaces an earlier one and takes its place at the end."""
    merged: dict[str, str] = {}
    for entry in (entry for entries in lists for entry in entries):
        name = entry.partition("=")[0]
        merged.pop(name, None)
        merged[name] = entry
    return list(merged.values())
