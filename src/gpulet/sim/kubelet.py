"""An embedded kubelet: its device manager over real gRPC unix sockets, without the rest of a node.

What it does and in which order follows the kubelet's device manager (1.36): it calls back before Register returns,
takes every list as the whole truth about a resource, keeps capacity and zeroes allocatable when a stream ends, asks
for a preferred allocation before Allocate, and writes its checkpoint before a container is created.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from gpulet.errors import GpuletError
from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.plugin.api import podresources_pb2_grpc as podresources_rpc
from gpulet.sim.allocation import Allocation, merge
from gpulet.sim.checkpoint import Checkpoint, Entry
from gpulet.sim.endpoint import Endpoint
from gpulet.sim.podresources import Held, PodResources

if TYPE_CHECKING:
    from gpulet.sim.pods import Pod


class AdmissionError(GpuletError):
    """A pod is refused for good. code: the gRPC status code's name where the plugin refused, else ""."""

    def __init__(self, detail: str, code: str = "") -> None:
        super().__init__(f"UnexpectedAdmissionError: Allocate failed due to {detail}, which is unexpected")
        self.code = code


@dataclass(frozen=True)
class ResourceStatus:
    """A resource as the node's status shows it: capacity counts all devices, allocatable the healthy ones."""

    capacity: int
    allocatable: int
    healthy: tuple[str, ...]
    unhealthy: tuple[str, ...] = ()


class Kubelet(rpc.RegistrationServicer):  # type: ignore[misc]
    """The device manager of one node, with its sockets and its checkpoint in `folder`. pod_resources: where to serve
    the PodResources API too, None for nowhere."""

    def __init__(self, folder: Path, pod_resources: Path | None = None) -> None:
        self.folder = Path(folder)
        self.socket = self.folder / "kubelet.sock"
        self.registrations: list[tuple[str, str]] = []  # (resource, endpoint), every one ever taken
        self.calls: list[tuple[str, str, float]] = []  # (RPC, resource, seconds) of our calls to plugins
        self.checkpoint = self.folder / "kubelet_internal_checkpoint"
        self._ledger = Checkpoint(self.checkpoint)
        self._changed = threading.Condition(threading.RLock())
        self._admitting = threading.Lock()
        self._endpoints: dict[str, Endpoint] = {}
        self._devices: dict[str, dict[str, Any]] = {}  # resource -> id -> pb.Device
        self._server: Any = None
        self._running = False
        self._pod_resources = pod_resources
        self._pods: dict[str, Pod] = {}  # UID -> those admitted by `admit`
        self._gone: set[str] = set()  # UIDs whose devices are free, which the books still show (see `release`)

    def start(self) -> None:
        """Delete the folder's sockets, as the real one does, and open the registration service."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a plugin that goes away is no news for the terminal
        self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        for entry in self.folder.iterdir():
            if entry.is_socket():
                entry.unlink(missing_ok=True)
        with self._changed:
            self._ledger.read()
            for resource in self._ledger.registered:  # without a device until its plugin has registered again
                self._devices.setdefault(resource, {})
            self._running = True
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="kubelet")
        self._server = grpc.server(self._pool)
        rpc.add_RegistrationServicer_to_server(self, self._server)
        if self._pod_resources:
            self._pod_resources.parent.mkdir(parents=True, exist_ok=True)
            self._pod_resources.unlink(missing_ok=True)
            podresources_rpc.add_PodResourcesListerServicer_to_server(PodResources(self._held), self._server)
            self._server.add_insecure_port(f"unix:{self._pod_resources}")
        hidden = self.folder / ".kubelet.sock"  # renamed, so that the socket accepts from the moment it is seen
        self._server.add_insecure_port(f"unix:{hidden}")
        self._server.start()
        hidden.rename(self.socket)

    def stop(self) -> None:
        """End every stream and the service. The sockets stay behind, as when the process is killed."""
        if self._server is None:
            return
        with self._changed:
            self._running = False
            endpoints, self._endpoints = list(self._endpoints.values()), {}
        for endpoint in endpoints:
            endpoint.close()
        self._server.stop(None).wait()
        self._pool.shutdown()  # gRPC leaves a pool that it was given to its owner
        self._server = None

    def restart(self) -> None:
        """Stop and start: plugins have to register again; pods keep what they have."""
        self.stop()
        with self._changed:
            self._devices.clear()
        self.start()

    def __enter__(self) -> Kubelet:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # the registration service

    def Register(self, request: Any, context: Any) -> Any:
        """Take a plugin in: it must answer us before we answer it."""
        if request.version != "v1beta1":
            supported = "requested API version is not supported by kubelet. Supported version is v1beta1"
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to register device plugin: {supported}: {request.version}")
        if not _extended(request.resource_name):
            context.abort(grpc.StatusCode.UNKNOWN, f"the ResourceName {request.resource_name!r} is invalid")
        endpoint = Endpoint(self.folder / request.endpoint, request.resource_name, self._replace, self._lost)
        with self._changed:
            if not self._running:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the kubelet is stopping")
            old = self._endpoints.pop(request.resource_name, None)
            self._endpoints[request.resource_name] = endpoint
        if old:
            old.close()
        try:
            endpoint.open()
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed by a stop meanwhile
            endpoint.close()
            reason = _reason(error) if isinstance(error, grpc.RpcError) else str(error)
            context.abort(grpc.StatusCode.UNKNOWN, f"failed to dial device plugin {request.endpoint}: {reason}")
        with self._changed:
            self.registrations.append((request.resource_name, request.endpoint))
            self._changed.notify_all()
        return pb.Empty()

    def _replace(self, endpoint: Endpoint, message: Any) -> None:
        with self._changed:
            if self._endpoints.get(endpoint.resource) is endpoint:
                self._devices[endpoint.resource] = {device.ID: device for device in message.devices}
                self._write()
                self._changed.notify_all()

    def _lost(self, endpoint: Endpoint) -> None:
        with self._changed:
            if self._endpoints.get(endpoint.resource) is endpoint:
                for device in self._devices.get(endpoint.resource, {}).values():
                    device.health = "Unhealthy"
            self._changed.notify_all()

    # the node's status

    def resources(self) -> dict[str, ResourceStatus]:
        """Every resource that has registered since the last start, or that the checkpoint knows."""
        with self._changed:
            return {name: _status(devices) for name, devices in sorted(self._devices.items())}

    def wait_for(self, resource: str, allocatable: int, timeout: float = 10.0) -> ResourceStatus:
        """Wait until a resource has exactly so many healthy devices. Raises GpuletError after `timeout` seconds."""
        empty = ResourceStatus(0, 0, ())
        with self._changed:
            self._changed.wait_for(
                lambda: self.resources().get(resource, empty).allocatable == allocatable, timeout=timeout
            )
            status = self.resources().get(resource, empty)
        if status.allocatable != allocatable:
            raise GpuletError(f"the kubelet has no {allocatable} allocatable {resource} after {timeout:g} s",
                              seen=status.allocatable, remedy="look at the device plugin's log")  # fmt: skip
        return status

    # admission

    def admit(self, pod: Pod) -> dict[str, Allocation]:
        """Allocate for each container of a pod, init containers first: container name -> Allocation. Raises
        AdmissionError; then the pod holds nothing."""
        result: dict[str, Allocation] = {}
        self._pods[pod.uid] = pod
        reusable: dict[str, set[str]] = {}
        try:
            for container in [*pod.init_containers, *pod.containers]:
                wanted = {name: count for name, count in container.limits.items() if _extended(name)}
                allocation = self.allocate(pod.uid, container.name, wanted, reusable=reusable)
                result[container.name] = allocation
                for resource, ids in allocation.device_ids.items():
                    pool = reusable.setdefault(resource, set())
                    # an init container has ended before the next starts, if it ever ends: what it had may be used again
                    ends = container in pod.init_containers and not container.restart_always
                    pool.update(ids) if ends else pool.difference_update(ids)
        except AdmissionError:
            self.release(pod.uid)
            raise
        return result

    def allocate(
        self,
        pod_uid: str,
        container_name: str,
        wanted: Mapping[str, int],
        *,
        reusable: Mapping[str, set[str]] | None = None,
    ) -> Allocation:
        """Choose devices for one container and ask the plugins what they mean. Raises AdmissionError."""
        answers: list[tuple[str, tuple[str, ...], Any]] = []
        with self._admitting:
            self._forget()
            self._gone.discard(pod_uid)
            for resource, count in wanted.items():
                if count <= 0:
                    continue
                endpoint, chosen = self._choose(resource, count, (reusable or {}).get(resource, set()))
                request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=chosen)])
                try:
                    reply = self._call("Allocate", endpoint, request)
                except grpc.RpcError as error:
                    raise AdmissionError(f"rpc error: {_reason(error)}", error.code().name) from error
                if not reply.container_responses:
                    raise AdmissionError(f"no containers return in allocation response {reply}")
                answers.append((resource, tuple(chosen), reply.container_responses[0]))
                self._record(pod_uid, container_name, *answers[-1])
        return merge(answers)

    def _held(self) -> list[Held]:
        """What the PodResources API lists: nothing of init containers that end."""
        with self._changed:
            self._forget()
            return [
                (*self._whose(entry.pod_uid), entry.container, entry.resource, entry.ids())
                for entry in self._ledger.entries
                if not self._ends(entry)
            ]

    def _whose(self, pod_uid: str) -> tuple[str, str]:
        pod = self._pods.get(pod_uid)
        return (pod.namespace, pod.name) if pod else ("default", pod_uid)

    def _ends(self, entry: Entry) -> bool:
        pod = self._pods.get(entry.pod_uid)
        inits = pod.init_containers if pod else ()
        return any(one.name == entry.container and not one.restart_always for one in inits)

    def release(self, pod_uid: str) -> None:
        """A pod is gone: its devices are free again. The checkpoint shows them until the next allocation has been
        written, as the real one's does."""
        with self._changed:
            self._pods.pop(pod_uid, None)
            self._gone.add(pod_uid)

    def _forget(self) -> None:
        with self._changed:
            self._ledger.entries = [entry for entry in self._ledger.entries if entry.pod_uid not in self._gone]

    def _choose(self, resource: str, count: int, reusable: set[str]) -> tuple[Endpoint, list[str]]:
        with self._changed:
            endpoint = self._endpoints.get(resource)
            devices = self._devices.get(resource, {})
            used = {taken for entry in self._ledger.entries if entry.resource == resource for taken in entry.ids()}
            healthy = [device_id for device_id, device in devices.items() if device.health == "Healthy"]
        again = [device_id for device_id in healthy if device_id in reusable][:count]
        free = [device_id for device_id in healthy if device_id not in used]
        if endpoint is None or (endpoint.stopped and not healthy):
            raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if len(again) + len(free) < count:
            raise AdmissionError(f"requested number of devices unavailable for {resource}. Requested: {count}, "
                                 f"Available: {len(again) + len(free)}")  # fmt: skip
        if len(again) == count:
            return endpoint, again
        preferred: list[str] = []
        if endpoint.options.get_preferred_allocation_available and len(again) + len(free) > count:
            preferred = self._prefer(endpoint, [*again, *free], again, count)
        chosen = dict.fromkeys([*again, *(device_id for device_id in preferred if device_id in free), *free])
        return endpoint, list(chosen)[:count]

    def _prefer(self, endpoint: Endpoint, available: list[str], required: list[str], count: int) -> list[str]:
        request = pb.PreferredAllocationRequest(
            container_requests=[
                pb.ContainerPreferredAllocationRequest(
                    available_deviceIDs=available, must_include_deviceIDs=required, allocation_size=count
                )
            ]
        )
        try:
            reply = self._call("GetPreferredAllocation", endpoint, request)
        except grpc.RpcError as error:
            raise AdmissionError(f"rpc error: {_reason(error)}", error.code().name) from error
        return list(reply.container_responses[0].deviceIDs) if reply.container_responses else []

    def _call(self, name: str, endpoint: Endpoint, request: Any) -> Any:
        began = time.perf_counter()
        try:
            return getattr(endpoint.stub, name)(request)
        finally:
            self.calls.append((name, endpoint.resource, time.perf_counter() - began))

    def _record(self, pod_uid: str, container: str, resource: str, chosen: tuple[str, ...], answer: Any) -> None:
        by_node: dict[str, list[str]] = {}
        with self._changed:
            for device_id in chosen:
                nodes = self._devices.get(resource, {}).get(device_id, pb.Device()).topology.nodes
                for node in [str(item.ID) for item in nodes] or ["-1"]:
                    by_node.setdefault(node, []).append(device_id)
            entry = Entry(pod_uid, container, resource, by_node, answer.SerializeToString())
            self._ledger.entries.append(entry)
            self._write()

    def _write(self) -> None:
        self._ledger.registered = {
            name: [device.ID for device in devices.values() if device.health == "Healthy"]
            for name, devices in self._devices.items()
        }
        self._ledger.write()


def _extended(resource: str) -> bool:
    """Whether it names an extended resource: a domain that isn't Kubernetes' own."""
    domain, slash, name = resource.partition("/")
    return bool(slash and domain and name) and not domain.endswith("kubernetes.io") and "/" not in name


def _status(devices: Mapping[str, Any]) -> ResourceStatus:
    healthy = tuple(sorted(device_id for device_id, device in devices.items() if device.health == "Healthy"))
    unhealthy = tuple(sorted(set(devices) - set(healthy)))
    return ResourceStatus(len(devices), len(healthy), healthy, unhealthy)


def _reason(error: Any) -> str:
    code = "".join(part.capitalize() for part in error.code().name.split("_"))
    return f"code = {code} desc = {error.details()}"
