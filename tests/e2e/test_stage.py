"""What happens around running containers: the plugin dies, the kubelet restarts, and nobody loses a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulet.sim import pods
from gpulet.sim.demo import Demo
from gpulet.sim.stage import RESOURCE, Options, Stage

pytestmark = [pytest.mark.e2e, pytest.mark.root]
needs_root = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("runc"), reason="needs root and runc")

TWO = """
apiVersion: v1
kind: Pod
metadata: {name: NAME}
spec:
  containers:
    - {name: main, image: "pause:1", resources: {limits: {nvidia.com/gpu: 2}}}
"""


@pytest.fixture
def stage() -> Iterator[Stage]:
    folder = Path(tempfile.mkdtemp(prefix="gp"))  # pytest's own folders are too deep for a socket's path
    stage = Stage(folder, Options())
    try:
        stage.discover()
        yield stage
    finally:
        stage.close()
        shutil.rmtree(folder)


def manifest(tmp_path: Path, name: str) -> list[pods.Pod]:
    path = tmp_path / f"{name}.yaml"
    path.write_text(TWO.replace("NAME", name))
    return pods.load(path)


def within(seconds: float, what: str, condition: object) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)


@needs_root
def test_plugin_killed_in_the_middle(stage: Stage, tmp_path: Path) -> None:
    demo = Demo(stage, privileged=True)
    first = demo.run(manifest(tmp_path, "first"))
    assert first["ok"]
    running = {container.id: container.pid for container in stage.engine.running()}
    assert stage.plugin is not None and stage.plugin.starts == 1

    stage.plugin.kill()
    within(10, "the kubelet sees the devices go", lambda: stage.allocatable() == 0)
    assert stage.kubelet.resources()[RESOURCE].capacity == 8  # as the kubelet: capacity stays
    within(10, "the plugin comes back", lambda: stage.allocatable() == 8)
    assert stage.plugin.starts == 2

    # the running containers are the same processes, and the ledger still knows what they hold
    assert all(stage.engine.alive(container) for container in stage.engine.running())
    assert {container.id: container.pid for container in stage.engine.running()} == running
    second = demo.run(manifest(tmp_path, "second"))
    assert second["ok"]
    held = [set(report["pods"][0]["containers"][0]["allocated"]) for report in (first, second)]
    assert not held[0] & held[1]


@needs_root
def test_kubelet_restarts(stage: Stage, tmp_path: Path) -> None:
    demo = Demo(stage, privileged=True)
    first = demo.run(manifest(tmp_path, "first"))
    stage.kubelet.restart()
    within(10, "the plugin registers again", lambda: stage.allocatable() == 8)
    second = demo.run(manifest(tmp_path, "second"))
    assert first["ok"] and second["ok"]
    held = [set(report["pods"][0]["containers"][0]["allocated"]) for report in (first, second)]
    assert not held[0] & held[1]
    assert stage.plugin is not None and stage.plugin.starts == 1


@pytest.mark.parametrize("strategy", ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"])
def test_without_root_the_plan_is_printed(strategy: str) -> None:
    """Steps 1 to 3 run; 4 and 5 are planned, with one line that says what they need; exit code 0."""
    script = "import sys; from gpulet.commands.main import main; sys.exit(main(['demo', '--json', *sys.argv[1:]]))"
    command = [sys.executable, "-c", script, "--strategy", strategy]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="gp") as home:
        if os.geteuid() == 0:
            os.chmod(home, 0o777)
            environment |= {"HOME": home, "XDG_CACHE_HOME": home}
            # nobody, but able to read: the interpreter and the checkout may lie in a folder of root's own
            reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
            command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reading, *command]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["ok"] and "root" in report["planned"]
    two = report["pods"][0]["containers"][0]
    assert len(two["allocated"]) == 2 and two["seen"] is None
    nodes = [device["path"] for device in two["plan"]["injection"]["devices"]]
    assert sorted(path for path in nodes if not path[-1].isdigit()) == [
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidiactl",
    ] or strategy.startswith("cdi")
    assert sum(path.removeprefix("/dev/nvidia").isdigit() for path in nodes) == 2
    assert [step["step"] for step in two["steps"]][-1] == "mounting"


@pytest.mark.parametrize("strategy", ["envvar", "cdi-cri"])
def test_without_a_low_level_runtime_the_plan_is_printed(strategy: str) -> None:
    """runc or crun not installed: the same, naming the package."""
    script = "import sys; from gpulet.commands.main import main; sys.exit(main(sys.argv[1:]))"
    with tempfile.TemporaryDirectory(prefix="gp") as empty:
        for folder in ("/usr/bin", "/usr/sbin"):  # all that this machine has, but no low-level runtime
            for tool in os.listdir(folder):
                if tool not in ("runc", "crun") and not os.path.lexists(f"{empty}/{tool}"):
                    os.symlink(f"{folder}/{tool}", f"{empty}/{tool}")
        result = subprocess.run(
            [sys.executable, "-c", script, "demo", "--low-level", "crun", "--strategy", strategy],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PATH": empty},
        )
    assert result.returncode == 0, result.stderr
    assert "apt-get install crun" in " ".join(result.stdout.split())
