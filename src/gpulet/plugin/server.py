"""One resource's gRPC server: the kubelet's device plugin service on a unix socket.

The server always answers with its current Offer; `offer()` swaps it while streams stay open, so a reload or a health
change reaches every stream as one message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from gpulet.plugin.allocate import AllocationRefused, Answer, Surroundings, allocate
from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.plugin.config import Config
from gpulet.plugin.prefer import Prefer
from gpulet.plugin.resources import Resource

log = logging.getLogger(__name__)

Observe = Callable[[str, str, float], None]


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
        self._list: Any = None  # the message for this offer, made once for all streams
        self._changed = asyncio.Condition()
        self._closing = False
        self._server: Any = None
        self._identity: tuple[int, int] | None = None

    async def start(self) -> None:
        """Bind and serve. Another socket at the path, a predecessor's or a dead process's, is replaced.

        The socket is bound under a hidden name and renamed: so the place is taken at once, we know our own inode,
        and gRPC's habit of unlinking the bound name when it stops can't hit a successor's socket.
        Raises OSError.
        """
        folder, name = os.path.split(self.path)
        hidden = os.path.join(folder, f".{name}")
        _unlink(hidden)
        server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, server)
        try:
            server.add_insecure_port(f"unix:{hidden}")
            await server.start()
            info = os.stat(hidden)
            os.rename(hidden, self.path)
        except RuntimeError as error:  # what gRPC raises where it can't bind
            await server.stop(None)
            raise OSError(0, f"can't listen: {error}", self.path) from error
        except OSError:
            await server.stop(None)
            raise
        self._server, self._identity = server, (info.st_dev, info.st_ino)
        log.info("Starting to serve '%s' on %s", self._offer.resource.name, self.path)

    def holds_socket(self) -> bool | None:
        """Whether the socket at the path is ours; None where there is none."""
        try:
            info = os.stat(self.path)
        except OSError:
            return None
        return (info.st_dev, info.st_ino) == self._identity

    async def stop(self) -> None:
        """End the streams, let running calls finish (half a second), remove our socket and no other."""
        if self._server is None:
            return
        log.info("Stopping to serve '%s' on %s", self._offer.resource.name, self.path)
        if self.holds_socket():
            _unlink(self.path)
        self._closing = True
        async with self._changed:
            self._changed.notify_all()
        await self._server.stop(0.5)
        self._server = None

    async def offer(self, offer: Offer) -> None:
        """Answer with this from now on; open streams get the new list where it differs."""
        if offer == self._offer:
            return
        async with self._changed:
            self._offer, self._list = offer, None
            self._changed.notify_all()

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return pb.DevicePluginOptions(get_preferred_allocation_available=True)

    async def PreStartContainer(self, request: Any, context: Any) -> Any:
        return pb.PreStartContainerResponse()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        sent = None
        try:
            while not self._closing:
                if self._list is None:
                    self._list = _list_message(self._offer)
                latest = self._list
                if sent is None or (latest is not sent and latest != sent):
                    sent = latest
                    yield latest
                async with self._changed:
                    await self._changed.wait_for(lambda: self._closing or self._list is not latest)  # noqa: B023
        finally:
            self.streams -= 1

    async def Allocate(self, request: Any, context: Any) -> Any:
        began, offer = time.perf_counter(), self._offer
        try:
            answers = [
                allocate(item.devices_ids, offer.resource, offer.config, offer.surroundings, offer.sick)
                for item in request.container_requests
            ]
        except AllocationRefused as refusal:
            log.warning("Allocate refused: %s", refusal)
            self._observe("Allocate", refusal.code, time.perf_counter() - began)
            await context.abort(getattr(grpc.StatusCode, refusal.code), str(refusal))
        self._observe("Allocate", "OK", time.perf_counter() - began)
        return pb.AllocateResponse(container_responses=[_message(answer) for answer in answers])

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
        began, prefer = time.perf_counter(), self._offer.prefer
        answers = []
        for item in request.container_requests:
            required = list(item.must_include_deviceIDs)
            chosen: list[str] = []
            if prefer is not None:
                # in a thread: on a machine without any symmetry it may take long, and the streams must go on
                chosen = await asyncio.to_thread(prefer, list(item.available_deviceIDs), required, item.allocation_size)
            answers.append(pb.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        self._observe("GetPreferredAllocation", "OK", time.perf_counter() - began)
        return pb.PreferredAllocationResponse(container_responses=answers)


def _list_message(offer: Offer) -> Any:
    devices = []
    for device in offer.resource.devices:
        health = "Unhealthy" if device.base in offer.sick else "Healthy"
        nodes = pb.TopologyInfo(nodes=[pb.NUMANode(ID=device.numa)]) if device.numa >= 0 else None
        devices.append(pb.Device(ID=device.id, health=health, topology=nodes))
    return pb.ListAndWatchResponse(devices=devices)


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
