"""What the runtime remembers of a node, and what makes it look again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulet import linux, mount_api
from gpulet import settings as settings_file
from gpulet.launch import memory, sources
from gpulet.launch.memory import Memory
from gpulet.request.model import Request
from support.containers import config, container
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"
LIB = "usr/lib/x86_64-linux-gnu"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    configure(made)
    return made


def configure(machine: Machine, rest: str = "", runtime: str = "") -> None:
    machine.configure(runtime=runtime, rest=f"[gpulet]\nstate-dir = '{machine.folder}/state'\n{rest}")


def let_age(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has just changed isn't remembered; here it has been a while."""
    monkeypatch.setattr(memory, "FRESH", -1_000_000_000_000)


def remembered(machine: Machine) -> list[Path]:
    return sorted((machine.folder / "state" / "requests").glob("*.json"))


def answer(
    machine: Machine,
    *devices: str,
    capabilities: tuple[str, ...] = ("compute", "utility"),
    gated: tuple[str, ...] = (),
    meanwhile: Callable[[], Any] = lambda: None,
) -> Memory:
    """Asks the memory; where it knows nothing, works the answer out and has it remembered. meanwhile: what happens
    once the node was looked at."""
    settings = settings_file.load(str(machine.config_file), {})
    request = Request("environment", devices, capabilities=capabilities, gated=gated)
    known = Memory(request, "jit-cdi", settings).recall()
    if known.found is None:
        found = sources.find(request, "jit-cdi", container(), settings)
        meanwhile()
        known.watch(found.injection, found.looked)
        known.keep(found.injection, {"/usr/lib/libcuda.so.1": ("libcuda.so.1", 0x303)})
    return known


def test_what_comes_back_is_what_was_worked_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    let_age(machine, monkeypatch)
    assert answer(machine, "0", capabilities=("compute", "graphics")).found is None
    known = answer(machine, "0", capabilities=("compute", "graphics"))
    settings = settings_file.load(str(machine.config_file), {})
    request = Request("environment", ("0",), capabilities=("compute", "graphics"))
    assert known.found == sources.find(request, "jit-cdi", container(), settings).injection
    assert known.sonames == {"/usr/lib/libcuda.so.1": ("libcuda.so.1", 0x303)}
    assert answer(machine, "1").found is None, "another request"


@pytest.mark.root
def test_a_node_that_is_yet_to_be_made_on_the_host_is_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_age(machine, monkeypatch)
    (machine.root / "dev/nvidia0").unlink()
    answer(machine, "0")
    assert answer(machine, "0").found is not None
    os.mknod(machine.root / "dev/nvidia0", 0o020600, os.makedev(195, 0))
    assert answer(machine, "0").found is None


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / LIB / "libnvidia-opencl.so.570.86.15").write_bytes(b""),
        lambda root: os.mknod(root / "dev/nvidia2", 0o020666, os.makedev(195, 2)),
        lambda root: (root / "dev/nvidia0").chmod(0o600),
        lambda root: (root / "etc/OpenCL/vendors").mkdir(parents=True),
        lambda root: (root / "usr/lib64/xorg/modules/drivers").mkdir(parents=True),
        lambda root: (root / "proc/driver/nvidia/version").write_text("NVRM version: 570.86.16\n"),
        lambda root: (root / "proc/driver/nvidia/gpus/0000:ff:00.0").mkdir(),
        lambda root: (root / "proc/driver/nvidia/capabilities/gpu0/mig/gi1").mkdir(parents=True),
        lambda root: (root / "dev/nvidia1").rename(root / LIB / "libcuda.so.570.86.15"),
        lambda root: (root / LIB / "libcuda.so.570.86.15").unlink(),
        lambda root: (root / f"lib/firmware/updates/{os.uname().release}/nvidia/570.86.15").mkdir(parents=True),
    ],
    ids=[
        "library",
        "node",
        "node-mode",
        "folder",
        "folders",
        "driver",
        "gpu",
        "mig",
        "replaced",
        "removed",
        "firmware",
    ],
)
def test_a_change_of_the_node_is_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]
) -> None:
    let_age(machine, monkeypatch)
    answer(machine, "0")
    assert answer(machine, "0").found is not None
    change(machine.root)
    settings = settings_file.load(str(machine.config_file), {})
    request = Request("environment", ("0",), capabilities=("compute", "utility"))
    assert Memory(request, "jit-cdi", settings).recall().found is None


@pytest.mark.root
@pytest.mark.parametrize("first", ["file", "node"])
def test_a_node_that_is_mounted_over_a_file_or_no_longer_is_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """As the nodes of a container come and go, and /dev's own time doesn't tell: GPU 1 is 0 without the other."""
    let_age(machine, monkeypatch)
    node = machine.root / "dev/nvidia0"
    node.rename(machine.folder / "real")
    node.touch()
    child = os.fork()
    if not child:
        code = 1
        try:
            linux.unshare(linux.CLONE_NEWNS)
            mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
            if first == "node":
                mount_api.mount(str(machine.folder / "real"), str(node), "", mount_api.MS_BIND)
            before = _gpus(answer(machine, "0"), answer(machine, "0"))
            if first == "node":
                subprocess.run(["umount", str(node)], check=True)
            else:
                mount_api.mount(str(machine.folder / "real"), str(node), "", mount_api.MS_BIND)
            after = _gpus(answer(machine, "0"), answer(machine, "0"))
            code = int([before, after] != ([[0], [1]] if first == "node" else [[1], [0]]))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def _gpus(first: Memory, second: Memory) -> list[int]:
    """The minors of the GPUs in an answer that was worked out, and then remembered."""
    assert first.found is None
    assert second.found is not None
    return [node.minor for node in second.found.devices if node.path.removeprefix("/dev/nvidia").isdigit()]


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        lambda root: shutil.rmtree(next((root / "proc/driver/nvidia/gpus").iterdir())),
        lambda root: (root / LIB / "libnvidia-opencl.so.570.86.15").write_bytes(b""),
        lambda root: (root / LIB / "libcuda.so.570.86.15").rename(root / LIB / "libcuda.so.570.86.16"),
        lambda root: (root / LIB).rename(root / "elsewhere"),
        lambda root: (root / "dev/nvidia0").unlink(),
    ],
    ids=["gpu", "library", "renamed", "folder", "node"],
)
def test_what_changes_while_an_answer_is_worked_out_leaves_none(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]
) -> None:
    """It can't be known whether the answer was made from the node as it was before or is now."""
    monkeypatch.setattr(memory, "FRESH", 50_000_000)
    time.sleep(0.2)
    answer(machine, "0", meanwhile=lambda: (change(machine.root), time.sleep(0.2)))
    assert remembered(machine) == []


@pytest.mark.root
def test_a_change_while_another_is_waited_for_counts_as_one_of_an_unwatched_node(machine: Machine) -> None:
    """The runtime waits for a lock on the root file system after it has looked the node over."""
    machine.make(config(f"{V}=0"))
    time.sleep(2.1)
    gone = min((machine.root / "proc/driver/nvidia/gpus").iterdir())
    held = os.open(machine.bundle / "rootfs", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    change = threading.Timer(1.0, lambda: shutil.rmtree(gone))
    change.start()
    first = machine.create(config(f"{V}=0"))
    os.close(held)
    change.join()
    second = machine.create(config(f"{V}=0"))
    nodes = [[entry["path"] for entry in spec["linux"]["devices"]] for spec in (first, second)]
    assert [("/dev/nvidia0" in paths, "/dev/nvidia1" in paths) for paths in nodes] == [(True, False), (False, True)]


@pytest.mark.root
@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "etc/cufile.json").write_text("{}"),
        lambda root: (root / "run/udev").mkdir(parents=True),
        lambda root: os.mknod(root / "dev/nvidia-fs1", 0o020666, os.makedev(511, 1)),
    ],
    ids=["file", "folder", "node"],
)
def test_what_comes_with_devices_that_are_asked_for_by_name_is_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], Any]
) -> None:
    let_age(machine, monkeypatch)
    os.mknod(machine.root / "dev/nvidia-fs0", 0o020666, os.makedev(511, 0))
    answer(machine, "0", gated=("gds",))
    assert answer(machine, "0", gated=("gds",)).found is not None
    change(machine.root)
    assert answer(machine, "0", gated=("gds",)).found is None


def test_a_change_of_the_configuration_is_noticed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    let_age(machine, monkeypatch)
    answer(machine, "0")
    configure(machine, "capabilities = 'all'\n")
    assert answer(machine, "0").found is None


def test_what_has_just_changed_is_not_remembered(machine: Machine) -> None:
    machine.create(config(f"{V}=0"))
    assert remembered(machine) == []


def test_something_foreign_among_the_answers_hinders_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    let_age(machine, monkeypatch)
    monkeypatch.setattr(memory, "MOST", 1)
    (machine.folder / "state/requests/foreign").mkdir(parents=True)
    answer(machine, "0")
    assert answer(machine, "0").found is not None


def test_nobody_elses_file_and_no_damaged_one_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    let_age(machine, monkeypatch)
    answer(machine, "0")
    (path,) = remembered(machine)
    whole = path.read_text()
    for damaged in (
        "",
        "{}",
        "[]",
        whole[:-20],
        whole.replace('"injection":{', '"injection":{"x":1,').replace("e", ""),
    ):
        path.write_text(damaged)
        assert answer(machine, "0").found is None
    path.write_text(whole)
    assert answer(machine, "0").found is not None
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        assert answer(machine, "0").found is None


def test_it_does_not_grow_for_ever(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    let_age(machine, monkeypatch)
    monkeypatch.setattr(memory, "MOST", 3)
    for number in range(9):
        answer(machine, "0", capabilities=("compute",) * (number + 1))
        assert len(remembered(machine)) <= 3


def test_a_folder_that_cannot_be_made_stops_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    let_age(machine, monkeypatch)
    (machine.folder / "state").write_text("")
    assert answer(machine, "0").found is None
    assert answer(machine, "0").found is None


def test_the_runtime_gives_the_same_from_memory(machine: Machine) -> None:
    """As a process, on a node that hasn't changed for a while."""
    time.sleep(2.1)
    first = machine.create(config(f"{V}=1"))
    (path,) = remembered(machine)
    told = json.loads(path.read_text())
    cache = (machine.bundle / "rootfs/etc/ld.so.cache").read_bytes()
    assert told["sonames"]
    told["injection"]["env"].append(["REMEMBERED", "yes"])
    path.write_text(json.dumps(told))
    (machine.bundle / "rootfs/etc/ld.so.cache").unlink()
    second = machine.create(config(f"{V}=1"))
    assert second["process"]["env"].pop() == "REMEMBERED=yes"
    assert second == first
    assert (machine.bundle / "rootfs/etc/ld.so.cache").read_bytes() == cache
