"""Who has which device now: from the kubelet's PodResources API, else from its checkpoint, which knows Pods by UID."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from google.protobuf.message import DecodeError

from gpulet.node.gpu import NodeFacts
from gpulet.plugin import files
from gpulet.plugin.aside import aside
from gpulet.plugin.config import Config
from gpulet.plugin.rpc.client import call
from gpulet.plugin.rpc.framing import CallFailed

TIMEOUT = 1.0  # seconds; monitoring must not wait for a kubelet that is busy
CHECKPOINT = "kubelet_internal_checkpoint"


class Holder(NamedTuple):
    """One device in a container's hands. device: as the kubelet was told it; namespace "" and pod a UID where only the
    checkpoint is there."""

    namespace: str
    pod: str
    container: str
    resource: str
    device: str

    @property
    def owner(self) -> str:
        """Its Pod, in as many words as are known."""
        return f"{self.namespace}/{self.pod}" if self.namespace else self.pod


async def holders(config: Config, resources: Iterable[str]) -> list[Holder]:
    """All holders of these resources' devices; none where neither source can be read."""
    reply = await _ask(config.pod_resources_socket) if os.path.exists(config.pod_resources_socket) else None
    return await aside(_read, config, set(resources), reply)  # thousands take a while


def _read(config: Config, wanted: Container[str], reply: bytes | None) -> list[Holder]:
    found = _listed(reply) if reply is not None else None
    if found is None:
        found = list(checkpoint(config.kubelet_socket_dir))
    return [holder for holder in found if holder.resource in wanted]


class Audit:
    """What is wrong with the kubelet's books: devices that somebody holds and that are gone or not offered any more,
    and devices that two Pods hold. Each trouble is told once."""

    def __init__(self) -> None:
        self._version: object = None
        self._told: set[str] = set()

    async def news(
        self, config: Config, offered: Mapping[str, Collection[str]], there: frozenset[str]
    ) -> list[tuple[str, str]]:
        """(kind, text) of each trouble not told yet. offered: resource -> ids; there: what the node has. Looks only
        where the checkpoint has changed, or what is offered, or there; and then into the kubelet's own list, as the
        checkpoint shows the devices of a Pod that is gone until others are given out."""
        path = os.path.join(config.kubelet_socket_dir, CHECKPOINT)
        try:
            info = await aside(os.stat, path)
        except OSError:
            return []
        version = (info.st_ino, info.st_mtime_ns, {name: id(ids) for name, ids in offered.items()}, there)
        if version == self._version:
            return []
        self._version = version
        held = await holders(config, offered)
        found = await aside(lambda: list(troubles(held, offered, there)))
        new = [one for one in found if one[1] not in self._told]
        self._told = {text for _, text in found}
        return new


def on_node(facts: NodeFacts) -> frozenset[str]:
    """The ids of all that a container may have been given and can still use, offered now or not. Who has a GPU that is
    cut into MIG devices since can't."""
    whole = {gpu.uuid for gpu in facts.gpus if not gpu.mig_enabled}
    return frozenset(whole | {mig.uuid for gpu in facts.gpus for mig in gpu.mig})


def troubles(
    held: Iterable[Holder], offered: Mapping[str, Collection[str]], there: Container[str] = ()
) -> Iterator[tuple[str, str]]:
    """("AllocatedGPUGone" or "GPUDoublyAllocated", text) for each device; "" in place of the kind where nobody has to
    do anything: replicas come and go by an edit of the configuration, and the GPU stays."""
    pods: dict[tuple[str, str], list[str]] = {}
    for one in held:
        owners = pods.setdefault((one.resource, one.device), [])
        if one.owner not in owners:  # a Pod's containers may pass a device on
            owners.append(one.owner)
    bases = {_base(device) for ids in offered.values() for device in ids} if pods else set()
    for (resource, device), owners in pods.items():
        if device not in offered[resource] and (_base(device) in bases or _base(device) in there):
            again = ", which may be handed out again" if _base(device) in bases else ""
            whose = f"{resource} {device}, allocated to Pod {', '.join(owners)}"
            yield "", f"{whose}, is no longer offered; the Pod keeps its GPU{again}"
        elif device not in offered[resource]:
            yield (
                "AllocatedGPUGone",
                (
                    f"{resource} {device} is allocated to Pod {', '.join(owners)} and no longer exists on this node; "
                    "delete the Pod"
                ),
            )
        elif len(owners) > 1:
            yield (
                "GPUDoublyAllocated",
                (
                    f"{resource} {device} is allocated to the Pods {', '.join(owners)} at the same time; restart the "
                    "kubelet, and delete one of the Pods"
                ),
            )


def _base(device: str) -> str:
    """The id of what a replica is a part of; another id is its own."""
    return device.partition("::")[0]


async def _ask(socket: str) -> bytes | None:
    try:
        return await call(socket, "/v1.PodResourcesLister/List", b"", TIMEOUT)
    except CallFailed:
        return None


def _listed(answer: bytes) -> list[Holder] | None:
    from gpulet.plugin.api import podresources_pb2 as pb

    try:
        reply = pb.ListPodResourcesResponse.FromString(answer)
    except DecodeError:
        return None
    return [
        Holder(pod.namespace, pod.name, container.name, devices.resource_name, device)
        for pod in reply.pod_resources
        for container in pod.containers
        for devices in container.devices
        for device in devices.device_ids
    ]


def checkpoint(folder: str) -> Iterator[Holder]:
    """What the kubelet's checkpoint in its folder says, as far as it is of a form that we know: Pods by UID."""
    try:
        entries = json.loads(files.read(os.path.join(folder, CHECKPOINT)))["Data"]["PodDeviceEntries"] or []
        for entry in entries:
            whose = entry["PodUID"], entry["ContainerName"], entry["ResourceName"]
            for ids in (entry["DeviceIDs"] or {}).values():
                for device in ids:
                    if all(isinstance(word, str) for word in (*whose, device)):
                        yield Holder("", *whose, device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # missing, torn, or of a form that we don't know
