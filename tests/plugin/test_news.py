"""What people are told of the plugin and its node: each thing once, and again when it has changed."""

from __future__ import annotations

import pytest

from gpulet.errors import CdiError
from gpulet.node.gpu import Link, Lost
from gpulet.plugin.access import AccessLost
from gpulet.plugin.apiserver import ApiServer
from gpulet.plugin.config import Config
from gpulet.plugin.events import Events
from gpulet.plugin.holders import Holder
from gpulet.plugin.news import News
from support import driver_tree
from support import plugin_process as plugin
from support.api_server import api_server
from support.hand_made import facts, gpu, gpu_uuid, mig_gpu

GPU = "nvidia.com/gpu"


class Told:
    """Collects notices."""

    def __init__(self):
        self.notices = []

    def __call__(self, notice):
        self.notices.append(notice)

    def texts(self, kind):
        return [notice.text for notice in self.notices if notice.kind == kind]


class Node:
    """Facts that a test changes, and whether CDI specs can be written."""

    def __init__(self, now):
        self.now, self.full = now, False

    def look(self):
        return self.now

    def publish(self, config, facts, imex):
        if self.full:
            raise CdiError("no space left for the spec")
        return ()


def apart(*indices):
    """GPUs of which NVML tells no link between the first and the last."""
    ends = (indices[0], indices[-1])
    return facts(*(
        gpu(one, links=tuple(Link(o, "" if {one, o} == set(ends) else "numa") for o in indices if o != one))
        for one in indices
    ))  # fmt: skip


def test_topology_unknown(folder, kubelet, caplog):
    told, node = Told(), Node(apart(0, 1, 2))
    with plugin.running(folder, node.look, refresh_every=0.05, report=told):
        kubelet.wait_for(GPU, 3)
        assert kubelet.allocate("p", "c", {GPU: 2}).envs  # it goes on all the same
        kubelet.release("p")
        node.now = apart(0, 1, 2, 3)
        kubelet.wait_for(GPU, 4)
        node.now = facts(4)
        plugin.until(lambda: len(told.texts("AllocationFallback")) == 2)
    first, second = told.texts("AllocationFallback")
    assert (
        first == f"{GPU}: NVML doesn't tell how GPUs 0 and 2 are linked: sets of GPUs are preferred as if they were not"
    )
    assert "GPUs 0 and 3 are" in second
    assert f"AllocationFallback: {first}" in caplog.text


@pytest.mark.parametrize("words", [("--mig-strategy=mixed",), ("--config-file=CONFIG",)])
def test_topology_that_nobody_asks_for(folder, kubelet, words):
    """MIG devices and replicas go by policy, a single GPU by itself."""
    (folder / "c").write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}")
    words = [word.replace("CONFIG", str(folder / "c")) for word in words]
    told = Told()
    node = facts(mig_gpu(0, "1g.10gb", links=(Link(1),)), gpu(1, links=(Link(0),)))
    with plugin.running(folder, lambda: node, *words, report=told):
        plugin.until(lambda: kubelet.resources())
    assert told.texts("AllocationFallback") == []


def test_the_links_of_a_lost_gpu_concern_nobody(folder, kubelet):
    told, node = Told(), Node(facts(3))
    with plugin.running(folder, node.look, refresh_every=0.05, report=told) as running:
        kubelet.wait_for(GPU, 3)
        node.now = facts(*facts(gpu(0), gpu(2)).gpus, lost=(Lost(1, "GPU is lost"),))
        plugin.until(lambda: running.daemon.generation.kept == (gpu_uuid(1),))
    assert told.texts("AllocationFallback") == []


def test_mig_layouts(folder, kubelet):
    told, node = Told(), Node(facts(mig_gpu(0, "1g.10gb", "2g.20gb"), mig_gpu(1, "1g.10gb"), lost=(Lost(2, "gone"),)))
    with plugin.running(folder, node.look, "--mig-strategy=single", refresh_every=0.05, report=told):
        kubelet.wait_for(GPU, 1)
        plugin.until(lambda: len(told.notices) == 2)
        node.now = facts(mig_gpu(0), mig_gpu(1, "1g.10gb"))
        plugin.until(lambda: len(told.notices) == 3)
    assert told.texts("DeviceNotOffered") == ["GPU 2: gone"]
    layout, empty = told.texts("MIGLayoutInvalid")
    assert layout.startswith(f"GPU 0 {gpu_uuid(0)} has profiles 1g.10gb×1, 2g.20gb×1")
    assert "no MIG devices configured" in empty


def test_the_kubelet_is_told_again(folder, kubelet, caplog):
    told = Told()
    caplog.set_level("INFO", "gpulet")
    with plugin.running(folder, lambda: facts(2), report=told):
        kubelet.wait_for(GPU, 2)
        plugin.until(lambda: "Registered device plugin" in caplog.text)  # the list comes before the answer
        assert told.notices == []
        kubelet.restart()
        kubelet.wait_for(GPU, 2)
        plugin.until(lambda: told.texts("PluginReRegistered") == [f"{GPU} is registered with the kubelet again"])


def test_cdi_specs_of_an_earlier_state(folder, kubelet, caplog):
    told, node = Told(), Node(facts(2))
    words = ("--device-list-strategy=cdi-cri", "--metrics-address=127.0.0.1:0")
    with plugin.running(folder, node.look, *words, publish=node.publish, refresh_every=0.05, report=told) as running:
        kubelet.wait_for(GPU, 2)
        node.full = True
        node.now = facts(3)
        plugin.until(lambda: told.texts("CDISpecStale"))
        plugin.until(lambda: told.texts("NodeChangeRejected") == ["no space left for the spec"])
        assert running.daemon.looked != running.daemon.generation.facts
        node.full = False
        kubelet.wait_for(GPU, 3)
        node.full = True
        node.now = facts(4)
        plugin.until(lambda: len(told.texts("CDISpecStale")) == 2)
    assert gpu_uuid(2) in told.texts("CDISpecStale")[0]
    assert told.texts("ConfigRejected") == []


def test_a_driver_whose_parts_do_not_fit(tmp_path, caplog):
    root = driver_tree.create(tmp_path)
    told, config = Told(), Config(driver_root=str(root), driver_root_ctr_path="/nowhere")
    news = News(None, told)
    version = root / "proc/driver/nvidia/version"
    for _ in range(3):
        news.drifted(config, None, None)
    assert told.notices == []
    running = version.read_text()
    version.write_text(running.replace("570.86.15", "565.57.01"))
    for _ in range(3):
        news.drifted(config, None, None)
    (text,) = told.texts("DriverMismatch")
    assert text.startswith("the driver's kernel module is 565.57.01, its library 570.86.15: ")
    assert caplog.text.count("DriverMismatch") == 1
    for content in (running, running.replace("570.86.15", "565.57.01")):  # mended, and wrong again
        version.write_text(content)
        news.drifted(config, None, None)
    assert len(told.texts("DriverMismatch")) == 2


def test_a_comparison_that_fails_ends_nothing(folder, kubelet, caplog, monkeypatch):
    monkeypatch.setattr("gpulet.plugin.drift.driver_versions", lambda root: int("x"))
    node, told = Node(facts(1)), Told()
    with plugin.running(folder, node.look, refresh_every=0.05, report=told):
        plugin.until(lambda: "can't be compared with the node: invalid literal" in caplog.text)
        node.now = facts(2)
        kubelet.wait_for(GPU, 2)
    assert caplog.text.count("can't be compared") == 1
    assert told.notices == []


def test_an_event_about_a_pod_is_beside_the_pod():
    lost = AccessLost(Holder("", "u-1", "main", GPU, gpu_uuid(0)), gpu_uuid(0), "/dev/nvidia0")
    named = Holder("team", "trainer", "main", GPU, gpu_uuid(0))
    with api_server() as cluster:
        reporter = Events(ApiServer(cluster.url), "node-1")
        reporter.start()
        try:
            news = News(None, reporter.tell)
            for held in ([named], [named], []):
                news.lost_access(lost, held)
            plugin.until(lambda: [one["count"] for one in cluster.events.values()] == [2, 1])
        finally:
            reporter.stop()
        on_pod, on_node = cluster.events.values()
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": "team", "name": "trainer", "uid": "u-1"}
    assert (on_pod["involvedObject"], on_pod["metadata"]["namespace"]) == (about, "team")
    assert (on_pod["reason"], on_pod["type"]) == ("GPUAccessLost", "Warning")
    assert on_node["involvedObject"]["kind"] == "Node"
    assert "the Pod with UID u-1 may no longer use /dev/nvidia0" in on_node["message"]


def test_a_registration_is_no_warning():
    with api_server() as cluster:
        reporter = Events(ApiServer(cluster.url), "node-1")
        reporter.start()
        news = News(None, reporter.tell)
        news.registered(GPU)
        news.registered(GPU)
        plugin.until(lambda: [one["type"] for one in cluster.events.values()] == ["Normal"])
        reporter.stop()
