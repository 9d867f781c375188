"""Registration: the decisions on a clock of numbers, then the agent against the embedded kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time

import grpc
import pytest

from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.plugin.kubelet import Seen, State, accepted, decide, failed, identify
from gpulet.plugin.server import STREAMS
from gpulet.sim.kubelet import AdmissionError, Kubelet
from support import plugin_process as plugin
from support.hand_made import facts, gpu_uuid

OLD, NEW = (1, 2, 3), (1, 2, 4)
GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("state", "seen", "action"),
    [
        (State(), Seen(0), ""),  # no kubelet yet
        (State(), Seen(0, OLD), "enlist"),
        (State(attempted=OLD, retry=5), Seen(4, OLD), ""),  # failed, and waits
        (State(attempted=OLD, retry=5), Seen(5, OLD), "enlist"),
        (State(attempted=OLD, retry=5), Seen(1, NEW), "enlist"),  # another kubelet gets its chance at once
        (State(OLD), Seen(9, OLD, True, 1), ""),  # all is well
        (State(OLD), Seen(9, None, True, 0), ""),  # the kubelet is away
        (State(OLD), Seen(9, NEW, True, 1), "enlist"),  # it came back
        (State(OLD), Seen(9, OLD, None, 1), "enlist"),  # our socket was deleted
        (State(OLD), Seen(9, OLD, False, 0), "yield"),  # a successor took our place
        (State(OLD), Seen(9, OLD, True, 0), ""),  # lonely since now
        (State(OLD, lonely=8.5), Seen(9, OLD, True, 0), ""),
        (State(OLD, lonely=8), Seen(9, OLD, True, 0), "enlist"),  # forgotten by the kubelet
        (State(OLD, lonely=8, retry=20), Seen(9, OLD, True, 0), ""),
    ],
)
def test_decisions(state, seen, action):
    assert decide(state, seen)[1] == action


def test_a_stream_that_comes_back_ends_the_loneliness():
    state, _ = decide(State(OLD), Seen(1, OLD, True, 0))
    assert state.lonely == 1
    state, _ = decide(state, Seen(1.5, OLD, True, 1))
    assert state.lonely is None


def test_backoff_doubles_with_jitter_up_to_half_a_minute():
    state, waits = State(), []
    for _ in range(15):
        state = failed(state, OLD, 100.0, 0.5)
        waits.append(state.retry - 100)
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[-1] == 30
    assert failed(State(), OLD, 0, 0.0).retry == pytest.approx(0.075)
    assert failed(State(), OLD, 0, 1.0).retry == pytest.approx(0.125)


def test_a_kubelet_that_takes_us_and_never_opens_a_stream_is_asked_ever_less():
    state, now, times = State(), 0.0, []
    while now < 60:
        state, action = decide(state, Seen(now, OLD, True if state.registered else None, 0))
        if action == "enlist":
            times.append(now)
            state = accepted(state, OLD, now)
        now += 0.1
    assert len(times) < 15
    assert decide(state, Seen(now, OLD, True, 1))[0].failures == 0


def test_identity_survives_a_change_of_mode_and_not_a_new_socket(tmp_path):
    with plugin.short_folder() as folder:
        path = str(folder / "s")
        assert identify(path) is None
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
                first = identify(path)
                os.chmod(path, 0o600)
                assert identify(path) == first
            os.unlink(path)
        (folder / "s").write_text("no socket")
        assert identify(path) is None


def test_register_list_allocate(folder, kubelet):
    with plugin.running(folder, lambda: facts(8)):
        status = kubelet.wait_for(GPU, 8)
        assert status.healthy == tuple(gpu_uuid(index) for index in range(8))
        allocation = kubelet.allocate("pod", "main", {GPU: 2})
        assert allocation.envs == {"NVIDIA_VISIBLE_DEVICES": f"{gpu_uuid(0)},{gpu_uuid(1)}"}
    assert kubelet.registrations == [(GPU, "nvidia-gpu.sock")]
    assert sorted(os.listdir(folder)) == ["kubelet.sock", "kubelet_internal_checkpoint"]
    assert kubelet.wait_for(GPU, 0).capacity == 8


def test_refusals_reach_the_pod(folder, kubelet):
    with plugin.running(folder, lambda: facts(2)) as running:
        kubelet.wait_for(GPU, 2)
        with pytest.raises(AdmissionError, match=r"Requested: 3, Available: 2") as caught:
            kubelet.allocate("pod", "main", {GPU: 3})
        assert "UnexpectedAdmissionError" in str(caught.value)
        # a GPU fails between the kubelet's choice and its call: what only the plugin can know
        running.daemon.agents[GPU]._server._offer.sick[gpu_uuid(0)] = "Xid 79"
        with pytest.raises(AdmissionError, match=r"FailedPrecondition desc = .*unhealthy device") as caught:
            kubelet.allocate("pod", "main", {GPU: 1})
        assert caught.value.code == "FAILED_PRECONDITION"
        assert kubelet.allocate("pod", "main", {GPU: 0}).device_ids == {}


def test_the_kubelet_comes_later(folder):
    with plugin.running(folder, lambda: facts(1)), Kubelet(folder) as kubelet:
        kubelet.wait_for(GPU, 1)
        assert len(kubelet.registrations) == 1


def test_one_registration_for_each_kubelet(folder, kubelet):
    with plugin.running(folder, lambda: facts(3)) as running:
        kubelet.wait_for(GPU, 3)
        threads = threading.active_count()
        for restart in range(1, 31):
            kubelet.restart()
            kubelet.wait_for(GPU, 3)
            plugin.until(lambda: len(kubelet.registrations) > restart)  # noqa: B023  (the list may come first)
            assert len(kubelet.registrations) == restart + 1
        time.sleep(0.3)
        assert len(kubelet.registrations) == 31
        assert running.daemon.agents[GPU].streams == 1
        assert threading.active_count() <= threads + 4  # gRPC's own pool breathes


def test_our_socket_is_deleted(folder, kubelet):
    with plugin.running(folder, lambda: facts(3)):
        kubelet.wait_for(GPU, 3)
        (folder / "nvidia-gpu.sock").unlink()
        plugin.until(lambda: len(kubelet.registrations) == 2)
        kubelet.wait_for(GPU, 3)


def test_a_lost_stream_is_noticed(folder, kubelet):
    with plugin.running(folder, lambda: facts(3)):
        kubelet.wait_for(GPU, 3)
        kubelet._endpoints[GPU]._stream.cancel()
        plugin.until(lambda: len(kubelet.registrations) == 2)
        kubelet.wait_for(GPU, 3)


FOREIGN = """
import sys, grpc
from gpulet.plugin.api import deviceplugin_pb2 as pb, deviceplugin_pb2_grpc as rpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    streams = [rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty()) for _ in range(8)]
    for stream in streams:
        next(stream)
    print("open", flush=True)
    sys.stdin.read()
"""


def test_another_process_s_streams_are_not_the_kubelet_s(folder, kubelet):
    with plugin.running(folder, lambda: facts(3)) as running:
        kubelet.wait_for(GPU, 3)
        agent = running.daemon.agents[GPU]
        command = [sys.executable, "-c", FOREIGN, f"unix:{folder}/nvidia-gpu.sock"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as other:
            assert other.stdout.readline() == b"open\n"
            assert agent.streams == 1 and agent._server.streams() == 9
            kubelet._endpoints[GPU]._stream.cancel()
            plugin.until(lambda: len(kubelet.registrations) == 2)
            other.communicate()
        kubelet.wait_for(GPU, 3)


def test_a_successor_is_not_fought(folder, kubelet):
    with plugin.running(folder, lambda: facts(3)):
        kubelet.wait_for(GPU, 3)
        with plugin.running(folder, lambda: facts(2)):
            kubelet.wait_for(GPU, 2)
            time.sleep(0.5)
            assert len(kubelet.registrations) == 2
        kubelet.wait_for(GPU, 3)  # and when it ends the first takes over again


def test_other_vendors_sockets_stay(folder, kubelet):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "amd-gpu.sock"))
        with plugin.running(folder, lambda: facts(1)):
            kubelet.wait_for(GPU, 1)
        assert "amd-gpu.sock" in os.listdir(folder)


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.1, None])
def test_killed_and_started_again(folder, kubelet, moment):
    killed = plugin.start_process(folder)
    if moment is None:
        kubelet.wait_for(GPU, 8)
    else:
        time.sleep(moment)
    killed.kill()
    killed.wait()
    if moment is None:
        kubelet.wait_for(GPU, 0)
        assert kubelet.resources()[GPU].capacity == 8
        assert "nvidia-gpu.sock" in os.listdir(folder)
    before = len(kubelet.registrations)
    again = plugin.start_process(folder)
    try:
        deadline = time.monotonic() + 10
        while len(kubelet.registrations) == before and time.monotonic() < deadline:
            time.sleep(0.01)  # what the killed one listed isn't the news that is waited for
        kubelet.wait_for(GPU, 8)
    finally:
        again.terminate()
        assert again.wait(10) == 0
    assert sorted(path.name for path in folder.glob("*.*")) == ["kubelet.sock", "plugin.log"]


def test_from_start_to_registration(folder, kubelet):
    times = []
    for _ in range(3):
        began = time.monotonic()
        process = plugin.start_process(folder)
        try:
            kubelet.wait_for(GPU, 8)
            times.append(time.monotonic() - began)
        finally:
            process.terminate()
            process.wait(10)
        kubelet.wait_for(GPU, 0)
    assert min(times) < 0.5


def test_without_a_kubelet_socket_it_serves_unregistered(folder):
    with plugin.running(folder, lambda: facts(1), "--kubelet-socket="):
        plugin.until(lambda: (folder / "nvidia-gpu.sock").exists())


def test_random_restarts_on_both_sides(folder, kubelet):
    chance = random.Random(4)
    with plugin.running(folder, lambda: facts(2)):
        for _ in range(10):
            time.sleep(chance.random() * 0.15)
            kubelet.restart()
        kubelet.wait_for(GPU, 2)


def test_no_task_is_left(folder, kubelet):
    with plugin.running(folder, lambda: facts(2)) as running:
        kubelet.wait_for(GPU, 2)
        loop = running.loop
    assert loop.is_closed()
    assert not asyncio.all_tasks(loop)


def test_many_streams_leave_a_thread_for_the_kubelet(folder, kubelet):
    with plugin.running(folder, lambda: facts(2)) as running, contextlib.ExitStack() as stack:
        kubelet.wait_for(GPU, 2)
        address, own = f"unix:{folder}/nvidia-gpu.sock", [("grpc.use_local_subchannel_pool", 1)]
        channels = [stack.enter_context(grpc.insecure_channel(address, options=own)) for _ in range(20)]
        streams = [rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty()) for channel in channels]
        plugin.until(lambda: running.daemon.agents[GPU].streams == STREAMS)
        assert rpc.DevicePluginStub(channels[-1]).GetDevicePluginOptions(pb.Empty(), timeout=5)
        assert kubelet.allocate("p", "c", {GPU: 1}).envs  # its own stream came first and stays
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize("kind", ["a file", "a folder", "a pipe", "a link that leads nowhere"])
def test_something_else_in_the_place_of_the_kubelets_socket_is_named(folder, caplog, kind):
    place = folder / "kubelet.sock"
    with plugin.running(folder, lambda: facts(1), "--metrics-address=127.0.0.1:0") as running:
        with Kubelet(folder) as kubelet:
            kubelet.wait_for(GPU, 1)
        place.unlink(missing_ok=True)
        {
            "a file": place.touch,
            "a folder": place.mkdir,
            "a pipe": lambda: os.mkfifo(place),
            "a link that leads nowhere": lambda: place.symlink_to("nowhere"),
        }[kind]()
        told = f"waiting for the kubelet's socket {place}: {kind} is there"
        plugin.until(lambda: told in caplog.text)
        plugin.until(lambda: told in plugin.get(running.endpoint.port, "/readyz")[1])
        place.rmdir() if kind == "a folder" else place.unlink()
        with Kubelet(folder) as kubelet:
            kubelet.wait_for(GPU, 1)
    assert caplog.text.count(told) == 1


@pytest.mark.parametrize("name", ["nvidia-gpu.sock", ".nvidia-gpu.sock"])
def test_a_folder_at_our_socket_is_named_with_its_remedy(folder, kubelet, caplog, name):
    (folder / name).mkdir()
    with plugin.running(folder, lambda: facts(1), "--metrics-address=127.0.0.1:0") as running:
        told = f"{GPU}: can't serve at {folder}/nvidia-gpu.sock: a folder is at {folder}/{name}: remove it"
        plugin.until(lambda: told in caplog.text)
        plugin.until(lambda: "remove it" in plugin.get(running.endpoint.port, "/readyz")[1])
        (folder / name).rmdir()
        kubelet.wait_for(GPU, 1)


def test_a_socket_that_cannot_be_removed_ends_nothing_early(folder, kubelet, caplog, monkeypatch):
    def read_only(path):
        raise OSError(30, "Read-only file system", path)

    with plugin.running(folder, lambda: facts(1)) as running:
        kubelet.wait_for(GPU, 1)
        with monkeypatch.context() as patch:
            patch.setattr("gpulet.plugin.server._unlink", read_only)
            kubelet._endpoints[GPU]._stream.cancel()
            plugin.until(lambda: "can't be removed: Read-only file system" in caplog.text)
            plugin.until(lambda: f"{GPU}: can't serve at {folder}" in caplog.text)
        kubelet.wait_for(GPU, 1)
        monkeypatch.setattr("gpulet.plugin.server._unlink", read_only)
    assert running.error is None
