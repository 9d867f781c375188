"""Facts out of /proc, /dev and /sys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulet.errors import NodeError
from gpulet.node import devices, procfs
from support import driver_tree as tree


def test_gpus_in_the_order_of_pci_addresses_with_their_own_minors(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:65:00.0", 0), ("0000:19:00.0", 3), ("0001:01:00.0", 1)])
    facts = procfs.facts(str(tmp_path))
    assert [(gpu.index, gpu.bus_id, gpu.minor) for gpu in facts.gpus] == [
        (0, "00000000:19:00.0", 3),
        (1, "00000000:65:00.0", 0),
        (2, "00000001:01:00.0", 1),
    ]
    assert facts.gpus[0].uuid == tree.uuid(1)
    assert facts.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert (facts.driver, facts.cuda, facts.source) == ("570.86.15", "12.8", "procfs")


def test_excluded_and_unreadable_gpus_are_lost_and_hide_nothing(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 0), ("0000:1a:00.0", 1), ("0000:1b:00.0", 2)])
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    excluded = gpus / "0000:19:00.0/information"
    excluded.write_text(excluded.read_text().replace("Excluded:\t No", "Excluded:\t Yes"))
    (gpus / "0000:1a:00.0/information").unlink()
    facts = procfs.facts(str(tmp_path))
    assert [(gpu.index, gpu.minor) for gpu in facts.gpus] == [(0, 2)]
    assert [lost.bus_id for lost in facts.lost] == ["00000000:19:00.0", "00000000:1a:00.0"]
    assert "Excluded" in facts.lost[0].reason and "can't be read" in facts.lost[1].reason


def test_a_uuid_that_the_driver_does_not_know_yet_is_empty_and_needs_nvml(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 0)])
    file = tmp_path / "proc/driver/nvidia/gpus/0000:19:00.0/information"
    file.write_text(file.read_text().replace(tree.uuid(0), "GPU-????????-????-????-????-????????????"))
    facts = procfs.facts(str(tmp_path))
    assert facts.gpus[0].uuid == ""
    assert procfs.needs_nvml(facts, ["GPU-0"])
    assert not procfs.needs_nvml(facts, ["0", "all"])


def test_majors_are_those_of_character_devices(tmp_path: Path) -> None:
    tree.proc(tmp_path, [])
    facts = procfs.facts(str(tmp_path))
    assert facts.major("nvidia-uvm") == tree.UVM_MAJOR
    assert facts.major("nvidia-not-a-char-device") == -1
    assert facts.major("mem") == -1


def test_mig_devices_from_capabilities(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 4)])
    tree.mig(tmp_path, 4, [(2, 0), (1, 0), (11, 1)], first=30)
    facts = procfs.facts(str(tmp_path))
    (gpu,) = facts.gpus
    assert gpu.mig_enabled
    assert [(mig.gi, mig.ci, mig.gi_minor, mig.ci_minor) for mig in gpu.mig] == [
        (1, 0, 32, 33),
        (2, 0, 30, 31),
        (11, 1, 34, 35),
    ]
    assert facts.mig_minors == (1, 2)
    assert {mig.slot for mig in gpu.mig} == {-1}  # NVML alone knows them
    assert procfs.needs_nvml(facts, ["0:0"]) and procfs.needs_nvml(facts, ["MIG-12345678-1111-2222-3333-444444444444"])
    assert not procfs.needs_nvml(facts, [gpu.mig[0].uuid])


def test_mig_minor_from_the_access_file_where_the_table_lacks_it(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 0)])
    tree.mig(tmp_path, 0, [(1, 0)], first=12)
    (tmp_path / "proc/driver/nvidia-caps/mig-minors").unlink()
    (mig,) = procfs.facts(str(tmp_path)).gpus[0].mig
    assert (mig.gi_minor, mig.ci_minor) == (12, 13)


def test_drm_nodes_and_numa_from_sysfs(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 0), ("0000:1a:00.0", 1)])
    pci = tmp_path / "sys/bus/pci/devices"
    tree.write(pci / "0000:19:00.0/numa_node", "1\n")
    tree.write(pci / "0000:1a:00.0/numa_node", "-1\n")
    for name in ("card1", "renderD128"):
        (pci / "0000:19:00.0/drm" / name).mkdir(parents=True)
    tree.link(tmp_path / "dev/dri/by-path/pci-0000:19:00.0-card", "../card1")
    tree.link(tmp_path / "dev/dri/by-path/pci-0000:19:00.0-render", "../renderD129")  # another GPU's: left out
    first, second = procfs.facts(str(tmp_path)).gpus
    assert (first.numa, second.numa) == (1, -1)
    assert first.drm == ("card1", "renderD128")
    assert first.drm_links == (("../card1", "/dev/dri/by-path/pci-0000:19:00.0-card"),)
    assert second.drm == ()


@pytest.mark.root
def test_nodes_are_as_they_are_on_disk(tmp_path: Path) -> None:
    tree.create(tmp_path, 2, with_nodes=True)
    (tmp_path / "dev/nvidia0").chmod(0o660)
    os.chown(tmp_path / "dev/nvidia0", 0, 44)
    tree.link(tmp_path / "dev/nvidia7", "nvidia0")  # a link is no node
    tree.nodes(tmp_path / "other", [], imex=[0, 2047])
    found = {node.path: node for node in procfs.facts(str(tmp_path)).nodes}
    assert (found["/dev/nvidia0"].mode, found["/dev/nvidia0"].gid) == (0o660, 44)
    assert (found["/dev/nvidia-uvm"].major, found["/dev/nvidia-uvm-tools"].minor) == (tree.UVM_MAJOR, 1)
    assert found["/dev/nvidia1"].host_path == f"{tmp_path}/dev/nvidia1"
    assert "/dev/nvidia7" not in found
    assert procfs.facts(str(tmp_path), str(tmp_path / "other")).imex == (0, 2047)


BUSES = [("0000:19:00.0", 3), ("0000:1a:00.0", 0), ("0000:65:00.0", 1), ("0001:01:00.0", 2)]


def minors(root: Path, dev_root: str = "", *, every: bool = False) -> list[tuple[int, int]]:
    """(index, minor) of the GPUs that count."""
    return [(gpu.index, gpu.minor) for gpu in procfs.facts(str(root), dev_root, every=every).gpus]


@pytest.mark.root
def test_only_gpus_with_a_node_count_where_some_have_one_and_indices_close_up(tmp_path: Path) -> None:
    tree.proc(tmp_path, BUSES)
    tree.nodes(tmp_path, [0, 2])
    assert minors(tmp_path) == [(0, 0), (1, 2)]
    assert procfs.facts(str(tmp_path)).withheld == ("00000000:19:00.0", "00000000:65:00.0")
    assert minors(tmp_path, every=True) == [(0, 3), (1, 0), (2, 1), (3, 2)]
    tree.nodes(tmp_path / "other", [3])
    assert minors(tmp_path, str(tmp_path / "other")) == [(0, 3)]


@pytest.mark.root
@pytest.mark.parametrize("there", [(), (0, 1, 2, 3), (7,)], ids=["none", "all", "others"])
def test_where_no_gpu_has_a_node_and_where_each_has_one_all_count(tmp_path: Path, there: tuple[int, ...]) -> None:
    tree.proc(tmp_path, BUSES)
    tree.nodes(tmp_path, there)
    assert minors(tmp_path) == [(0, 3), (1, 0), (2, 1), (3, 2)]
    assert procfs.facts(str(tmp_path)).withheld == ()


@pytest.mark.root
def test_in_the_kernels_own_dev_a_missing_node_is_yet_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.proc(tmp_path, BUSES)
    tree.nodes(tmp_path, [0])
    monkeypatch.setattr(devices, "on_devtmpfs", lambda folder: folder == f"{tmp_path}/dev")
    assert minors(tmp_path) == [(0, 3), (1, 0), (2, 1), (3, 2)]


@pytest.mark.root
def test_the_kernels_own_dev_is_known_wherever_it_is_mounted(tmp_path: Path) -> None:
    dev, plain = tmp_path / "dev", tmp_path / "plain"
    for folder in (dev, plain):
        folder.mkdir()
    code = (
        "import sys; from gpulet.node.devices import on_devtmpfs; print(*(on_devtmpfs(path) for path in sys.argv[1:]))"
    )
    # a container has a file system of its own there, with single nodes of the kernel's in it
    script = (
        'mount -t devtmpfs devtmpfs "$1" && mount -t tmpfs tmpfs "$2" && touch "$2/null"'
        ' && mount -B "$1/null" "$2/null" && exec "$3" -c "$4" "$1" "$2" "$1/gone"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-ec", script, "sh", str(dev), str(plain), sys.executable, code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unknown filesystem type 'devtmpfs'" in done.stderr or "permission denied" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.stdout, done.stderr) == ("True False False\n", "")


@pytest.mark.root
def test_mig_devices_whose_capability_nodes_are_missing_do_not_count_where_others_have_theirs(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 4)])
    tree.mig(tmp_path, 4, [(1, 0), (2, 0)], first=30)
    tree.nodes(tmp_path, [4])
    (gpu,) = procfs.facts(str(tmp_path)).gpus
    assert [mig.gi for mig in gpu.mig] == [1, 2]
    (tmp_path / devices.CAPS_FOLDER[1:]).mkdir()
    for minor in (30, 32, 33):
        os.mknod(
            tmp_path / f"{devices.CAPS_FOLDER[1:]}/nvidia-cap{minor}", 0o020444, os.makedev(tree.CAPS_MAJOR, minor)
        )
    (gpu,) = procfs.facts(str(tmp_path)).gpus
    assert [mig.gi for mig in gpu.mig] == [2]
    (gpu,) = procfs.facts(str(tmp_path), every=True).gpus
    assert [mig.gi for mig in gpu.mig] == [1, 2]


def test_dev_root_is_the_machines_where_the_driver_root_has_no_dev(tmp_path: Path) -> None:
    tree.proc(tmp_path, [])
    assert devices.choose_dev_root(str(tmp_path)) == "/"
    (tmp_path / "dev").mkdir()
    assert devices.choose_dev_root(str(tmp_path)) == str(tmp_path)
    assert devices.choose_dev_root(str(tmp_path), "/elsewhere") == "/elsewhere"


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has the driver")
def test_no_driver_at_all_is_said_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    with pytest.raises(NodeError, match="modprobe nvidia"):
        procfs.facts(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025", "550.163.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (x@y)", "570.86.15"),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  580.65  Mon", "580.65"),
        ("GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)", ""),
        ("", ""),
    ],
)
def test_driver_version_out_of_its_line(text: str, version: str) -> None:
    assert procfs.parse_version(text + "\nGCC version:  gcc version 112.2.0\n") == version


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [("570.86.15", "12.8"), ("535.274.02", "12.2"), ("580.10", "13.0"), ("300.1", ""), ("700.1", ""), ("", "")],
)
def test_cuda_version_of_a_branch(driver: str, cuda: str) -> None:
    assert procfs.cuda_of(driver) == cuda


def test_a_driver_root_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=f"no driver root: {tmp_path}/none .wanted a folder.*nvidia-container-cli.root"):
        procfs.facts(str(tmp_path / "none"))


def test_a_driver_root_without_a_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "proc_root", lambda root: f"{tmp_path}")
    with pytest.raises(NodeError, match=f"no NVIDIA kernel module.*driver root, which is {tmp_path}"):
        procfs.facts(str(tmp_path))
