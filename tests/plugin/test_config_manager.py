"""The node's label chooses the configuration, against an API server on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from gpulet.errors import ConfigError, UsageError
from gpulet.plugin import config_manager as manager
from gpulet.plugin.apiserver import ApiServer
from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin
from support.api_server import api_server
from support.hand_made import facts

LABEL = "nvidia.com_device-plugin.config"
SHARED = "sharing: {{timeSlicing: {{resources: [{{name: gpu, replicas: {}}}]}}}}"


@pytest.fixture
def cluster():
    with api_server() as cluster:
        yield cluster


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "available"
    folder.mkdir()
    (folder / "..data").mkdir()  # as a ConfigMap's volume has it
    for name, text in (("default", ""), ("shared", SHARED.format(4))):
        (folder / name).write_text(text)
    return folder


def settings(files, **changes):
    values = {"node_name": "node-1", "srcdir": str(files), "dst": str(files.parent / "config.yaml"), **changes}
    return manager.Settings(**values)


def test_which_file(files):
    assert manager.select(settings(files), "shared") == f"{files}/shared"
    assert manager.select(settings(files, default="shared"), "") == f"{files}/shared"
    assert manager.select(settings(files, fallbacks=("named", "single")), "") == f"{files}/default"
    assert manager.select(settings(files, fallbacks=("single", "empty")), "") == "/dev/null"
    (files / "default").unlink()
    assert manager.select(settings(files, fallbacks=("named", "single")), "") == f"{files}/shared"


@pytest.mark.parametrize(
    ("changes", "label", "words"),
    [
        ({}, "quadro", "specified config quadro does not exist: nvidia.com/device-plugin.config=quadro"),
        (
            {"default": "nothing"},
            "",
            "default config nothing does not exist .wanted a file of /.*, here default, shared",
        ),
        ({"fallbacks": ("best",)}, "", "unknown fallback strategy: best"),
        ({"fallbacks": ("single",)}, "", "no config was set, no default was provided, and all fallbacks failed"),
        ({"srcdir": "/nowhere"}, "", "no configuration files in /nowhere"),
    ],
)
def test_no_file(files, changes, label, words):
    with pytest.raises(ConfigError, match=words):
        manager.select(settings(files, **changes), label)


def test_flags_and_variables():
    environ = {"NODE_NAME": "n", "CONFIG_FILE_SRCDIR": "/a", "CONFIG_FILE_DST": "/b", "ONESHOT": "true",
               "FALLBACK_STRATEGIES": "named,single", "SIGNAL": "12", "SEND_SIGNAL": "false"}  # fmt: skip
    read = manager.read(["--node-name=m"], environ)
    assert read == manager.Settings("m", "/a", "/b", oneshot=True, fallbacks=("named", "single"), signal=12,
                                    send_signal=False)  # fmt: skip
    with pytest.raises(ConfigError, match="invalid <node-name>: must not be empty string"):
        manager.read([], {})
    with pytest.raises(UsageError):
        manager.read(["--nope=1"], environ)


def test_once(cluster, files):
    """The first choice waits for the label, so that a labelled node never starts with the default."""
    cluster.label(**{LABEL: "shared"})
    words = ["--node-name=node-1", f"--config-file-srcdir={files}", f"--config-file-dst={files.parent}/c", "--oneshot",
             "--send-signal=false"]  # fmt: skip
    assert manager.run(words, {}, ApiServer(cluster.url)) == 0
    assert os.readlink(files.parent / "c") == f"{files}/shared"
    cluster.label(**{LABEL: "other"})
    with pytest.raises(ConfigError, match="specified config other does not exist"):
        manager.run(words, {}, ApiServer(cluster.url))
    assert os.readlink(files.parent / "c") == f"{files}/shared"


def test_a_link_tells_what_is_new(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1"), two.write_text("2")
    link = manager.Link(str(tmp_path / "link"))
    assert link.lead_to(str(one))
    assert link.lead_to(str(one)), "not told yet: a signal that failed is sent again"
    link.told()
    assert not link.lead_to(str(one))
    assert link.lead_to(str(two))
    link.told()
    two.unlink(), two.write_text("22")  # a ConfigMap's new content
    assert link.lead_to(str(two))
    link.told()
    two.unlink()  # dangling
    assert link.lead_to(str(one))
    assert not manager.Link(str(tmp_path / "link")).lead_to(str(one)), "what an earlier run made isn't news"


def test_who_gets_the_signal(tmp_path):
    for pid, words in {
        7: ["/usr/bin/nvidia-device-plugin"],
        8: ["/usr/bin/python3.11", "/usr/bin/gpulet-device-plugin", "--x"],
        9: ["/usr/bin/python3", "/usr/bin/gpulet-device-plugin", "config-manager"],
        10: ["mps-control-daemon"],
        11: ["grep", "nvidia-device-plugin"],
        12: [],
        14: ["/usr/bin/python3", "-m", "gpulet.plugin.entry"],
        15: ["/usr/bin/python3.12", "-I", "-X", "utf8", "-Wignore", "/usr/bin/gpulet-device-plugin"],
        16: ["python", "-Im", "gpulet.plugin.main", "--x"],
        17: ["python", "-m", "gpulet.plugin.entry", "config-manager"],
        18: ["python", "-c", "gpulet-device-plugin"],
        19: ["python", "-m", "pytest", "gpulet-device-plugin"],
        20: ["python", "-m"],
    }.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (tmp_path / "13").mkdir()  # has ended meanwhile
    assert manager.processes("nvidia-device-plugin", str(tmp_path)) == [7, 8, 14, 15, 16]
    assert manager.processes("/usr/bin/mps-control-daemon", str(tmp_path)) == [10]
    assert manager.processes("nobody", str(tmp_path)) == []


def test_a_process_that_a_hangup_would_end_gets_none_yet(files, monkeypatch):
    command = [sys.executable, "-c", "import signal, sys; {}; print(flush=True); sys.stdin.read()"]
    sent = []
    with contextlib.ExitStack() as stack:
        pids = []
        for how in ("signal.SIG_DFL", "lambda *_: None", "signal.SIG_IGN"):  # nohup leaves another than the first
            words = [*command[:2], command[2].format(f"signal.signal(1, {how})")]
            process = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert process.stdout.readline()
            pids.append(process.pid)
        monkeypatch.setattr(manager, "processes", lambda name: pids)
        monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
        manager.send(settings(files))
        assert sent == [(pid, 1) for pid in pids[1:]]
        sent.clear()
        manager.send(settings(files, signal=15))
        assert sent == [(pid, 15) for pid in pids]
        monkeypatch.setattr(manager, "processes", lambda name: pids[:1])
        with pytest.raises(ConfigError, match="no process nvidia-device-plugin to signal"):
            manager.send(settings(files))  # and is tried again


CODE = """
import sys
from gpulet.plugin import config_manager
from gpulet.plugin import logs
from gpulet.plugin.apiserver import ApiServer
config_manager.LOOK_EVERY = 0.2
config_manager.RETRY = 0.1
logs.start("text", "info")
sys.exit(config_manager.run(sys.argv[2:], {}, ApiServer(sys.argv[1])))
"""


def test_c56_the_plugin_follows_the_nodes_label(cluster, files):
    cluster.label(**{LABEL: "default"})
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet:
        target = folder / "config.yaml"
        log = folder / "manager.log"
        words = ["--node-name=node-1", f"--config-file-srcdir={files}", f"--config-file-dst={target}",
                 "--send-signal=false"]  # fmt: skip
        with open(log, "wb") as stream:
            process = subprocess.Popen([sys.executable, "-c", CODE, cluster.url, *words], stderr=stream)
        try:
            plugin.until(target.exists)
            with plugin.running(folder, lambda: facts(2), "--config-file", str(target), refresh_every=0.1):
                kubelet.wait_for("nvidia.com/gpu", 2)
                cluster.label(**{LABEL: "shared"})
                kubelet.wait_for("nvidia.com/gpu", 8)
                cluster.label(**{LABEL: "quadro-p2000"})
                wanted = "specified config quadro-p2000 does not exist: nvidia.com/device-plugin.config=quadro-p2000"
                plugin.until(lambda: wanted in log.read_text() and "the last choice stays" in log.read_text())
                assert kubelet.resources()["nvidia.com/gpu"].allocatable == 8
                (files / "quadro-p2000").write_text(SHARED.format(2))  # the ConfigMap gets it
                kubelet.wait_for("nvidia.com/gpu", 4)
                cluster.end_watches({"type": "ERROR", "object": {"code": 410}})
                cluster.label(**{LABEL: "default"})
                kubelet.wait_for("nvidia.com/gpu", 2)
                cluster.failing = 500
                cluster.end_watches()
                plugin.until(lambda: "trying again" in log.read_text())
                cluster.label(**{LABEL: "shared"})
                cluster.failing = 0
                kubelet.wait_for("nvidia.com/gpu", 8)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0


def test_a_signal_that_reaches_nobody_is_tried_again(files, monkeypatch):
    sent = []
    monkeypatch.setattr(manager, "processes", lambda name: [])
    link = manager.Link(str(files.parent / "config.yaml"))
    with pytest.raises(ConfigError, match="no process nvidia-device-plugin to signal"):
        manager._apply(settings(files), link, "shared")
    monkeypatch.setattr(manager, "processes", lambda name: [4711])
    monkeypatch.setattr(manager, "heeds", lambda pid, number: True)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    manager._apply(settings(files), link, "shared")
    manager._apply(settings(files), link, "shared")
    assert sent == [(4711, signal.SIGHUP)]


def test_outside_a_cluster(files):
    words = ["--node-name=n", f"--config-file-srcdir={files}", "--config-file-dst=/x"]
    done = subprocess.run([sys.executable, "-m", "gpulet.plugin.config_manager", *words], capture_output=True,
                          text=True, env={"PATH": os.environ["PATH"]})  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("config-manager: no API server: no KUBERNETES_SERVICE_HOST")
