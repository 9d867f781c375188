from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from gpulet.errors import ConfigError
from gpulet.plugin import mps
from gpulet.plugin.config import Config
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import Shared, Sharing
from gpulet.sim.kubelet import Kubelet
from support import plugin_process as plugin
from support.hand_made import facts, gpu, gpu_uuid

GPU = "nvidia.com/gpu"
PROGRAM = """#!/bin/sh
read -r line
echo "$line $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY" >> {log}
test -e "$CUDA_MPS_PIPE_DIRECTORY/answers"
"""


def test_offered_once_the_daemon_answers(tmp_path, monkeypatch, caplog):
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(PROGRAM.format(log=tmp_path / "log"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    root = tmp_path / "mps"
    (tmp_path / "c.yaml").write_text(
        f"flags: {{mpsRoot: {root}}}\nsharing: {{mps: {{resources: [{{name: gpu, replicas: 2}}]}}}}"
    )
    words = ("--config-file", str(tmp_path / "c.yaml"))
    with plugin.short_folder() as folder, Kubelet(folder) as kubelet, plugin.running(folder, lambda: facts(2), *words):
        plugin.until(lambda: "waiting for the MPS daemon at" in caplog.text)
        pipe = root / GPU / "pipe"
        pipe.mkdir(parents=True)
        plugin.until(lambda: "ended with 1" in caplog.text)
        assert kubelet.resources() == {}
        (pipe / "answers").touch()
        plugin.until(lambda: f"it answers and has no limits yet: no {root / GPU}/.started" in caplog.text)
        assert kubelet.resources() == {}
        (root / GPU / ".started").touch()
        kubelet.wait_for(GPU, 4)
        allocation = kubelet.allocate("p", "c", {GPU: 1})
    assert allocation.envs == {
        "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe",
        "NVIDIA_VISIBLE_DEVICES": gpu_uuid(0),
    }
    assert [(mount.container_path, mount.host_path) for mount in allocation.mounts] == [
        ("/mps/nvidia.com/gpu/pipe", str(pipe)),
        ("/dev/shm", str(root / "shm")),
    ]
    asked = (tmp_path / "log").read_text().splitlines()[-1]
    assert asked == f"get_default_active_thread_percentage {pipe} {root}/nvidia.com/gpu/log"


@pytest.mark.parametrize(
    ("arch", "replicas", "fits"),
    [("9.0", 48, True), ("9.0", 49, False), ("7.0", 48, True), ("6.1", 16, True), ("6.1", 17, False)],
)
def test_how_many_clients_a_gpu_takes(arch, replicas, fits):
    config = Config(mps=Sharing((Shared(GPU, replicas),), True), mps_root="/m")
    resources = inventory(facts(gpu(0, arch=arch)), config).resources
    if fits:
        mps.check(resources)
    else:
        with pytest.raises(ConfigError, match=f"maximum allowed replicas exceeded: {replicas} >"):
            mps.check(resources)


def test_a_control_program_that_cannot_be_run(tmp_path, monkeypatch, caplog):
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_bytes(b"\x7fELF torn")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    (tmp_path / "mps" / GPU / "pipe").mkdir(parents=True)
    (tmp_path / "c.yaml").write_text("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}")
    words = ("--config-file", str(tmp_path / "c.yaml"), f"--mps-root={tmp_path / 'mps'}")
    with plugin.short_folder() as folder, Kubelet(folder), plugin.running(folder, lambda: facts(2), *words) as running:
        plugin.until(lambda: "can't be run: Exec format error" in caplog.text)
        assert running.thread.is_alive()


@pytest.mark.parametrize("then", ["wait", "exit 0"])
def test_a_control_program_that_hangs_leaves_nothing_behind(tmp_path, monkeypatch, then):
    """Nor does one that ends while what it has started holds our pipes."""
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child\n{then}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "ANSWER_TIMEOUT", 1.0)
    (tmp_path / "mps" / GPU / "pipe").mkdir(parents=True)
    began = time.monotonic()
    said = asyncio.run(mps.problem(GPU, Config(mps_root=str(tmp_path / "mps"))))
    assert said.endswith("no answer within 1 s")
    assert time.monotonic() - began < 30
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    plugin.until(lambda: not child.exists() or child.read_text().split()[2] == "Z")  # a container's init may not reap
