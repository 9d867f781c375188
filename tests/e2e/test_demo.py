"""The main job, whole: Pods in, and what the probe inside each real container saw out."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

Report = dict[str, Any]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes, mounts and namespaces are root's"),
    pytest.mark.skipif(shutil.which("runc") is None, reason="needs runc"),
]

EXAMPLES = Path(__file__).parents[2] / "examples" / "pods"
COMMAND = [
    sys.executable,
    "-c",
    "import sys; from gpulet.commands.main import main; sys.exit(main())",
    "demo",
    "--json",
]
GPU_NODE = re.compile(r"/dev/nvidia\d+")

BOTH = """
apiVersion: v1
kind: Pod
metadata: {name: two}
spec:
  containers:
    - {name: main, image: "pause:1", resources: {limits: {nvidia.com/gpu: 2}}}
    - {name: side, image: "pause:1"}
---
apiVersion: v1
kind: Pod
metadata: {name: one}
spec:
  containers:
    - {name: main, image: "pause:1", resources: {limits: {nvidia.com/gpu: 1}}}
"""


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own for the demo's, short enough for sockets: another demo may run beside."""
    with tempfile.TemporaryDirectory(prefix="gp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def demo(*arguments: str, code: int = 0) -> Report:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == code, result.stderr or result.stdout
    report: Report = json.loads(result.stdout)
    return report


def containers(report: Report) -> dict[str, Report]:
    return {f"{pod['name']}/{one['name']}": one for pod in report["pods"] for one in pod["containers"]}


def gpu_nodes(container: Report) -> list[str]:
    return [device for device in container["seen"]["devices"] if GPU_NODE.fullmatch(device)]


def left_behind(folder: Path) -> dict[str, list[str]]:
    """What there still is of demos below a folder: mounts, processes, control groups, files."""
    found: dict[str, list[str]] = {"mounts": [], "processes": [], "groups": [], "files": []}
    found["mounts"] = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text() + os.readlink(process / "root")
        except OSError:
            continue
        if str(folder) in words:
            found["processes"].append(words.replace("\0", " "))
    found["files"] = sorted(str(path) for path in folder.iterdir())
    names = {path.name for path in folder.iterdir()}
    for group in Path("/sys/fs/cgroup").glob("*/gpulet-demo-*"):
        if group.name in names:
            found["groups"].append(str(group))
    return found


NOTHING: dict[str, list[str]] = {"mounts": [], "processes": [], "groups": [], "files": []}


def test_examples(temporary: Path) -> None:
    groups = set(Path("/sys/fs/cgroup").glob("*/gpulet-demo-*"))
    report = demo()
    assert report["ok"] and len(report["node"]["gpus"]) == 8
    pods = {pod["name"]: pod for pod in report["pods"]}
    found = containers(report)

    two = found["two-gpus/main"]
    assert len(two["allocated"]) == 2 and two["seen"]["nvml"] == two["allocated"] and len(gpu_nodes(two)) == 2
    assert len(two["seen"]["denied"]) == 6
    assert [step["step"] for step in two["steps"]] == [
        "discovery",
        "scheduling",
        "configuration",
        "initialisation",
        "mounting",
    ]

    each = [found["one-each/trainer"], found["one-each/evaluator"]]
    assert all(one["seen"]["nvml"] == one["allocated"] and len(one["allocated"]) == 1 for one in each)
    assert each[0]["allocated"] != each[1]["allocated"]

    assert found["no-gpu/main"]["seen"]["nvml"] == [] and found["no-gpu/main"]["seen"]["devices"] == []
    assert len(found["legacy-trap/main"]["seen"]["nvml"]) == 8 and found["legacy-trap/main"]["allocated"] == []
    guarded = found["legacy-guarded/main"]
    assert guarded["seen"]["nvml"] == [] and guarded["seen"]["devices"] == [] and len(guarded["seen"]["denied"]) == 8
    assert "kubelet" in guarded["reason"]

    assert pods["fits-nowhere"]["phase"] == "Pending"
    assert pods["fits-nowhere"]["message"] == "0/3 nodes are available: 3 Insufficient nvidia.com/mig-1g.10gb."
    assert pods["nine-gpus"]["message"] == "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."

    assert left_behind(temporary) == NOTHING
    # control groups of this demo; another's, running beside, may have come or gone meanwhile
    assert not [one for one in set(Path("/sys/fs/cgroup").glob("*/gpulet-demo-*")) - groups if not held(one.name)]


def held(name: str) -> bool:
    """Whether a demo of that folder's name is running, anywhere on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if name in path.read_text(errors="replace"):
                return True
    return False


MATRIX = list(
    itertools.product(
        ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri"),
        ("uuid", "index"),
        ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        ("runtime", "hook"),
    )
)


@pytest.mark.parametrize(("strategy", "identify", "variable", "path"), MATRIX)
def test_matrix(tmp_path: Path, strategy: str, identify: str, variable: str, path: str) -> None:
    check_matrix(tmp_path, strategy, identify, variable, path)


@pytest.mark.skipif(shutil.which("crun") is None, reason="needs crun")
@pytest.mark.parametrize("strategy", ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri", "envvar,cdi-cri"])
def test_crun(tmp_path: Path, strategy: str) -> None:
    check_matrix(tmp_path, strategy, "uuid", "NVIDIA_VISIBLE_DEVICES", "runtime", "--low-level", "crun")


def check_matrix(tmp_path: Path, strategy: str, identify: str, variable: str, path: str, *more: str) -> None:
    manifest = tmp_path / "pods.yaml"
    manifest.write_text(BOTH)
    arguments = ["--pod", str(manifest), "--strategy", strategy, "--identify", identify]
    report = demo(*arguments, "--variable", variable, "--path", path, *more)
    found = containers(report)
    taken = set()
    for name, count in (("two/main", 2), ("two/side", 0), ("one/main", 1)):
        container = found[name]
        assert len(container["allocated"]) == count
        assert container["seen"]["nvml"] == container["allocated"]
        assert len(gpu_nodes(container)) == count and len(container["seen"]["denied"]) == 8 - count
        assert not taken & set(container["allocated"])
        taken |= set(container["allocated"])
        check_cuda_variable(container, strategy, identify, variable, path)


def check_cuda_variable(container: Report, strategy: str, identify: str, variable: str, path: str) -> None:
    """What CUDA reads inside must name the GPUs as they count there."""
    count = len(container["allocated"])
    if variable == "CUDA_VISIBLE_DEVICES" and count and not strategy.startswith("cdi"):
        value = container["seen"]["env"]["CUDA_VISIBLE_DEVICES"]
        if identify == "index":
            assert value == ",".join(str(index) for index in range(count))
        else:
            assert sorted(value.split(",")) == sorted(container["allocated"])


def test_a_pods_own_value_stands_over_the_plugins(tmp_path: Path) -> None:
    """As seen on a real cluster with the peer's defaults; policy `kubelet` gives what was allocated."""
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(
        """
apiVersion: v1
kind: Pod
metadata: {name: greedy}
spec:
  containers:
    - name: main
      image: "pause:1"
      env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]
      resources: {limits: {nvidia.com/gpu: 1}}
"""
    )
    greedy = containers(demo("--pod", str(manifest)))["greedy/main"]
    assert len(greedy["allocated"]) == 1 and len(greedy["seen"]["nvml"]) == 8
    honest = containers(demo("--pod", str(manifest), "--policy", "kubelet"))["greedy/main"]
    assert len(honest["allocated"]) == 1 and honest["seen"]["nvml"] == honest["allocated"]
    assert len(honest["seen"]["denied"]) == 7


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("after", [0.3, 0.8, 1.5])
def test_interrupted(temporary: Path, sent: signal.Signals, after: float) -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(after)
    process.send_signal(sent)
    assert process.wait(timeout=60) in (130, 0, -sent)  # -sent: before the interpreter had its handlers
    assert left_behind(temporary) == NOTHING


def test_killed(temporary: Path) -> None:
    """Nobody can clean up after SIGKILL: no process or mount outlives it, and the next demo takes the rest away."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not list(temporary.glob("gpulet-demo-*/bundles/*/init.pid")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    while left_behind(temporary)["processes"]:
        assert time.monotonic() < deadline, left_behind(temporary)
        time.sleep(0.01)
    left = left_behind(temporary)
    assert not left["mounts"] and left["files"] and left["groups"]
    demo("--pod", str(EXAMPLES / "03-no-gpu.yaml"))
    assert left_behind(temporary) == NOTHING
    assert not [path for path in left["groups"] if Path(path).exists()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "telepathy"], "--strategy"),
        (["--profile", "no-such-profile"], "no-such-profile"),
        (["--pod", "/nonexistent.yaml"], "/nonexistent.yaml"),
        (["--path", "sideways"], "--path"),
        (["--variable", "A B"], "--variable"),
        (["--gpus", "99999"], "--gpus"),
        (["--low-level", "no-such-runtime"], "no-such-runtime"),
        (["--profile", "wsl"], "wsl"),
        (["--profile", "tegra"], "tegra"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode in (1, 2)
    assert words in result.stderr and len(result.stderr.strip().splitlines()) == 1 and not result.stdout


def one_pod(tmp_path: Path, container: str, more: str = "") -> Path:
    path = tmp_path / "pod.yaml"
    path.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: one}\nspec:\n"
        f"{more}  containers:\n    - {{name: main, image: 'pause:1', {container}}}\n"
    )
    return path


def test_privileged_has_every_node(tmp_path: Path) -> None:
    """A privileged container has the machine's device nodes whatever it asked for, as containerd gives it."""
    path = one_pod(tmp_path, "securityContext: {privileged: true}, resources: {limits: {nvidia.com/gpu: 1}}")
    report = demo("--pod", str(path))
    container = containers(report)["one/main"]
    assert report["ok"] and len(gpu_nodes(container)) == 8 and not container["seen"]["denied"]
    assert len(container["allocated"]) == 1 and len(container["beyond"]) == 7


def test_capabilities_decide_which_libraries_come(tmp_path: Path) -> None:
    path = one_pod(
        tmp_path,
        "env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: video}], resources: {limits: {nvidia.com/gpu: 1}}",
    )
    for way in ("runtime", "hook"):
        container = containers(demo("--pod", str(path), "--path", way))["one/main"]
        assert len(gpu_nodes(container)) == 1 and container["seen"]["libraries"]["libnvidia-ml.so.1"] is None


def test_kept_folder_replays(temporary: Path) -> None:
    """--keep leaves the bundles with what the runtime wrote, and `explain` reads them."""
    demo("--keep", "--pod", str(EXAMPLES / "01-two-gpus.yaml"))
    (folder,) = temporary.glob("gpulet-kept-*")
    (config,) = folder.glob("bundles/two-gpus-main-*/config.json")
    nodes = [device["path"] for device in json.loads(config.read_text())["linux"]["devices"]]
    assert len([path for path in nodes if GPU_NODE.fullmatch(path)]) == 2
    shutil.rmtree(folder)


def test_hardened_umask(tmp_path: Path) -> None:
    """Root's umask may keep everything from others; a container's user that isn't root still reads its image."""
    path = one_pod(tmp_path, "securityContext: {runAsUser: 1000}, resources: {limits: {nvidia.com/gpu: 1}}")
    before = os.umask(0o077)
    try:
        report = demo("--pod", str(path))
    finally:
        os.umask(before)
    assert containers(report)["one/main"]["seen"]["nvml"] == containers(report)["one/main"]["allocated"]


def test_a_shells_variables_dont_reach_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("DEVICE_LIST_STRATEGY", "telepathy")
    assert demo("--pod", str(EXAMPLES / "01-two-gpus.yaml"))["ok"]


def test_longest_names(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(BOTH.replace("name: two}", f"name: {'a' * 253}}}").replace("name: main", f"name: {'b' * 63}"))
    assert demo("--pod", str(path))["ok"]
