"""The daemon as a whole, in this process: reload, changes on the node, health to the kubelet's stream, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time

import pytest

from gpulet.errors import NvmlError
from gpulet.node.gpu import Lost
from gpulet.plugin.health import Answer, NvmlState, XidSeen
from gpulet.sim.kubelet import AdmissionError
from support import plugin_process as plugin
from support.hand_made import facts, gpu, gpu_uuid, mig_gpu

GPU = "nvidia.com/gpu"


def hear(running, *events):
    running.call(lambda daemon: [daemon.wellness.hear(event) for event in events])


class Node:
    """A node whose facts a test changes."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def test_reload_takes_over_without_a_new_registration(folder, kubelet):
    config = folder / "config.yaml"
    config.write_text("flags: {plugin: {deviceIDStrategy: uuid}}")
    with plugin.running(folder, lambda: facts(2), "--config-file", str(config)) as running:
        kubelet.wait_for(GPU, 2)
        config.write_text("flags: {plugin: {deviceIDStrategy: index}}")
        running.reload()
        plugin.until(lambda: running.daemon.generation.config.device_id_strategy == "index")
        assert kubelet.allocate("p", "c", {GPU: 2}).envs == {"NVIDIA_VISIBLE_DEVICES": "0,1"}
        config.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}")
        running.reload()
        kubelet.wait_for(GPU, 8)
        assert len(kubelet.registrations) == 1


@pytest.mark.parametrize("turns", range(-4, 5))
def test_an_end_beside_a_reload_is_an_end(folder, kubelet, turns):
    """The reload wakes the daemon's work, the end cancels it: whichever comes first by whatever turns, none is lost."""

    async def both(daemon):
        first, second = (daemon.reload, daemon.stop.set) if turns >= 0 else (daemon.stop.set, daemon.reload)
        first()
        for _ in range(abs(turns)):
            await asyncio.sleep(0)
        second()

    with plugin.running(folder, lambda: facts(2)) as running:
        kubelet.wait_for(GPU, 2)
        asyncio.run_coroutine_threadsafe(both(running.daemon), running.loop)
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_a_changed_file_is_noticed_and_a_bad_one_refused(folder, kubelet, caplog):
    config = folder / "config.yaml"
    config.write_text("")
    with plugin.running(folder, lambda: facts(2), "--config-file", str(config), refresh_every=0.1) as running:
        kubelet.wait_for(GPU, 2)
        config.write_text("flags: {migStrategy: wrong}")
        plugin.until(
            lambda: (
                f"new configuration refused, the last one stays: config file {config}, line 1: flags.migStrategy: "
                "unknown MIG strategy: wrong" in caplog.text
            )
        )
        assert kubelet.resources()[GPU].allocatable == 2
        shared = "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 4}]}}"
        config.write_text(shared)
        kubelet.wait_for("nvidia.com/gpu.shared", 8)
        kubelet.wait_for(GPU, 0)
        assert not (folder / "nvidia-gpu.sock").exists()
        # a configuration that can be read and not carried out
        config.write_text(shared.replace("replicas: 4", "replicas: 4, devices: [7]"))
        plugin.until(lambda: "no matching device: 7" in caplog.text)
        assert kubelet.resources()["nvidia.com/gpu.shared"].allocatable == 8
        assert running.daemon.generation.config.sharing.resources[0].devices == "all"


def test_mig_devices_come_and_go(folder, kubelet):
    node = Node(facts(mig_gpu(0), gpu(1)))
    with plugin.running(folder, node, "--mig-strategy=mixed", refresh_every=0.1):
        kubelet.wait_for(GPU, 1)
        assert list(kubelet.resources()) == [GPU]
        node.now = facts(mig_gpu(0, "1g.10gb"), gpu(1))
        kubelet.wait_for("nvidia.com/mig-1g.10gb", 1)
        node.now = facts(mig_gpu(0), gpu(1))
        kubelet.wait_for("nvidia.com/mig-1g.10gb", 0)
        assert kubelet.resources()[GPU].allocatable == 1


def test_no_gpus_at_first(folder, kubelet):
    node = Node(facts())
    with plugin.running(folder, node, refresh_every=0.1):
        time.sleep(0.3)
        assert kubelet.resources() == {}
        node.now = facts(4)
        kubelet.wait_for(GPU, 4)


def test_no_nvml_at_first(folder, kubelet):
    node = Node(NvmlError("NVML isn't there", code=12))
    with plugin.running(folder, node, "--fail-on-init-error=false", refresh_every=0.1):
        time.sleep(0.3)
        node.now = facts(4)
        kubelet.wait_for(GPU, 4)
    with pytest.raises(NvmlError), plugin.running(folder, Node(NvmlError("NVML isn't there", code=12))) as running:
        running.thread.join(5)


def test_nvml_dies_later_and_comes_back(folder, kubelet):
    node = Node(facts(4))
    with plugin.running(folder, node, refresh_every=0.1):
        kubelet.wait_for(GPU, 4)
        node.now = NvmlError("NVML can't start", code=999)
        assert kubelet.wait_for(GPU, 0).capacity == 4
        node.now = facts(4)
        kubelet.wait_for(GPU, 4)
        assert len(kubelet.registrations) == 1


def test_a_lost_gpu_is_unhealthy_and_not_gone(folder, kubelet):
    node = Node(facts(3))
    with plugin.running(folder, node, refresh_every=0.1) as running:
        kubelet.wait_for(GPU, 3)
        node.now = facts(gpu(0), gpu(2), lost=(Lost(1, "GPU is lost"),))
        hear(running, Answer(gpu_uuid(1), "GPU is lost (NVML 15)"))
        status = kubelet.wait_for(GPU, 2)
        time.sleep(0.3)
        assert (status.capacity, status.unhealthy) == (3, (gpu_uuid(1),))
        assert kubelet.resources()[GPU] == status
        kubelet.allocate("p", "c", {GPU: 2})
        with pytest.raises(AdmissionError):
            kubelet.allocate("p", "d", {GPU: 1})
        node.now = facts(3)
        hear(running, Answer(gpu_uuid(1)))
        kubelet.wait_for(GPU, 3)


def test_an_xid_reaches_every_replica_within_milliseconds(folder, kubelet):
    config = folder / "config.yaml"
    config.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 10}]}}")
    with plugin.running(folder, lambda: facts(2), "--config-file", str(config)) as running:
        kubelet.wait_for(GPU, 20)
        times = []
        for _ in range(3):
            began = time.monotonic()
            hear(running, XidSeen(gpu_uuid(0), 79))
            kubelet.wait_for(GPU, 10)
            times.append(time.monotonic() - began)
            hear(running, Answer(gpu_uuid(0), "", 1), Answer(gpu_uuid(0), "", 0))
            kubelet.wait_for(GPU, 20)
        assert min(times) < 0.05


def test_a_storm_of_events(folder, kubelet):
    with plugin.running(folder, lambda: facts(8)) as running:
        kubelet.wait_for(GPU, 8)
        began = time.monotonic()
        for number in range(10_000):
            hear(running, XidSeen(gpu_uuid(number % 7), 79), Answer(gpu_uuid(number % 7), "", number % 2))
        hear(running, XidSeen(gpu_uuid(0), 79), *(Answer(gpu_uuid(index), "", 1) for index in range(7)))
        hear(running, *(Answer(gpu_uuid(index), "", 0) for index in range(1, 7)))
        status = kubelet.wait_for(GPU, 7)
        assert status.unhealthy == (gpu_uuid(0),)
        assert time.monotonic() - began < 10
        assert len(kubelet.registrations) == 1


def test_faults_are_kept_across_restarts(folder, kubelet):
    state = folder / "state"
    with plugin.running(folder, lambda: facts(2), f"--state-dir={state}") as running:
        kubelet.wait_for(GPU, 2)
        hear(running, XidSeen(gpu_uuid(1), 79))
        kubelet.wait_for(GPU, 1)
        plugin.until(lambda: (state / "health.json").exists())
    kubelet.wait_for(GPU, 0)
    with plugin.running(folder, lambda: facts(2), f"--state-dir={state}", refresh_every=0.1):
        assert kubelet.wait_for(GPU, 1).unhealthy == (gpu_uuid(1),)
        (state / "well").mkdir()
        (state / "well" / gpu_uuid(1)).touch()  # the operator's word
        kubelet.wait_for(GPU, 2)
        assert not list((state / "well").iterdir())
    kubelet.wait_for(GPU, 0)
    with plugin.running(folder, lambda: facts(2), f"--state-dir={state}"):
        kubelet.wait_for(GPU, 2)


def test_eight_thousand_devices_arrive_at_once(folder, kubelet):
    config = folder / "config.yaml"
    config.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1000}]}}")
    with plugin.running(folder, lambda: facts(8), "--config-file", str(config)) as running:
        kubelet.wait_for(GPU, 8000)
        times = []
        for _ in range(3):
            began = time.monotonic()
            hear(running, NvmlState("gone"))
            kubelet.wait_for(GPU, 0)
            times.append(time.monotonic() - began)
            hear(running, NvmlState())
            kubelet.wait_for(GPU, 8000)
        assert min(times) < 0.25  # the list's way alone is shorter: here the kubelet counts in the same process
        kubelet.allocate("p", "c", {GPU: 3})


def test_metrics_and_probes(folder, kubelet):
    with plugin.running(folder, lambda: facts(2), "--metrics-address=127.0.0.1:0") as running:
        kubelet.wait_for(GPU, 2)
        port = running.endpoint.port
        plugin.until(lambda: plugin.get(port, "/readyz") == (200, "ok\n"))
        kubelet.allocate("p", "c", {GPU: 1})
        with pytest.raises(AdmissionError):
            kubelet.allocate("p", "d", {GPU: 2})
        hear(running, XidSeen(gpu_uuid(0), 79), XidSeen(gpu_uuid(0), 79))
        kubelet.wait_for(GPU, 1)
        status, text = plugin.get(port, "/metrics")
        lines = text.splitlines()
        assert status == 200
        assert f'gpu_xid_total{{action="reboot",class="bus",uuid="{gpu_uuid(0)}",xid="79"}} 2.0' in lines
        assert 'dp_devices{health="Unhealthy",resource="nvidia.com/gpu"} 1.0' in lines
        assert 'dp_registered{resource="nvidia.com/gpu"} 1.0' in lines
        assert 'dp_stream_connected{resource="nvidia.com/gpu"} 1.0' in lines
        assert 'dp_registrations_total{outcome="registered",resource="nvidia.com/gpu"} 1.0' in lines
        assert 'dp_rpc_duration_seconds_count{rpc="Allocate"} 1.0' in lines
        assert "gpu_expected 2.0" in lines
        assert any(line.startswith("gpu_health{") and "Xid 79" in line and line.endswith(" 0.0") for line in lines)
        hear(running, NvmlState("NVML is gone"))
        plugin.until(lambda: plugin.get(port, "/healthz") == (503, "NVML: NVML is gone\n"))
        kubelet.stop()
        plugin.until(lambda: "no stream" in plugin.get(port, "/readyz")[1])
        assert plugin.get(port, "/other")[0] == 404


def test_a_bug_in_an_agent_ends_the_daemon_aloud(folder, kubelet, monkeypatch):
    with pytest.raises(ZeroDivisionError), plugin.running(folder, lambda: facts(1)) as running:
        kubelet.wait_for(GPU, 1)
        monkeypatch.setattr("gpulet.plugin.kubelet.decide", lambda state, seen: 1 // 0)
        running.thread.join(5)


def test_a_waiting_plugin_says_what_for(folder, caplog):
    caplog.set_level("INFO", "gpulet")
    with plugin.running(folder, lambda: facts(1)):
        plugin.until(lambda: f"waiting for the kubelet's socket {folder}/kubelet.sock" in caplog.text)
        time.sleep(0.3)
    assert caplog.text.count("waiting for the kubelet") == 1


def test_no_thread_is_left(folder, kubelet):
    before = threading.active_count()
    with plugin.running(folder, lambda: facts(2)):
        kubelet.wait_for(GPU, 2)
    kubelet.stop()
    plugin.until(lambda: threading.active_count() <= before)


def test_a_configuration_under_which_nothing_is_found_takes_nothing_away(folder, kubelet, caplog):
    caplog.set_level("INFO")
    config = folder / "config.yaml"
    config.write_text("flags: {nvidiaDriverRoot: /one}")
    found = {"/one"}

    def look(config):
        if config.driver_root not in found:
            raise NvmlError("NVML library not found", code=12, seen=config.driver_root)
        return facts(2)

    words = ("--config-file", str(config))
    with plugin.running(folder, None, *words, refresh_every=0.1, look_as=look) as running:
        kubelet.wait_for(GPU, 2)
        config.write_text("flags: {nvidiaDriverRoot: /two}")
        plugin.until(lambda: "the last one stays: NVML library not found: /two" in caplog.text)
        time.sleep(0.5)
        assert kubelet.resources()[GPU].allocatable == 2
        assert running.daemon.generation.config.driver_root == "/one"
        assert caplog.text.count("the last one stays") == 1
        found.add("/two")  # what stood in its way is gone
        plugin.until(lambda: running.daemon.generation.config.driver_root == "/two")
        assert "driver_root = '/two' (was '/one')" in caplog.text
        assert len(kubelet.registrations) == 1


def test_a_reload_that_changes_nothing_is_said(folder, kubelet, caplog):
    caplog.set_level("INFO")
    with plugin.running(folder, lambda: facts(1)) as running:
        kubelet.wait_for(GPU, 1)
        running.reload()
        plugin.until(lambda: "configuration read again: nothing has changed" in caplog.text)


def test_an_error_that_nobody_expected_takes_nothing_away(folder, kubelet, caplog):
    node = Node(facts(2))
    with plugin.running(folder, node, refresh_every=0.1):
        kubelet.wait_for(GPU, 2)
        node.now = ZeroDivisionError("a bug")
        plugin.until(lambda: "the last generation stays: a bug" in caplog.text)
        assert "Traceback" in caplog.text
        assert kubelet.resources()[GPU].allocatable == 2
        node.now = facts(3)
        kubelet.wait_for(GPU, 3)


@pytest.mark.parametrize("word", [{"x": 1}, ["x"], 1, None])
def test_a_checkpoint_of_another_form(folder, kubelet, word):
    with plugin.running(folder, lambda: facts(2), refresh_every=0.1) as running:
        kubelet.wait_for(GPU, 2)
        entry = {"PodUID": "a", "ContainerName": "b", "ResourceName": GPU, "DeviceIDs": {"0": [word]}}
        for change in ({}, {"ResourceName": word}, {"PodUID": word}, {"DeviceIDs": word}):
            text = json.dumps({"Data": {"PodDeviceEntries": [{**entry, **change}]}})
            (folder / "kubelet_internal_checkpoint").write_text(text)
            time.sleep(0.25)
        assert running.thread.is_alive()
        assert kubelet.resources()[GPU].allocatable == 2


def test_an_acknowledgement_that_cannot_be_removed(folder, kubelet, caplog):
    node = Node(facts(1))
    with plugin.running(folder, node, refresh_every=0.1):
        kubelet.wait_for(GPU, 1)
        (folder / "gpulet" / "well" / "GPU-x").mkdir(parents=True)
        plugin.until(lambda: "can't be removed and doesn't count" in caplog.text)
        node.now = facts(2)
        kubelet.wait_for(GPU, 2)
    assert caplog.text.count("can't be removed") == 1


def test_the_operators_word_is_for_the_plugin_that_serves(folder, kubelet, caplog):
    """A rolling update: the old one stands back, and both have the same state folder."""
    word = folder / "gpulet" / "well" / gpu_uuid(1)
    with plugin.running(folder, lambda: facts(2), refresh_every=0.05) as old:
        kubelet.wait_for(GPU, 2)
        with plugin.running(folder, lambda: facts(2), refresh_every=0.4) as new:
            plugin.until(lambda: "standing back" in caplog.text)
            kubelet.wait_for(GPU, 2)
            for one in (old, new):
                hear(one, XidSeen(gpu_uuid(1), 79))
            kubelet.wait_for(GPU, 1)
            word.parent.mkdir(parents=True)
            word.touch()
            kubelet.wait_for(GPU, 2)
            plugin.until(lambda: gpu_uuid(1) not in (folder / "gpulet" / "health.json").read_text())
        kubelet.wait_for(GPU, 0)
        kubelet.wait_for(GPU, 2)  # the old one, which had heard of the fault too, serves again


def test_faults_that_cannot_be_read_are_told(folder, kubelet, caplog):
    (folder / "gpulet").mkdir()
    (folder / "gpulet" / "health.json").write_text("{")
    with plugin.running(folder, lambda: facts(1)):
        kubelet.wait_for(GPU, 1)
    assert "faults from before the restart can't be read" in caplog.text


def test_faults_that_cannot_be_kept_are_tried_again(folder, kubelet, caplog):
    caplog.set_level("INFO", "gpulet")
    place = folder / "gpulet" / "health.json"
    place.mkdir(parents=True)  # as good as a full disk
    with plugin.running(folder, lambda: facts(2), refresh_every=0.05) as running:
        kubelet.wait_for(GPU, 2)
        hear(running, XidSeen(gpu_uuid(1), 79))
        kubelet.wait_for(GPU, 1)
        time.sleep(0.3)
        assert caplog.text.count("faults can't be kept in") == 1
        place.rmdir()
        plugin.until(place.is_file)
        plugin.until(lambda: "faults are kept in" in caplog.text)
    assert gpu_uuid(1) in place.read_text()
    assert caplog.text.count("can't be kept") == 1


def test_faults_move_with_their_folder(folder, kubelet):
    config = folder / "c.yaml"
    config.write_text("")
    with plugin.running(folder, lambda: facts(2), "--config-file", str(config), refresh_every=0.05) as running:
        kubelet.wait_for(GPU, 2)
        hear(running, XidSeen(gpu_uuid(1), 79))
        kubelet.wait_for(GPU, 1)
        config.write_text(f"flags: {{plugin: {{stateDir: {folder}/other}}}}")
        plugin.until((folder / "other" / "health.json").is_file)
        assert gpu_uuid(1) in (folder / "other" / "health.json").read_text()
        assert kubelet.resources()[GPU].allocatable == 1
        (folder / "other" / "well").mkdir()
        (folder / "other" / "well" / gpu_uuid(1)).touch()
        kubelet.wait_for(GPU, 2)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "endless"])
def test_a_configuration_that_is_no_file_is_refused_at_once(folder, kubelet, caplog, kind):
    config = folder / "c.yaml"
    config.write_text("")
    with plugin.running(folder, lambda: facts(2), "--config-file", str(config), refresh_every=0.05) as running:
        kubelet.wait_for(GPU, 2)
        config.unlink()
        if kind == "pipe":
            os.mkfifo(config)
        elif kind == "folder":
            config.mkdir()
        elif kind == "device":
            config.symlink_to("/dev/zero")
        else:
            with open(config, "wb") as stream:
                stream.truncate(1 << 40)
        # between the old file and the new one there may be a look at none
        told = lambda: [line for line in caplog.messages if "can't be read: " in line and "No such" not in line]  # noqa: E731
        plugin.until(told)
        running.reload()
        assert kubelet.resources()[GPU].allocatable == 2
    assert len(told()) == 1 and str(config) in told()[0]


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_a_state_folder_that_is_none(folder, kubelet, caplog, kind):
    os.mkfifo(folder / "gpulet") if kind == "pipe" else (folder / "gpulet").write_text("")
    with plugin.running(folder, lambda: facts(2), refresh_every=0.05) as running:
        kubelet.wait_for(GPU, 2)
        hear(running, XidSeen(gpu_uuid(1), 79))
        kubelet.wait_for(GPU, 1)
        time.sleep(0.2)
    assert caplog.text.count("faults can't be kept") == 1


def test_more_replicas_than_a_kubelet_takes(folder, kubelet, caplog):
    config = folder / "config.yaml"
    config.write_text("")
    with plugin.running(folder, lambda: facts(2), "--config-file", str(config), refresh_every=0.1):
        kubelet.wait_for(GPU, 2)
        config.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1000000000}]}}")
        plugin.until(lambda: "2 devices with 1000000000 replicas each" in caplog.text)
        assert kubelet.resources()[GPU].allocatable == 2


def test_metrics_wait_for_their_address(folder, kubelet, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("gpulet.plugin.endpoint.RETRY", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with plugin.running(folder, lambda: facts(1), f"--metrics-address=127.0.0.1:{port}"):
            kubelet.wait_for(GPU, 1)
            assert "the devices are offered all the same" in caplog.text
            taken.close()
            plugin.until(lambda: f"listening at 127.0.0.1:{port} for metrics now" in caplog.text)
            assert plugin.get(port, "/healthz") == (200, "ok\n")


def test_a_reader_that_never_reads_is_dropped(folder, kubelet, monkeypatch):
    monkeypatch.setattr("gpulet.plugin.endpoint.PATIENCE", 0.2)
    with plugin.running(folder, lambda: facts(1), "--metrics-address=127.0.0.1:0") as running:
        kubelet.wait_for(GPU, 1)
        with socket.create_connection(("127.0.0.1", running.endpoint.port)) as mute:
            mute.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert mute.recv(1) == b""


def test_a_node_without_a_driver_is_alive_and_not_ready(folder, kubelet):
    node = Node(NvmlError("NVML library not found", code=12))
    words = ("--fail-on-init-error=false", "--metrics-address=127.0.0.1:0")
    with plugin.running(folder, node, *words, refresh_every=0.1) as running:
        plugin.until(lambda: running.daemon.wellness.health.problem)
        assert plugin.get(running.endpoint.port, "/healthz") == (200, "ok\n")
        wanted = (503, "no GPUs found yet: NVML library not found\n")
        assert plugin.get(running.endpoint.port, "/readyz") == wanted


def test_a_driver_that_hangs_is_told_and_holds_nothing_up(folder, kubelet, caplog, monkeypatch):
    monkeypatch.setattr("gpulet.plugin.aside.PATIENCE", 0.2)
    hung = threading.Event()
    hung.set()

    def look():
        assert hung.wait(30)
        return facts(2)

    config = folder / "c.yaml"
    config.write_text("")
    words = ("--metrics-address=127.0.0.1:0", "--config-file", str(config))
    with plugin.running(folder, look, *words, refresh_every=0.05) as running:
        kubelet.wait_for(GPU, 2)
        hung.clear()
        kubelet.wait_for(GPU, 0)
        wanted = (503, "NVML: the driver gave no answer within 0.2 s\n")
        assert plugin.get(running.endpoint.port, "/healthz") == wanted
        (folder / "gpulet" / "well").mkdir(parents=True, exist_ok=True)
        (folder / "gpulet" / "well" / "GPU-x").touch()
        running.reload()
        plugin.until(lambda: not (folder / "gpulet" / "well" / "GPU-x").exists())
        assert caplog.text.count("the node's GPUs can't be asked: the driver gave no answer") == 1
        assert "the driver gave no answer" not in caplog.text.replace("the node's GPUs can't be asked: the driver", "")
        hung.set()
        kubelet.wait_for(GPU, 2)
        hung.clear()
        kubelet.wait_for(GPU, 0)
        began = time.monotonic()
        running.call(lambda daemon: daemon.stop.set())
        running.thread.join(5)
        assert time.monotonic() - began < 1
    assert not (folder / "nvidia-gpu.sock").exists()
    hung.set()


def test_a_driver_that_hangs_at_the_start(folder, kubelet, monkeypatch):
    monkeypatch.setattr("gpulet.plugin.aside.PATIENCE", 0.2)
    hung = threading.Event()

    def look():
        assert hung.wait(30)
        return facts(2)

    with plugin.running(folder, look, "--metrics-address=127.0.0.1:0", refresh_every=0.05) as running:
        assert plugin.get(running.endpoint.port, "/healthz")[0] == 200
        plugin.until(lambda: plugin.get(running.endpoint.port, "/healthz")[0] == 503)
        hung.set()
        kubelet.wait_for(GPU, 2)
        assert plugin.get(running.endpoint.port, "/healthz")[0] == 200


def test_a_first_answer_that_comes_late_and_is_a_failure_counts_as_one(folder, monkeypatch):
    monkeypatch.setattr("gpulet.plugin.aside.PATIENCE", 0.1)

    def look():
        time.sleep(0.3)
        raise NvmlError("NVML isn't there", code=12)

    with pytest.raises(NvmlError, match="isn't there"), plugin.running(folder, look, refresh_every=0.05) as running:
        running.thread.join(5)


def test_ready_without_registering_where_that_is_wanted(folder):
    words = ("--metrics-address=127.0.0.1:0", "--kubelet-socket=")
    with plugin.running(folder, lambda: facts(1), *words) as running:
        plugin.until((folder / "nvidia-gpu.sock").exists)
        assert plugin.get(running.endpoint.port, "/readyz") == (200, "ok\n")


def test_scrapes_share_one_answer_made_outside_the_loop(folder, kubelet, monkeypatch):
    from gpulet.plugin.metrics import Metrics

    threads, make = [], Metrics.text

    def text(*arguments):
        threads.append(threading.current_thread().name)
        time.sleep(0.3)
        return make(*arguments)

    monkeypatch.setattr(Metrics, "text", text)
    with plugin.running(folder, lambda: facts(1), "--metrics-address=127.0.0.1:0") as running:
        kubelet.wait_for(GPU, 1)
        port = running.endpoint.port
        running.endpoint.fresh = 5
        scrapers = [threading.Thread(target=plugin.get, args=(port, "/metrics")) for _ in range(4)]
        for one in scrapers:
            one.start()
        plugin.until(lambda: threads)
        began = time.monotonic()
        assert plugin.get(port, "/healthz") == (200, "ok\n")
        assert time.monotonic() - began < 0.2
        for one in scrapers:
            one.join()
        assert threads == ["aside"]
        running.endpoint.fresh = 0
        plugin.get(port, "/metrics")
        assert len(threads) == 2


def test_who_holds_what_whatever_the_checkpoint_says(folder, kubelet):
    with plugin.running(folder, lambda: facts(2), "--metrics-address=127.0.0.1:0") as running:
        kubelet.wait_for(GPU, 2)
        odd = {"PodUID": 'a"b\\c\nd', "ContainerName": "\ud800", "ResourceName": GPU, "DeviceIDs": {"0": ["MIG-x::3"]}}
        text = json.dumps({"Data": {"PodDeviceEntries": [odd, odd]}})
        (folder / "kubelet_internal_checkpoint").write_text(text)
        lines = plugin.get(running.endpoint.port, "/metrics")[1].splitlines()
    at = lines.index("# TYPE gpu_allocation_info gauge")
    assert lines[at + 1 :] == [
        r'gpu_allocation_info{container="?",mig="MIG-x",namespace="",pod="a\"b\\c\nd",replica="3",uuid="MIG-x"} 1.0'
    ]


def test_a_filter_that_leaves_nothing_is_named(folder, caplog):
    with plugin.running(folder, lambda: facts(3), "--device-filter=model=*T4*,!index=0"):
        plugin.until(lambda: "No devices found." in caplog.text)
    assert "Waiting for some. 3 GPUs are left out by --device-filter=model=*T4*,!index=0" in caplog.text
