"""One resource's gRPC server: the kubelet's device plugin service on a unix socket.

The server always answers with its current Offer; `offer()` swaps it while streams stay open, so a reload or a health
change reaches every stream as one message. It runs on gRPC's own threads, not in the daemon's event loop, so that an
answer waits for nothing else that the daemon does.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from gpulet.plugin.allocate import AllocationRefused, Answer, Surroundings, allocate
from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.plugin.config import Config
from gpulet.plugin.prefer import Prefer
from gpulet.plugin.resources import Resource

log = logging.getLogger(__name__)

Observe = Callable[[str, str, float], None]

STREAMS, CALLS = 8, 4  # threads: each stream has one while it is open; more streams are refused
HEALTHY, UNHEALTHY = b"\x12\x07Healthy", b"\x12\x09Unhealthy"  # field 2 of Device, as protobuf writes it


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server says now. sick: base id -> why it is unhealthy; prefer: (available, must include, size) -> ids."""

    resource: Resource
    config: Config
    surroundings: Surroundings = field(default_factory=Surroundings)
    sick: Mapping[str, str] = field(default_factory=dict)
    prefer: Prefer | None = field(default=None, compare=False)


def _ignore(rpc_name: str, code: str, seconds: float) -> None:
    """The observer of a server without metrics."""


class Server(rpc.DevicePluginServicer):  # type: ignore[misc]
    """Serves one resource at `path`. `streams` is the number of ListAndWatch calls that are open now."""

    def __init__(self, path: str, offer: Offer, observe: Observe = _ignore) -> None:
        self.path = path
        self.streams = 0
        self._offer = offer
        self._observe = observe
        self._records = _records(offer.resource)
        self._list = b""  # the message for this offer, made once for all streams
        self._changed = threading.Condition()
        self._closing = False
        self._server: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._identity: tuple[int, int] | None = None

    def start(self) -> None:
        """Bind and serve. Another socket at the path, a predecessor's or a dead process's, is replaced.

        The socket is bound under a hidden name and renamed: so the place is taken at once, we know our own inode,
        and gRPC's habit of unlinking the bound name when it stops can't hit a successor's socket.
        Raises OSError.
        """
        folder, name = os.path.split(self.path)
        hidden = os.path.join(folder, f".{name}")
        _unlink(hidden)
        pool = ThreadPoolExecutor(STREAMS + CALLS, thread_name_prefix=name)
        server = grpc.server(pool, handlers=[_handlers(self)])
        try:
            server.add_insecure_port(f"unix:{hidden}")
            self._list = _list_message(self._offer, self._records)
            server.start()
            info = os.stat(hidden)
            os.rename(hidden, self.path)
        except (RuntimeError, OSError) as error:
            server.stop(None).wait()
            pool.shutdown()
            if isinstance(error, OSError):
                raise
            raise OSError(0, f"can't listen: {error}", self.path) from error  # what gRPC raises where it can't bind
        self._server, self._pool, self._identity = server, pool, (info.st_dev, info.st_ino)
        resource = self._offer.resource
        log.info("Starting to serve '%s' on %s: %d devices", resource.name, self.path, len(resource.devices))

    def holds_socket(self) -> bool | None:
        """Whether the socket at the path is ours; None where there is none."""
        try:
            info = os.stat(self.path)
        except OSError:
            return None
        return (info.st_dev, info.st_ino) == self._identity

    def stop(self) -> None:
        """End the streams, let running calls finish (half a second), remove our socket and no other. Blocks."""
        if self._server is None or self._pool is None:
            return
        log.info("Stopping to serve '%s' on %s", self._offer.resource.name, self.path)
        if self.holds_socket():
            _unlink(self.path)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._server.stop(0.5).wait()
        self._pool.shutdown()  # gRPC leaves a pool that it was given to its owner
        self._server = None

    def offer(self, offer: Offer) -> None:
        """Answer with this from now on; open streams get the new list where it differs."""
        if offer == self._offer:
            return
        records = self._records if offer.resource == self._offer.resource else _records(offer.resource)
        message = _list_message(offer, records)
        with self._changed:
            self._offer, self._records, self._list = offer, records, message
            self._changed.notify_all()

    def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    def PreStartContainer(self, request: Any, context: Any) -> Any:
        return pb.PreStartContainerResponse()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[bytes]:
        """Lists as they are written on the wire (see _list_message)."""
        if not context.add_callback(self._wake):
            return  # the call has ended already
        with self._changed:
            full = self.streams >= STREAMS
            self.streams += not full
        if full:  # Allocate must find a thread
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS} streams are open already")
        sent = None
        try:
            while not self._closing and context.is_active():
                latest = self._list
                if latest != sent:
                    sent = latest
                    yield latest
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._closing or self._list is not latest or not context.is_active()  # noqa: B023
                    )
        finally:
            with self._changed:
                self.streams -= 1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def Allocate(self, request: Any, context: Any) -> Any:
        began, offer = time.perf_counter(), self._offer
        try:
            answers = [
                allocate(item.devices_ids, offer.resource, offer.config, offer.surroundings, offer.sick)
                for item in request.container_requests
            ]
        except AllocationRefused as refusal:
            log.warning("Allocate refused: %s", refusal)
            self._observe("Allocate", refusal.code, time.perf_counter() - began)
            context.abort(getattr(grpc.StatusCode, refusal.code), str(refusal))
        self._observe("Allocate", "OK", time.perf_counter() - began)
        return pb.AllocateResponse(container_responses=[_message(answer) for answer in answers])

    def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
        began, prefer = time.perf_counter(), self._offer.prefer
        answers = []
        for item in request.container_requests:
            required = list(item.must_include_deviceIDs)
            chosen = prefer(list(item.available_deviceIDs), required, item.allocation_size) if prefer else []
            answers.append(pb.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        self._observe("GetPreferredAllocation", "OK", time.perf_counter() - began)
        return pb.PreferredAllocationResponse(container_responses=answers)


def _handlers(server: Server) -> Any:
    """The service's methods. Lists come as bytes: eight thousand devices as messages take longer to build and to write
    than a GPU's failure may take to be known."""
    messages = {
        "GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
        "Allocate": (pb.AllocateRequest, pb.AllocateResponse),
        "GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
        "PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
    }
    methods = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(server, name),
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )
        for name, (request, response) in messages.items()
    }
    methods["ListAndWatch"] = grpc.unary_stream_rpc_method_handler(
        server.ListAndWatch, request_deserializer=pb.Empty.FromString, response_serializer=bytes
    )
    return grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)


def _records(resource: Resource) -> list[tuple[str, bytes, bytes]]:
    """(base id, record while healthy, record while unhealthy) of each device: field 1 of ListAndWatchResponse with its
    length, ready to be strung together."""
    found = []
    for device in resource.devices:
        nodes = pb.TopologyInfo(nodes=[pb.NUMANode(ID=device.numa)]) if device.numa >= 0 else None
        rest = pb.Device(ID=device.id, topology=nodes).SerializeToString()
        found.append((device.base, _record(rest + HEALTHY), _record(rest + UNHEALTHY)))
    return found


def _record(body: bytes) -> bytes:
    length, size = [], len(body)
    while size > 127:  # a base-128 varint (protobuf's encoding), lowest part first
        length.append(size & 127 | 128)
        size >>= 7
    return bytes((0x0A, *length, size)) + body


def _list_message(offer: Offer, records: list[tuple[str, bytes, bytes]]) -> bytes:
    """A ListAndWatchResponse as protobuf writes it."""
    return b"".join([bad if base in offer.sick else good for base, good, bad in records])


def _message(answer: Answer) -> Any:
    return pb.ContainerAllocateResponse(
        envs=answer.envs,
        mounts=[pb.Mount(container_path=path, host_path=host, read_only=ro) for path, host, ro in answer.mounts],
        devices=[pb.DeviceSpec(container_path=p, host_path=host, permissions=m) for p, host, m in answer.devices],
        annotations=answer.annotations,
        cdi_devices=[pb.CDIDevice(name=name) for name in answer.cdi],
    )


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
