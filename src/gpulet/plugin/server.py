"""One resource's gRPC server: the kubelet's device plugin service on a unix socket.

The server always answers with its current Offer; `offer()` swaps it while streams stay open, so a reload or a health
change reaches every stream as one message. It has a thread of its own and isn't in the daemon's event loop, so that an
answer waits for nothing else that the daemon does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from gpulet.plugin.allocate import AllocationRefused, Answer, Surroundings, allocate
from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.config import Config
from gpulet.plugin.prefer import Prefer
from gpulet.plugin.resources import Resource
from gpulet.plugin.rpc.connection import Observe, Service, unobserved
from gpulet.plugin.rpc.framing import CallFailed
from gpulet.plugin.rpc.listener import Listener

log = logging.getLogger(__name__)

SERVICE = "/v1beta1.DevicePlugin/"
STREAMS = 8  # ListAndWatch calls of one process at a time: the kubelet has one, and each may keep a megabyte waiting
OPTIONS = pb.DevicePluginOptions(get_preferred_allocation_available=True).SerializeToString()
NOTHING = pb.PreStartContainerResponse().SerializeToString()
PATIENCE = 0.5  # seconds that stopping waits for what is being said
HEALTHY, UNHEALTHY = b"\x12\x07Healthy", b"\x12\x09Unhealthy"  # field 2 of Device, as protobuf writes it


@dataclass(frozen=True, slots=True)
class Offer:
    """What a server says now. sick: base id -> why it is unhealthy; prefer: (available, must include, size) -> ids."""

    resource: Resource
    config: Config
    surroundings: Surroundings = field(default_factory=Surroundings)
    sick: Mapping[str, str] = field(default_factory=dict)
    prefer: Prefer | None = field(default=None, compare=False)


class _Calls:
    """The unary calls. Apart from the server, which holds them: methods of its own, held by what it holds, would keep a
    stopped server, its list and its connections in memory until the next garbage collection."""

    def __init__(self, offer: Offer) -> None:
        self.offer = offer

    def by_path(self) -> dict[bytes, Callable[[bytes], bytes]]:
        """As bytes in, bytes out."""
        methods: dict[str, Callable[[bytes], bytes]] = {
            "GetDevicePluginOptions": lambda request: OPTIONS,
            "Allocate": self._allocate,
            "GetPreferredAllocation": self._prefer,
            "PreStartContainer": lambda request: NOTHING,
        }
        return {f"{SERVICE}{name}".encode(): method for name, method in methods.items()}

    def _allocate(self, request: bytes) -> bytes:
        offer = self.offer
        try:
            answers = [
                allocate(item.devices_ids, offer.resource, offer.config, offer.surroundings, offer.sick)
                for item in _read(pb.AllocateRequest, request).container_requests
            ]
        except AllocationRefused as refusal:
            log.warning("Allocate refused: %s", refusal)
            raise CallFailed(refusal.code, str(refusal)) from refusal
        return bytes(pb.AllocateResponse(container_responses=[_message(each) for each in answers]).SerializeToString())

    def _prefer(self, request: bytes) -> bytes:
        prefer = self.offer.prefer
        answers = []
        for item in _read(pb.PreferredAllocationRequest, request).container_requests:
            required = list(item.must_include_deviceIDs)
            chosen = prefer(list(item.available_deviceIDs), required, item.allocation_size) if prefer else []
            answers.append(pb.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        return bytes(pb.PreferredAllocationResponse(container_responses=answers).SerializeToString())


class Server:
    """Serves one resource at `path`."""

    def __init__(self, path: str, offer: Offer, observe: Observe = unobserved) -> None:
        self.path = path
        self._offer = offer
        self._calls = _Calls(offer)
        self._records = _records(offer.resource)
        self._list = _list_message(offer, self._records)
        self._service = Service(self._calls.by_path(), f"{SERVICE}ListAndWatch".encode(), self._list, STREAMS, observe)
        self._listener: Listener | None = None
        self._identity: tuple[int, int] | None = None

    def streams(self, process: int | None = None) -> int:
        """ListAndWatch calls that are open now, of this process or, by default, of any."""
        return self._service.open if process is None else self._service.callers.get(process, 0)

    def start(self) -> None:
        """Bind and serve. Another socket at the path, a predecessor's or a dead process's, is replaced.

        The socket is bound under a hidden name and renamed: so the place is taken at once and we know our own inode.
        Raises OSError.
        """
        folder, name = os.path.split(self.path)
        hidden = os.path.join(folder, f".{name}")
        _unlink(hidden)
        listener = Listener(hidden, self._service)
        listener.start()
        try:
            info = os.stat(hidden)
            os.rename(hidden, self.path)
        except OSError:
            listener.stop(0)
            _unlink(hidden)
            raise
        self._listener, self._identity = listener, (info.st_dev, info.st_ino)
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
        """End the streams, remove our socket and no other. Blocks, half a second at most. Raises OSError where the
        socket can't be removed; it is served no more all the same."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        log.info("Stopping to serve '%s' on %s", self._offer.resource.name, self.path)
        try:
            if self.holds_socket():
                _unlink(self.path)
        finally:
            listener.stop(PATIENCE)

    def offer(self, offer: Offer) -> None:
        """Answer with this from now on; open streams get the new list where it differs."""
        if offer == self._offer:
            return
        records = self._records if offer.resource == self._offer.resource else _records(offer.resource)
        message = _list_message(offer, records)
        self._offer, self._calls.offer, self._records = offer, offer, records
        if message != self._list:
            self._list = message
            self._service.tell(message)
            if self._listener:
                self._listener.wake()


def _read(kind: Any, message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise CallFailed("INTERNAL", f"no {kind.DESCRIPTOR.name}: {error}") from error


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
