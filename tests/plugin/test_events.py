"""Health changes as Kubernetes Events, against an API server on loopback."""

from __future__ import annotations

import os
import shutil
import time
from urllib.parse import urlsplit

import pytest

from gpulet.plugin import events, main
from gpulet.plugin.apiserver import ApiError, ApiServer, in_cluster
from gpulet.plugin.config import Config
from gpulet.plugin.events import Events
from gpulet.plugin.health import Answer, Notice, XidSeen
from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin
from support.api_server import api_server, self_signed
from support.hand_made import facts, gpu_uuid, mig_gpu

GPU = "nvidia.com/gpu"


@pytest.fixture
def cluster():
    with api_server() as cluster:
        yield cluster


@pytest.fixture
def reporter(cluster):
    reporter = Events(ApiServer(cluster.url), "node-1")
    reporter.start()
    yield reporter
    reporter.stop()


def test_a_failed_gpu_becomes_an_event_and_its_recovery_too(cluster, reporter):
    with (
        plugin.short_folder() as folder,
        Kubelet(folder) as kubelet,
        plugin.running(folder, lambda: facts(2), report=reporter.tell) as running,
    ):
        kubelet.wait_for(GPU, 2)
        running.call(lambda daemon: daemon.wellness.hear(XidSeen(gpu_uuid(1), 79)))
        plugin.until(lambda: cluster.reasons() == ["GPUUnhealthy"])
        running.call(lambda daemon: daemon.wellness.hear(Answer(gpu_uuid(1), "", 2)))
        running.call(lambda daemon: daemon.wellness.hear(Answer(gpu_uuid(1), "", 0)))
        plugin.until(lambda: cluster.reasons() == ["GPUUnhealthy", "GPURecovered"])
    unhealthy, recovered = cluster.events.values()
    assert unhealthy["involvedObject"]["name"] == "node-1"
    assert (unhealthy["type"], recovered["type"]) == ("Warning", "Normal")
    for told in ("Xid=79", "fallen off the bus", "action: reboot", "GPU 1", "PCI 00000000:11:00.0", gpu_uuid(1)):
        assert told in unhealthy["message"]


def test_what_is_not_offered_and_a_refused_configuration(cluster, reporter):
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet:
        config = folder / "c.yaml"
        config.write_text("")
        node = facts(mig_gpu(0, "1g.10gb", "2g.20gb"), mig_gpu(1, "1g.10gb"))
        words = ("--mig-strategy=single", "--config-file", str(config))
        with plugin.running(folder, lambda: node, *words, refresh_every=0.1, report=reporter.tell):
            kubelet.wait_for(GPU, 1)
            config.write_text("flags: {migStrategy: wrong, plugin: {deviceIDStrategy: nonsense}}")
            plugin.until(lambda: "ConfigRejected" in cluster.reasons())
    left_out, refused = cluster.events.values()
    assert "has profiles 1g.10gb×1, 2g.20gb×1; strategy single needs one" in left_out["message"]
    assert "invalid --device-id-strategy option: nonsense" in refused["message"]


def test_the_same_again_is_counted(cluster, reporter):
    for _ in range(3):
        reporter.tell(Notice("NVMLFailed", "", "gone"))
    plugin.until(lambda: [event["count"] for event in cluster.events.values()] == [3])
    cluster.events.clear()  # an Event's life is an hour
    reporter.tell(Notice("NVMLFailed", "", "gone"))
    plugin.until(lambda: [event["count"] for event in cluster.events.values()] == [1])


def test_an_api_server_that_refuses_or_is_away_for_a_moment(cluster, reporter, monkeypatch, caplog):
    monkeypatch.setattr(events, "RETRY", 0.05)
    cluster.failing = 403
    reporter.tell(Notice("NVMLFailed", "", "one"))
    plugin.until(lambda: "403 Forbidden" in caplog.text)
    cluster.failing = 503
    reporter.tell(Notice("NVMLFailed", "", "two"))
    plugin.until(lambda: "503 Service Unavailable" in caplog.text)
    cluster.failing = 0
    plugin.until(lambda: [event["message"] for event in cluster.events.values()] == ["two"])


def test_too_many_requests_is_no_refusal(cluster, reporter, monkeypatch, caplog):
    monkeypatch.setattr(events, "RETRY", 30)
    cluster.failing, cluster.retry_after = 429, "1"
    reporter.tell(Notice("NVMLFailed", "", "one"))
    plugin.until(lambda: "429 Too Many Requests" in caplog.text)
    cluster.failing = 0
    began = time.monotonic()
    plugin.until(lambda: cluster.reasons() == ["NVMLFailed"])
    assert time.monotonic() - began > 0.8


def test_a_bug_does_not_end_the_thread(cluster, reporter, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(ApiServer, "send", lambda *arguments: 1 // 0)
        reporter.tell(Notice("NVMLFailed", "", "one"))
        plugin.until(lambda: "Event NVMLFailed can't be reported" in caplog.text)
    reporter.tell(Notice("NVMLFailed", "", "two"))
    plugin.until(lambda: [event["message"] for event in cluster.events.values()] == ["two"])


@pytest.mark.parametrize("port", ["tcp://10.0.0.1:443", "x", "99999", "-1"])
def test_a_port_that_is_none(tmp_path, port, monkeypatch, caplog):
    (tmp_path / "token").touch()
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    with pytest.raises(ApiError, match="is no API server's address"):
        in_cluster(environ, str(tmp_path))
    monkeypatch.setattr("gpulet.plugin.apiserver.SERVICE_ACCOUNT", str(tmp_path))
    monkeypatch.setattr(os, "environ", environ)
    assert main._events(Config(node_name="n")) is None
    assert "health changes become no Events" in caplog.text


def test_a_storm_waits_for_nobody(cluster):
    reporter = Events(ApiServer(cluster.url), "node-1")  # not started: nothing is taken out
    for number in range(1000):
        reporter.tell(Notice("GPUUnhealthy", "u", str(number)))
    assert reporter._notices.qsize() == events.WAITING


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_with_the_service_accounts_token_and_authority(tmp_path):
    certificate = self_signed(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    with api_server(certificate=certificate) as cluster:
        place = urlsplit(cluster.url)
        environ = {"KUBERNETES_SERVICE_HOST": place.hostname, "KUBERNETES_SERVICE_PORT": str(place.port)}
        api = in_cluster(environ, str(tmp_path))
        found = api.get("/api/v1/nodes?fieldSelector=metadata.name%3Dnode-1")
        assert found["items"][0]["metadata"]["name"] == "node-1"
        assert cluster.tokens == ["Bearer secret"]
        with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            ApiServer(cluster.url).get("/api/v1/nodes")
        assert in_cluster({}, str(tmp_path)) is None
        assert in_cluster(environ, str(tmp_path / "nowhere")) is None


def test_nobody_at_the_address():
    with pytest.raises(ApiError, match=r"GET /x of the API server http://127\.0\.0\.1:1 failed"):
        ApiServer("http://127.0.0.1:1").get("/x")
