"""What --load-kmods makes on a node that lacks device nodes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from gpulet import settings
from gpulet.injection import cdi
from gpulet.launch import call as calls
from gpulet.launch import kmods, runtime
from gpulet.node import devices, driver, procfs
from support import cli_node, driver_tree
from support.containers import config
from support.machine import Machine

pytestmark = pytest.mark.root


@pytest.fixture
def node(tmp_path: Path) -> Path:
    root = cli_node.lay(tmp_path / "root")
    (root / "proc/devices").write_text(
        "Character devices:\n195 nvidia\n509 nvidia-uvm\n510 nvidia-caps-imex-channels\n"
    )
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    return root


@pytest.fixture
def own_dev(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine of its own: its /dev is the kernel's."""
    monkeypatch.setattr(devices, "on_devtmpfs", lambda _: True)


def number(path: Path) -> tuple[int, int]:
    info = path.stat()
    assert stat.S_ISCHR(info.st_mode)
    return os.major(info.st_rdev), os.minor(info.st_rdev)


@pytest.mark.usefixtures("own_dev")
def test_what_is_missing_or_wrong_is_made(node: Path) -> None:
    (node / "dev/nvidia3").unlink()
    (node / "dev/nvidia-uvm").unlink()
    (node / "dev/nvidia-uvm").write_text("no device")
    (node / "dev/nvidiactl").unlink()
    os.mknod(node / "dev/nvidiactl", stat.S_IFCHR | 0o600, os.makedev(195, 7))
    told: list[str] = []
    facts = kmods.prepare(str(node), procfs.facts(str(node)), ["5"], told.append)
    assert facts is not None
    assert number(node / "dev/nvidia3") == (195, 3)
    assert number(node / "dev/nvidia-uvm") == (509, 0)
    assert number(node / "dev/nvidiactl") == (195, 255)
    assert number(node / "dev/nvidia-caps-imex-channels/channel5") == (510, 5)
    assert stat.S_IMODE((node / "dev/nvidia3").stat().st_mode) == 0o666
    assert facts.imex == (5,)
    assert len(told) == 4


def test_a_node_that_is_a_container_gives_itself_no_gpu_that_it_was_not_given(node: Path) -> None:
    for index in (0, 1, 2, 3, 4, 6, 7):
        (node / f"dev/nvidia{index}").unlink()
    (node / "dev/nvidiactl").unlink()
    facts = kmods.prepare(str(node), procfs.facts(str(node)), (), lambda _: None)
    assert facts is not None
    assert [gpu.minor for gpu in facts.gpus] == [5]
    assert sorted(path.name for path in (node / "dev").glob("nvidia[0-9c]*")) == ["nvidia5", "nvidiactl"]
    facts = kmods.prepare(str(node), procfs.facts(str(node), every=True), (), lambda _: None, every=True)
    assert facts is not None
    assert len(facts.gpus) == 8, "whoever makes nodes by command decides"


@pytest.mark.usefixtures("own_dev")
@pytest.mark.parametrize("step", ["mknod", "rename"])
def test_a_node_that_cannot_be_replaced_stays(node: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """What others see meanwhile is the old one or the new one, as containers start at the same moment."""
    (node / "dev/nvidiactl").unlink()
    os.mknod(node / "dev/nvidiactl", stat.S_IFCHR | 0o600, os.makedev(195, 7))
    before = sorted(os.listdir(node / "dev"))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kmods.os, step, refuse)
    told: list[str] = []
    kmods.prepare(str(node), procfs.facts(str(node)), (), told.append)
    assert told == [f"make device {node}/dev/nvidiactl: Operation not permitted"]
    assert number(node / "dev/nvidiactl") == (195, 7)
    assert sorted(os.listdir(node / "dev")) == before


def test_a_whole_node_is_left_alone(node: Path) -> None:
    before = {path.name: path.lstat() for path in (node / "dev").iterdir()}
    facts = procfs.facts(str(node))
    assert kmods.prepare(str(node), facts, (), pytest.fail) is facts
    assert {path.name: path.lstat() for path in (node / "dev").iterdir()} == before


@pytest.mark.usefixtures("own_dev")
def test_the_drivers_own_parameters_count(node: Path) -> None:
    (node / "dev/nvidia3").unlink()
    params = node / "proc/driver/nvidia/params"
    params.write_text("DeviceFileUID: 7\nDeviceFileGID: 44\nDeviceFileMode: 432\nModifyDeviceFiles: 1\n")
    kmods.prepare(str(node), procfs.facts(str(node)), (), lambda _: None)
    info = (node / "dev/nvidia3").stat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (7, 44, 0o660)
    (node / "dev/nvidia3").unlink()
    params.write_text("ModifyDeviceFiles: 0\n")
    kmods.prepare(str(node), procfs.facts(str(node)), (), pytest.fail)
    assert not (node / "dev/nvidia3").exists()


def test_a_link_to_the_right_node_is_right(node: Path) -> None:
    (node / "real").mkdir()
    os.rename(node / "dev/nvidia3", node / "real/nvidia3")
    (node / "dev/nvidia3").symlink_to("/real/nvidia3")
    kmods.prepare(str(node), procfs.facts(str(node)), (), pytest.fail)
    assert (node / "dev/nvidia3").is_symlink()


def test_without_a_gpu_no_module_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices/0000:00:02.0").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:00:02.0/vendor").write_text("0x8086\n")
    (tmp_path / "sys/bus/pci/devices/0000:00:02.0/class").write_text("0x030000\n")
    assert kmods.prepare(str(tmp_path), None, (), pytest.fail) is None
    (tmp_path / "sys/bus/pci/devices/0000:00:02.0/vendor").write_text("0x10de\n")
    told: list[str] = []
    assert kmods.prepare(str(tmp_path), None, (), told.append) is None
    assert [line.split(": ")[1] for line in told] == ["exit code 127"] * 3  # there is no modprobe in this root


def test_nothing_is_tried_in_a_user_namespace(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/uid_map").write_text("         0     100000      65536\n")
    assert kmods.in_user_namespace(str(tmp_path))
    (tmp_path / "self/uid_map").write_text("         0          0 4294967295\n")
    assert not kmods.in_user_namespace(str(tmp_path))


def test_numbers_of_another_kernel_make_no_nodes_on_this_machine(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmods, "make", lambda *given: pytest.fail(f"made {given}"))
    shutil.rmtree(node / "dev")
    facts = procfs.facts(str(node))
    assert kmods.prepare(str(node), facts, ["5"], pytest.fail) is facts


# -- before a container starts without the hook


LOADS = "load-kmods = true"  # which is the default


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.configure(cli=LOADS)
    return made


def log(machine: Machine) -> str:
    return (machine.folder / "log").read_text()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_container_that_needs_cuda_has_its_nodes_made_first(machine: Machine, wrong: bool) -> None:
    uvm = machine.root / "dev/nvidia-uvm"
    uvm.unlink()
    if wrong:  # of an earlier start, when the module had another number
        os.mknod(uvm, stat.S_IFCHR | 0o666, os.makedev(501, 0))
    after = machine.create(config("NVIDIA_VISIBLE_DEVICES=0"))
    assert number(uvm) == (driver_tree.UVM_MAJOR, 0)
    assert ("/dev/nvidia-uvm", driver_tree.UVM_MAJOR) in [
        (node["path"], node["major"]) for node in after["linux"]["devices"]
    ]
    assert "load-kmods: make device" in log(machine)
    assert "CUDA won't work" not in log(machine)


@pytest.mark.parametrize(
    ("cli", "capabilities", "told"),
    [("load-kmods = false", "compute", True), ("load-kmods = false", "utility", False), (LOADS, "compute", True)],
)
def test_what_cannot_be_made_is_told_at_every_start(machine: Machine, cli: str, capabilities: str, told: bool) -> None:
    (machine.root / "dev/nvidia-uvm").unlink()
    driver_tree.write(machine.root / "proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n")
    machine.configure(cli=cli)
    for start in (1, 2):
        machine.create(config("NVIDIA_VISIBLE_DEVICES=0", f"NVIDIA_DRIVER_CAPABILITIES={capabilities}"))
        assert log(machine).count("CUDA won't work: no /dev/nvidia-uvm") == (start if told else 0)
    assert not (machine.root / "dev/nvidia-uvm").exists()


def test_a_node_of_an_earlier_start_that_stays_is_told(machine: Machine) -> None:
    machine.configure(cli="load-kmods = false")
    (machine.root / "dev/nvidia-uvm").unlink()
    os.mknod(machine.root / "dev/nvidia-uvm", stat.S_IFCHR | 0o666, os.makedev(501, 0))
    machine.create(config("NVIDIA_VISIBLE_DEVICES=0"))
    assert "no /dev/nvidia-uvm of the loaded driver" in log(machine)


def test_a_specification_whose_nodes_are_missing_has_them_made_first(machine: Machine) -> None:
    specs = machine.folder / "cdi"
    facts = procfs.facts(str(machine.root))
    cdi.write_spec(cdi.make_spec(facts, driver.find(str(machine.root))), str(specs / "nvidia.json"))
    machine.configure(
        runtime="mode = 'cdi'", cli=LOADS, rest=f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{specs}']\n"
    )
    (machine.root / "dev/nvidia-uvm").unlink()
    after = machine.create(config("NVIDIA_VISIBLE_DEVICES=0"))
    assert "/dev/nvidia-uvm" in [node["path"] for node in after["linux"]["devices"]]


def test_another_container_may_have_been_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.root / "dev/nvidia-uvm").unlink()

    def made_already(_root: str, path: str, major: int, minor: int, *_: object) -> bool:
        os.mknod(machine.root / path.lstrip("/"), stat.S_IFCHR | 0o666, os.makedev(major, minor))
        return False

    monkeypatch.setattr(kmods, "make", made_already)
    path = machine.make(config("NVIDIA_VISIBLE_DEVICES=0"))
    call = calls.read(["create", "--bundle", str(machine.bundle), "x"])
    runtime.create(call, settings.load(str(machine.config_file)))
    assert "/dev/nvidia-uvm" in [node["path"] for node in json.loads(path.read_text())["linux"]["devices"]]
