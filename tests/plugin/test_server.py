"""The device plugin's service on its socket."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.plugin.config import Config
from gpulet.plugin.generation import generation
from gpulet.plugin.server import Offer, Server
from support.hand_made import facts, gpu_uuid

Call = tuple[str, str]


def offer() -> Offer:
    (made,) = generation(Config(), facts(2), lambda *arguments: ()).offers.values()
    return made


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gp") as made:
        yield made


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def server(folder: str, calls: list[Call]) -> Iterator[Server]:
    made = Server(f"{folder}/gpu.sock", offer(), lambda name, code, seconds: calls.append((name, code)))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def stub(server: Server) -> Iterator[rpc.DevicePluginStub]:
    with grpc.insecure_channel(f"unix:{server.path}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield rpc.DevicePluginStub(channel)


def asking(*ids: str) -> pb.AllocateRequest:
    return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])


def test_every_method(stub: rpc.DevicePluginStub, calls: list[Call]):
    assert stub.GetDevicePluginOptions(pb.Empty(), timeout=5).get_preferred_allocation_available
    assert stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["x"]), timeout=5) is not None
    (answer,) = stub.Allocate(asking(gpu_uuid(1)), timeout=5).container_responses
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": gpu_uuid(1)}
    wanted = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=[gpu_uuid(0), gpu_uuid(1)], must_include_deviceIDs=[gpu_uuid(1)], allocation_size=1
    )
    reply = stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[wanted]), timeout=5)
    assert list(reply.container_responses[0].deviceIDs) == [gpu_uuid(1)]
    names = ("GetDevicePluginOptions", "PreStartContainer", "Allocate", "GetPreferredAllocation")
    assert calls == [(name, "OK") for name in names]


def test_refused(server: Server, stub: rpc.DevicePluginStub, calls: list[Call]):
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Allocate(asking("GPU-none"), timeout=5)
    server.offer(replace(server._offer, sick={gpu_uuid(0): "Xid 79"}))
    with pytest.raises(grpc.RpcError) as sick:
        stub.Allocate(asking(gpu_uuid(0)), timeout=5)
    assert unknown.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert unknown.value.details().endswith("unknown device: GPU-none")
    assert sick.value.code() == grpc.StatusCode.FAILED_PRECONDITION and "Xid 79" in sick.value.details()
    assert calls == [("Allocate", "INVALID_ARGUMENT"), ("Allocate", "FAILED_PRECONDITION")]


def test_no_protobuf(server: Server, calls: list[Call]):
    with grpc.insecure_channel(f"unix:{server.path}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        with pytest.raises(grpc.RpcError) as failed:
            channel.unary_unary("/v1beta1.DevicePlugin/Allocate")(b"\xff\xff", timeout=5)
        assert failed.value.code() == grpc.StatusCode.INTERNAL
        assert failed.value.details().startswith("no AllocateRequest")
    assert calls == [("Allocate", "INTERNAL")]


def test_a_stopped_server_is_freed_at_once(folder: str):
    """A plugin makes a new server for each kubelet; what waits for the garbage collection waits for long."""
    gc.collect()
    gc.disable()
    try:
        made = Server(f"{folder}/gpu.sock", offer())
        seen = [weakref.ref(each) for each in (made, made._service, made._calls)]
        made.start()
        with grpc.insecure_channel(f"unix:{made.path}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stream = rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty())
            next(stream)
            with pytest.raises(grpc.RpcError):
                channel.unary_unary("/v1beta1.DevicePlugin/Allocate")(b"\xff\xff", timeout=5)
            made.stop()
            assert list(stream) == []
        never_started = Server(f"{folder}/absent/gpu.sock", offer())
        seen.append(weakref.ref(never_started))
        del made, never_started
        assert [each() for each in seen] == [None] * 4
    finally:
        gc.enable()


def test_the_list_follows_the_offer(server: Server, stub: rpc.DevicePluginStub):
    stream = stub.ListAndWatch(pb.Empty())
    assert {device.ID: device.health for device in next(stream).devices} == dict.fromkeys(
        map(gpu_uuid, range(2)), "Healthy"
    )
    assert server.streams() == server.streams(os.getpid()) == 1 and not server.streams(1)
    server.offer(replace(server._offer, sick={gpu_uuid(1): "Xid 79"}))
    assert [device.health for device in next(stream).devices] == ["Healthy", "Unhealthy"]
    server.offer(replace(server._offer, sick={gpu_uuid(1): "Xid 48"}))  # another reason, the same list
    server.offer(replace(server._offer, sick={}))
    assert [device.health for device in next(stream).devices] == ["Healthy", "Healthy"]
    server.stop()
    assert list(stream) == [] and stream.code() == grpc.StatusCode.OK and server.streams() == 0


def test_the_socket_is_taken_over_and_only_ours_is_removed(server: Server, folder: str):
    successor = Server(server.path, offer())
    successor.start()
    try:
        assert successor.holds_socket() and server.holds_socket() is False
        server.stop()
        assert successor.holds_socket() and os.listdir(folder) == ["gpu.sock"]
    finally:
        successor.stop()
    assert os.listdir(folder) == [] and successor.holds_socket() is None
    successor.stop()  # again, and no harm


def test_a_place_that_can_not_be_taken(folder: str):
    os.makedirs(f"{folder}/gpu.sock/full")
    with pytest.raises(OSError):
        Server(f"{folder}/gpu.sock", offer()).start()
    assert os.listdir(folder) == ["gpu.sock"]
    with pytest.raises(OSError):
        Server(f"{folder}/absent/gpu.sock", offer()).start()


def test_the_daemon_loads_no_grpc_library():
    code = "import sys, gpulet.plugin.main, gpulet.plugin.metrics, gpulet.plugin.holders; print('grpc' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
