"""The embedded kubelet's PodResources API: who holds which devices, by the names of Pods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpulet.plugin.api import podresources_pb2 as pb
from gpulet.plugin.api import podresources_pb2_grpc as rpc

Held = tuple[str, str, str, str, Sequence[str]]  # namespace, Pod, container, resource, device ids


class PodResources(rpc.PodResourcesListerServicer):  # type: ignore[misc]
    """Answers from what `held` gives."""

    def __init__(self, held: Callable[[], Sequence[Held]]) -> None:
        self._held = held

    def List(self, request: Any, context: Any) -> Any:
        """All Pods with devices."""
        pods: dict[tuple[str, str], dict[str, list[Any]]] = {}
        for namespace, name, container, resource, ids in self._held():
            devices = pb.ContainerDevices(resource_name=resource, device_ids=ids)
            pods.setdefault((namespace, name), {}).setdefault(container, []).append(devices)
        return pb.ListPodResourcesResponse(
            pod_resources=[
                pb.PodResources(
                    namespace=namespace,
                    name=name,
                    containers=[pb.ContainerResources(name=one, devices=has) for one, has in containers.items()],
                )
                for (namespace, name), containers in pods.items()
            ]
        )
