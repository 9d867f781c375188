"""Who has which device now: from the kubelet's PodResources API, else from its checkpoint, which knows Pods by UID."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpulet.plugin.config import Config

TIMEOUT = 1.0  # seconds; monitoring must not wait for a kubelet that is busy
CHECKPOINT = "kubelet_internal_checkpoint"


@dataclass(frozen=True, slots=True)
class Holder:
    """One device in a container's hands. device: as the kubelet was told it; namespace "" and pod a UID where only the
    checkpoint is there."""

    namespace: str
    pod: str
    container: str
    resource: str
    device: str


async def holders(config: Config, resources: Iterable[str]) -> list[Holder]:
    """All holders of these resources' devices; none where neither source can be read."""
    wanted = set(resources)
    found = await _listed(config.pod_resources_socket) if os.path.exists(config.pod_resources_socket) else None
    if found is None:
        found = list(_checkpoint(os.path.join(config.kubelet_socket_dir, CHECKPOINT)))
    return [holder for holder in found if holder.resource in wanted]


async def _listed(socket: str) -> list[Holder] | None:
    import grpc
    import grpc.aio

    from gpulet.plugin.api import podresources_pb2 as pb
    from gpulet.plugin.api import podresources_pb2_grpc as rpc

    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.insecure_channel(f"unix:{socket}", options=options) as channel:
        try:
            reply = await rpc.PodResourcesListerStub(channel).List(pb.ListPodResourcesRequest(), timeout=TIMEOUT)
        except grpc.aio.AioRpcError:
            return None
    return [
        Holder(pod.namespace, pod.name, container.name, devices.resource_name, device)
        for pod in reply.pod_resources
        for container in pod.containers
        for devices in container.devices
        for device in devices.device_ids
    ]


def _checkpoint(path: str) -> Iterator[Holder]:
    try:
        with open(path, encoding="utf-8") as stream:
            entries = json.load(stream)["Data"]["PodDeviceEntries"] or []
        for entry in entries:
            for ids in (entry["DeviceIDs"] or {}).values():
                for device in ids:
                    yield Holder("", entry["PodUID"], entry["ContainerName"], entry["ResourceName"], device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # missing, torn, or of a form that we don't know
