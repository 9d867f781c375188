"""Podman, as a person uses it: our runtime, or our CDI specification and podman's own runtime, on a simulated node.

Everything that podman reads and keeps is in a folder and a mount namespace of its own, which one process holds open.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulet.commands.cdi_generate import Options, generate_spec
from gpulet.engines.launchers import write_launchers
from gpulet.injection import cdi
from gpulet.sim import node as sim
from gpulet.sim import rootfs
from gpulet.sim.cgroups import hierarchies, remove_tree
from gpulet.sim.node import SimNode

PROBE = rootfs.PROBE
WAYS = ["runtime", "cdi"]
GPUS = (1, 6)

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.skipif(not (shutil.which("podman") and shutil.which("runc")), reason="needs podman and runc"),
]

# podman looks for specifications in /etc/cdi, which a machine without CDI doesn't have: a writable layer over /etc
# gives us one that nobody else sees. What podman and the low-level runtimes keep in /run and /dev/shm goes with us too.
NAMESPACE = """
set -e
mount --make-rprivate /
mkdir "$1/layer"
mount -t tmpfs none "$1/layer"
mkdir "$1/layer/upper" "$1/layer/work"
mount -t overlay none -o "lowerdir=/etc,upperdir=$1/layer/upper,workdir=$1/layer/work" /etc
mkdir -p /etc/cdi
mount --bind "$1/cdi" /etc/cdi
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
echo ready
exec cat
"""


def sharing_mounts(pid: int) -> list[int]:
    """The processes in the same mount namespace as `pid`, itself included."""
    namespace = os.readlink(f"/proc/{pid}/ns/mnt")
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/ns/mnt") == namespace:
                found.append(int(name))
        except OSError:  # it has ended meanwhile
            continue
    return found


class Podman:
    """Podman on one node. Images are root file systems in folders; nothing is pulled or kept."""

    def __init__(self, folder: Path, node: SimNode) -> None:
        self.folder, self.node = folder, node
        self._cgroup = f"gpulet-podman-{secrets.token_hex(4)}"
        (folder / "cdi").mkdir()
        programs = write_launchers(folder / "bin")
        (folder / "config.toml").write_text(
            f"[nvidia-container-cli]\nroot = '{node.root}'\n"
            f"[nvidia-container-runtime]\nruntimes = ['runc']\n[gpulet]\nstate-dir = '{folder}/state'\n"
        )
        # podman hands no environment on to a runtime
        self.runtime = folder / "gpulet-runtime"
        self.runtime.write_text(
            f'#!/bin/sh\nGPULET_CONFIG={folder}/config.toml exec {programs["gpulet-runtime"]} "$@"\n'
        )
        self.runtime.chmod(0o755)
        self._specification(str(programs["gpulet-cdi-hook"]))
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "ready\n"

    def _specification(self, hook: str) -> None:
        command = [str(Path(sys.executable).with_name("gpulet")), "cdi", "generate", "--target", "podman=4.3"]
        command += ["--driver-root", str(self.node.root), "--nvidia-cdi-hook-path", hook]
        subprocess.run([*command, "--output", str(self.folder / "cdi/nvidia.yaml")], check=True, capture_output=True)

    def close(self) -> None:
        self("rm", "--all", "--force", "--time", "0")
        deadline = time.monotonic() + 20
        try:
            while len(inside := sharing_mounts(self._holder.pid)) > 1:  # a container's monitor tidies up after it
                assert time.monotonic() < deadline, f"still running: {inside}"
                time.sleep(0.02)
        finally:
            self._holder.communicate()  # the end of its input ends it
            remove_tree(self._cgroup)

    def __call__(self, *arguments: str, runtime: str | Path = "runc") -> subprocess.CompletedProcess[str]:
        """One podman command in the namespace."""
        state = [f"--root={self.folder}/store", f"--runroot={self.folder}/run", f"--tmpdir={self.folder}/tmp"]
        podman = ["podman", *state, "--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=none"]
        command = ["nsenter", "-t", str(self._holder.pid), "--mount", *podman, f"--runtime={runtime}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)

    def run(self, way: str, libc: str, devices: str, *command: str, options: tuple[str, ...] = ()) -> Any:
        """`podman run` of a new image, GPUs asked for in one of the two ways."""
        image = self.folder / "image"
        rootfs.create(image, libc)
        # this machine may not raise limits, and the container's own device group is what we are here for
        words = ["--network=none", "--security-opt=seccomp=unconfined", "--ulimit=nofile=1024:1024"]
        words += ["--ulimit=nproc=100:100", f"--cgroup-parent=/{self._cgroup}", *options]
        if way == "cdi":
            words += [f"--device=nvidia.com/gpu={name}" for name in devices.split(",")]
        else:
            words += ["--env", f"NVIDIA_VISIBLE_DEVICES={devices}"]
        runtime = self.runtime if way == "runtime" else "runc"
        return self("run", *words, "--rootfs", str(image), *(command or (PROBE,)), runtime=runtime)

    def probe(self, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen

    def check(self, seen: dict[str, Any], *, loads: bool = True) -> None:
        """Holds what the probe saw against the two GPUs that were asked for."""
        gpus = [self.node.gpus[index] for index in GPUS]
        minors = [gpu.minor for gpu in gpus]
        numbered = [name for name in seen["devices"] if name.removeprefix("/dev/nvidia").isdigit()]
        assert numbered == [f"/dev/nvidia{minor}" for minor in minors]
        assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(seen["devices"])
        assert seen["opened"] == minors
        assert {gpu.minor for gpu in self.node.gpus} - set(minors) <= set(seen["denied"])
        if loads:
            assert [one["uuid"] for one in seen["nvml"]] == [gpu.uuid for gpu in gpus]
            assert all(seen["libraries"].values())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


@pytest.fixture
def podman(node: SimNode) -> Iterator[Podman]:
    folder = Path(tempfile.mkdtemp(prefix="gp"))  # podman takes no run root of more than 50 characters
    try:
        made = Podman(folder, node)
        try:
            yield made
        finally:
            made.close()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("libc", ["glibc", "musl", "none"])
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_image_gets_its_gpus(podman: Podman, way: str, libc: str) -> None:
    seen = podman.probe(podman.run(way, libc, ",".join(map(str, GPUS)), options=("--rm",)))
    podman.check(seen, loads=libc != "none")
    driver = [one for one in seen["files"] if f".so.{podman.node.description.driver}" in one["path"]]
    assert {"libcuda", "libnvidia-ml"} <= {Path(one["path"]).name.split(".so")[0] for one in driver}
    assert all({"ro", "nosuid", "nodev"} <= set(one["flags"]) for one in driver)


NVIDIAS = ["nvidia-cdi-hook", "nvidia-ctk", *filter(None, [os.environ.get("PEER_CTK")])]


def hooks_one_by_one(podman: Podman, program: str) -> None:
    """The specification as the plugin writes it where the host's hook program isn't ours: ours under a name of
    NVIDIA's, or NVIDIA's own, which PEER_CTK names.
    """
    hook = podman.folder / "bin" / program  # an absolute one stays
    if not hook.exists():
        hook.symlink_to("gpulet-cdi-hook")
    spec, _facts = generate_spec(Options(root=str(podman.node.root), hook_path=str(hook), target="podman=4.3"))
    assert len(spec["containerEdits"]["hooks"]) == 5 and "prepare" not in str(spec)
    cdi.write_spec(spec, str(podman.folder / "cdi/nvidia.yaml"))


@pytest.mark.parametrize("libc", ["glibc", "musl", "none"])
@pytest.mark.parametrize("program", NVIDIAS)
def test_nvidias_hooks_one_by_one_bring_the_same(podman: Podman, program: str, libc: str) -> None:
    hooks_one_by_one(podman, program)
    seen = podman.probe(podman.run("cdi", libc, ",".join(map(str, GPUS)), options=("--rm",)))
    podman.check(seen, loads=libc != "none")


@pytest.mark.parametrize("program", NVIDIAS)
def test_nvidias_hooks_one_by_one_make_the_links_of_the_containers_gpus(podman: Podman, program: str) -> None:
    hooks_one_by_one(podman, program)
    links = "/dev/dri/by-path/* /usr/lib/*/libcuda.so /usr/lib/*/libcuda.so.1"
    script = f"for link in {links}; do readlink $link; done; /sbin/ldconfig -p | grep -c 'libcuda.so.1 '"
    done = podman.run("cdi", "glibc", "6", "/bin/sh", "-c", script, options=("--rm",))
    assert done.returncode == 0, done.stderr
    version = podman.node.description.driver
    assert done.stdout.split() == ["../card7", "../renderD134", "libcuda.so.1", f"libcuda.so.{version}", "1"]


@pytest.mark.parametrize("way", WAYS)
def test_a_container_that_goes_on_keeps_its_gpus(podman: Podman, way: str) -> None:
    """Through exec, through an ldconfig of its own, and through stop and start, when the runtime comes by again."""
    started = podman.run(
        way, "glibc", ",".join(map(str, GPUS)), PROBE, "--hold", options=("--detach", "--name", "long")
    )
    assert started.returncode == 0, started.stderr
    assert podman("exec", "long", "/sbin/ldconfig").returncode == 0
    podman.check(podman.probe(podman("exec", "long", PROBE)))
    runtime = podman.runtime if way == "runtime" else "runc"
    for _ in range(2):
        again = podman("restart", "--time", "5", "long", runtime=runtime)
        assert again.returncode == 0, again.stderr
        podman.check(podman.probe(podman("exec", "long", PROBE)))


def devices_group(pid: int) -> Path:
    """A process's group in the hierarchy of the v1 devices controller. Skips where there is none."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "devices" in controllers.split(","):
            return next(mount for mount, _ in hierarchies() if mount.name in ("devices", controllers)) / path[1:]
    pytest.skip("no v1 devices controller: on v2 a rule can't be taken back and given again from outside")


def rule(entry: dict[str, Any]) -> str:
    """A rule of linux.resources.devices as the v1 controller's files take it."""
    numbers = (entry.get(key, -1) for key in ("major", "minor"))
    return f"{entry.get('type', 'a')} {':'.join('*' if one < 0 else str(one) for one in numbers)} {entry['access']}"


@pytest.mark.parametrize("way", WAYS)
def test_who_applies_the_rules_again_gives_the_gpus_again(podman: Podman, way: str) -> None:
    """As systemd does on daemon-reload, from what the engine gave it: config.json must hold every rule."""
    devices = ",".join(map(str, GPUS))
    started = podman.run(way, "glibc", devices, PROBE, "--hold", options=("--detach", "--name", "long"))
    assert started.returncode == 0, started.stderr
    group = devices_group(int(podman("inspect", "--format", "{{.State.Pid}}", "long").stdout))
    config = next((podman.folder / "store").glob("*/*/userdata/config.json"))
    rules = json.loads(config.read_text())["linux"]["resources"]["devices"]
    (group / "devices.deny").write_text("a")
    assert podman.probe(podman("exec", "long", PROBE))["opened"] == []
    for entry in rules:
        (group / ("devices.allow" if entry["allow"] else "devices.deny")).write_text(rule(entry))
    podman.check(podman.probe(podman("exec", "long", PROBE)))


@pytest.mark.parametrize(("way", "words"), [("runtime", "99"), ("cdi", "nvidia.com/gpu=99")])
def test_a_gpu_that_is_not_there_is_named_and_nothing_runs(podman: Podman, way: str, words: str) -> None:
    done = podman.run(way, "glibc", "99", options=("--rm",))
    assert done.returncode != 0 and not done.stdout
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_graphics_gets_the_nodes_that_x_and_vulkan_look_for(podman: Podman, way: str) -> None:
    gpu = podman.node.gpus[6]
    script = "ls /dev/dri && for link in /dev/dri/by-path/*; do echo $link; readlink -f $link; done"
    options = ("--rm", "--env", "NVIDIA_DRIVER_CAPABILITIES=graphics,utility")
    done = podman.run(way, "glibc", "6", "/bin/sh", "-c", script, options=options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        *("by-path", "card7", "renderD134"),
        *(f"/dev/dri/by-path/pci-{gpu.proc_name}-card", "/dev/dri/card7"),
        *(f"/dev/dri/by-path/pci-{gpu.proc_name}-render", "/dev/dri/renderD134"),
    ]


def test_without_a_request_podman_starts_what_it_would_have_started(podman: Podman) -> None:
    seen = podman.probe(podman.run("runtime", "glibc", "void", options=("--rm",)))
    assert seen["devices"] == [] and seen["opened"] == [] and not any(seen["libraries"].values())
