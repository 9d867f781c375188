"""Who is believed: the container's environment, or the kubelet's ledger.

The ledger is the kubelet's own record of what it allocated (kubelet_internal_checkpoint of the device manager, written
before the container is created), keyed by Pod UID and container name. Under policy "kubelet" it alone decides: an
environment variable can be put into any image or Pod, the ledger can't. Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet import codec
from gpulet.request.bundle import Container
from gpulet.request.devices import unique
from gpulet.settings import Settings
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


TEGRA = "tegra"  # the one device id of device plugins that is no UUID


class Grant(Value):
    """One allocation: device ids without replica suffixes, and what the plugin answered with: the environment, and
    mounts as (source, destination)."""

    pod_uid: str
    container: str
    resource: str
    devices: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()


class Ledger(Value):
    """What the kubelet allocated. trouble: why it can't be used, "" where it can."""

    path: str
    grants: tuple[Grant, ...] = ()
    trouble: str = ""

    def of(self, pod_uid: str, container: str) -> tuple[Grant, ...]:
        """The grants of one container."""
        return tuple(g for g in self.grants if (g.pod_uid, g.container) == (pod_uid, container))


def read_ledger(path: str) -> Ledger:
    """Reads the kubelet's checkpoint. Never raises: whatever is wrong is the ledger's `trouble`, which denies."""
    try:
        data = codec.loads(codec.read_file(path))
    except OSError as error:
        return Ledger(path, trouble=f"can't be read: {error.strerror}")
    except ValueError:
        return Ledger(path, trouble="isn't JSON (torn, or not the kubelet's)")
    try:
        entries = data["Data"]["PodDeviceEntries"] or []
        return Ledger(path, tuple(grant for entry in entries if (grant := _grant(entry)) is not None))
    except (KeyError, TypeError, AttributeError, ValueError):
        return Ledger(path, trouble="has a form that this version doesn't know")


def believed(container: Container, settings: Settings) -> bool:
    """Whether the container's own word counts: always under policy "env", else for trusted Pods alone."""
    if settings.policy_grants == "env":
        return True
    pod = f"{container.pod_namespace}/{container.pod_name}"
    return container.confirmed and any(_matches(pattern, pod) for pattern in settings.policy_trusted)


def granted(container: Container, ledger: Ledger) -> tuple[tuple[str, ...], str]:
    """The container's devices and, where it has none, why."""
    if ledger.trouble:
        return (), f"the kubelet's ledger {ledger.path} {ledger.trouble}"
    if not (container.pod_uid and container.name):
        return (
            (),
            "config.json names no Pod and container: annotations of a CRI engine are missing or contradict each other",
        )
    if not container.confirmed:
        path = container.cgroups_path or "(none)"
        return (), (
            f"who it is can't be trusted: cgroupsPath {path} isn't of the Pod {container.pod_uid} in the annotations, "
            "or these contradict each other"
        )
    devices = unique([device for grant in ledger.of(container.pod_uid, container.name) for device in grant.devices])
    return devices, "" if devices else "the kubelet allocated no GPU to it"


class Answer(Container):
    """What the device plugin answered for a container, as if that were all it says: its word counts like that of a
    privileged container."""

    privileged: bool = True

    def position(self, name: str) -> str:
        """Where a variable stands, in words."""
        return "the device plugin's answer in the ledger"


def answered(container: Container, ledger: Ledger | None) -> Answer:
    """The environment and the mounts that the device plugin answered with for this container."""
    grants = ledger.of(container.pod_uid, container.name) if ledger else ()
    mounts = tuple((source, path) for grant in grants for source, path in grant.mounts)
    return Answer(env=tuple(pair for grant in grants for pair in grant.env), mounts=mounts)


def beyond(asked: tuple[str, ...], variable: str, value: str, container: Container, ledger: Ledger) -> bool:
    """Whether what a container asks for goes beyond its grants.

    A value that the plugin itself answered with (an index, the volume-mounts folder) is within; else every id must be.
    """
    grants = ledger.of(container.pod_uid, container.name)
    if variable and any((variable, value) in grant.env for grant in grants):
        return False
    allowed = {device for grant in grants for device in grant.devices}
    return any(device.rpartition("=")[2] not in allowed for device in asked)


def _matches(pattern: str, pod: str) -> bool:
    """ "namespace/name", where a * at the end stands for any rest; a namespace alone stands for all of its Pods."""
    if "/" not in pattern:
        pattern += "/*"
    return pod.startswith(pattern[:-1]) if pattern.endswith("*") else pod == pattern


def _grant(entry: dict[str, Any]) -> Grant | None:
    """One entry's GPUs; None where it concerns other devices. DeviceIDs was a list before Kubernetes 1.20."""
    ids = entry["DeviceIDs"] or {}
    listed = ids if isinstance(ids, list) else [device for devices in ids.values() for device in devices or []]
    devices = unique([str(device).partition("::")[0] for device in listed])
    # By the ids, not by the resource: nvidia.com/hostdev is a network card, and KubeVirt's plugin numbers IOMMU groups
    # under nvidia.com/..., which would be read as indices of GPUs that nobody granted.
    if not devices or not all(device.startswith(("GPU-", "MIG-")) or device == TEGRA for device in devices):
        return None
    who = str(entry["PodUID"]), str(entry["ContainerName"])
    return Grant(*who, str(entry["ResourceName"]), devices, *_answer(entry.get("AllocResp")))


def _answer(text: str | None) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """The environment and the mounts in a ContainerAllocateResponse: base64 of protobuf, where field 1 is
    map<string, string> envs and field 2 Mount {container_path = 1, host_path = 2} (k8s.io/kubelet deviceplugin
    v1beta1)."""
    if not text:
        return (), ()
    from binascii import a2b_base64

    env, mounts = [], []
    try:
        for number, body in _fields(a2b_base64(text)):
            if number in (1, 2):
                part = {key: value.decode() for key, value in _fields(body)}
                pair = part.get(1, ""), part.get(2, "")
                if number == 1:
                    env.append(pair)
                else:
                    mounts.append(pair[::-1])
    except ValueError:  # one plugin's odd answer: it counts for nothing, the allocation stands
        return (), ()
    return tuple(env), tuple(mounts)


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message; numbers are passed over. Raises ValueError."""
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 2:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("a field beyond the message's end")
            found.append((tag >> 3, data[at : at + size]))
            at += size
        elif kind == 0:
            at = _varint(data, at)[1]
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"unknown wire type {kind}")
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number beyond the message's end")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
