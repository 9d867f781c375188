"""Containers and config.json contents for tests of the request, the runtime and the hook."""

from __future__ import annotations

from typing import Any

from gpulet.request.bundle import Container

UID = "50aa85bb-982e-49cd-b949-24046615e118"
FOLDER = "/var/run/nvidia-container-devices"
GPUS = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-aaaaaaaa-0000-0000-0000-000000000001")


def pod(name: str = "two", container: str = "main", uid: str = UID, kind: str = "container") -> dict[str, str]:
    """The annotations that containerd writes."""
    cri = "io.kubernetes.cri."
    return {
        f"{cri}container-type": kind,
        f"{cri}container-name": container,
        f"{cri}sandbox-name": name,
        f"{cri}sandbox-namespace": "default",
        f"{cri}sandbox-uid": uid,
    }


# The annotations that CRI-O writes.
CRIO = {
    "io.kubernetes.cri-o.ContainerType": "container",
    "io.kubernetes.container.name": "main",
    "io.kubernetes.pod.uid": UID,
    "io.kubernetes.pod.name": "two",
    "io.kubernetes.pod.namespace": "default",
}
# Those of a container with one more, of the other engine, that a Pod can set.
FORGED_SANDBOXES = (
    CRIO | {"io.kubernetes.cri.container-type": "sandbox"},
    CRIO | pod(kind="sandbox"),
    pod() | {"io.kubernetes.cri-o.ContainerType": "sandbox"},
)


def config(
    *env: str,
    mounts: tuple[str, ...] = (),
    annotations: dict[str, str] | None = None,
    privileged: bool = False,
    cgroup: str = f"/kubepods/besteffort/pod{UID}/abc",
) -> dict[str, Any]:
    """A config.json as an engine writes it. mounts: names under the folder of the volume-mounts strategy."""
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["sh"],
            "cwd": "/",
            "env": ["PATH=/bin", *env],
            "capabilities": {"bounding": ["CAP_CHOWN", "CAP_SYS_ADMIN"] if privileged else ["CAP_CHOWN"]},
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            *({"destination": f"{FOLDER}/{name}", "source": "/dev/null", "type": "bind"} for name in mounts),
        ],
        "annotations": annotations or {},
        "linux": {
            "cgroupsPath": cgroup,
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": "mount"}],
        },
    }


def container(*env: str, **more: Any) -> Container:
    """The same as `config`, read."""
    return Container.from_config(config(*env, **more), "/bundle")
