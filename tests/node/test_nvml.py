"""Facts through NVML, asked of the stand-in library that a simulated node has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pynvml
import pytest

from gpulet.errors import NvmlError
from gpulet.injection import build
from gpulet.node import nvml, nvml_errors, procfs
from gpulet.node.nvml_mig import profile_name
from gpulet.plugin.generation import with_lost
from gpulet.sim import inject, node, nvmlfile
from support import driver_tree as tree

pytestmark = pytest.mark.root  # the stand-in lists a GPU only where its node is


@pytest.mark.parametrize(
    "profile",
    ["t4x1", "l40sx4", "a100x8", "h100x8", "h200x8", "b200x8", "gb200x4", "h100x16", "dgx-1v", "mixed", "sparse"],
)
def test_facts_are_the_descriptions_and_procfs_agrees(tmp_path: Path, profile: str) -> None:
    made = node.create(tmp_path / "n", profile)
    root = str(made.root)
    asked, read = nvml.facts(root), procfs.facts(root)
    assert [(g.index, g.minor, g.uuid, g.name) for g in asked.gpus] == [
        (g.index, g.minor, g.uuid, g.name) for g in made.gpus
    ]
    for one, two in zip(asked.gpus, read.gpus, strict=True):
        assert (one.index, one.minor, one.uuid, one.bus_id, one.numa) == (
            two.index,
            two.minor,
            two.uuid,
            two.bus_id,
            two.numa,
        )
    assert (asked.driver, asked.cuda) == (read.driver, read.cuda)
    assert (asked.majors, asked.imex, asked.nodes) == (read.majors, read.imex, read.nodes)
    assert all(g.memory > 2**33 and "." in g.arch and g.brand for g in asked.gpus)
    assert not asked.lost


@pytest.mark.parametrize("kept", [(5,), (7, 2), (0, 1, 3, 4, 5, 6, 7)])
def test_procfs_counts_as_nvml_does_on_a_node_that_is_a_container(tmp_path: Path, kept: tuple[int, ...]) -> None:
    made = node.create(tmp_path / "n", "h100x8", mig=["gpu5: 3g.40gb x2", "gpu7: 1g.10gb x2"])
    for gpu in made.gpus:
        if gpu.index not in kept:
            (made.root / f"dev/nvidia{gpu.minor}").unlink()
    gone = made.gpus[5].mig[0]
    (made.root / f"dev/nvidia-caps/nvidia-cap{nvmlfile.gi_cap(made.gpus[5].minor, gone.gi)}").unlink()
    asked, read = nvml.facts(str(made.root)), procfs.facts(str(made.root))
    assert [(gpu.index, gpu.minor, gpu.uuid) for gpu in asked.gpus] == [
        (gpu.index, gpu.minor, gpu.uuid) for gpu in read.gpus
    ]
    assert [gpu.index for gpu in read.gpus] == list(range(len(kept)))
    assert [(mig.gpu, mig.gi, mig.ci) for gpu in asked.gpus for mig in gpu.mig] == [
        (mig.gpu, mig.gi, mig.ci) for gpu in read.gpus for mig in gpu.mig
    ]


def test_links_through_a_switch_and_in_a_mesh(tmp_path: Path) -> None:
    switched = nvml.facts(str(node.create(tmp_path / "h", "h100x8").root))
    assert {link.nvlinks for gpu in switched.gpus for link in gpu.links} == {18}
    mesh = nvml.facts(str(node.create(tmp_path / "v", "dgx-1v").root))
    first = {link.peer: link for link in mesh.gpus[0].links}
    assert sum(link.nvlinks for link in first.values()) == 6  # a V100 has six
    assert any(link.nvlinks == 0 for link in first.values())
    for gpu in mesh.gpus:
        for link in gpu.links:
            back = next(other for other in mesh.gpus[link.peer].links if other.peer == gpu.index)
            assert (back.level, back.nvlinks) == (link.level, link.nvlinks)


def test_two_roots_in_one_process_are_not_mixed_up(tmp_path: Path) -> None:
    one, two = (node.create(tmp_path / name, name) for name in ("h100x8", "t4x1"))
    for _ in range(2):
        assert len(nvml.facts(str(one.root)).gpus) == 8
        assert len(nvml.facts(str(two.root)).gpus) == 1


def test_mig_devices_and_the_nodes_they_bring(tmp_path: Path) -> None:
    root = str(node.create(tmp_path / "n", "h100x8", mig=["gpu0: 1g.10gb x7", "gpu3: 3g.40gb x2"]).root)
    facts = nvml.facts(root)
    assert [gpu.mig_enabled for gpu in facts.gpus] == [True, False, False, True, False, False, False, False]
    assert [mig.profile for mig in facts.gpus[0].mig] == ["1g.10gb"] * 7
    assert [mig.profile for mig in facts.gpus[3].mig] == ["3g.40gb"] * 2
    second = facts.gpus[3].mig[1]
    assert second.memory > 2**35 and second.placement[1] == 4
    same = [mig for gpu in procfs.facts(root).gpus for mig in gpu.mig]
    keys = {(m.gpu, m.gi, m.ci, m.gi_minor, m.ci_minor) for m in same}
    assert keys == {(m.gpu, m.gi, m.ci, m.gi_minor, m.ci_minor) for gpu in facts.gpus for m in gpu.mig}
    injection = build.device(facts, build.select(facts, ["3:1", second.uuid]), ("compute",))
    caps = {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (second.gi_minor, second.ci_minor)}
    assert {item.path for item in injection.devices} == {"/dev/nvidia3", *caps}
    assert all(os.path.exists(item.host_path) for item in injection.devices)


def test_a_lost_gpu_hides_no_other(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8")
    inject.inject(made.folder, "gpu 3 lost")
    facts = nvml.facts(str(made.root))
    assert [gpu.index for gpu in facts.gpus] == [0, 1, 2, 4, 5, 6, 7]
    (lost,) = facts.lost
    assert lost.index == 3 and "15" in lost.reason
    inject.inject(made.folder, "gpu 3 found")
    assert len(nvml.facts(str(made.root)).gpus) == 8


def test_health_events_and_state(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=2)
    with nvml.Session(str(made.root)) as session:
        uuids = [gpu.uuid for gpu in made.gpus]
        assert session.watch([*uuids, "GPU-none"]).keys() == {"GPU-none"}
        assert session.wait(1) is None
        inject.inject(made.folder, "gpu 1 xid 79")
        assert session.wait(2000) == nvml.Event(uuids[1], 8, 79)
        inject.inject(made.folder, "gpu 0 xid 94 gi 2 ci 0")
        assert session.wait(2000) == nvml.Event(uuids[0], 8, 94, 2, 0)
        assert session.state(uuids[0]) == ""
        inject.inject(made.folder, "gpu 0 lost")
        assert "15" in session.state(uuids[0])


def answers(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> None:
    """Have a function of NVML fail with this code from now on."""

    def fails(*_: object) -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, function, fails)


DECIDING = (
    "GetMigMode", "GetMemoryInfo", "GetName", "GetCudaComputeCapability", "GetMinorNumber", "GetMaxMigDeviceCount",
    "GetMigDeviceHandleByIndex", "GetGpuInstanceId", "GetAttributes_v2",
)  # fmt: skip


@pytest.mark.parametrize("code", [10, 28, 999])
@pytest.mark.parametrize("question", DECIDING)
def test_an_error_that_may_be_over_with_the_next_question_makes_no_other_gpu_of_it(
    tmp_path: Path, question: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partitioned GPU that was taken for a whole one for a moment was offered, and allocated, as one."""
    root = str(node.create(tmp_path / "n", "a100x8", mig=["gpu0: 1g.5gb x7"]).root)
    before, name = nvml.facts(root), f"nvmlDevice{question}"
    real, calls = getattr(pynvml, name), []

    def fails_once(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 1:
            raise pynvml.NVMLError(code)
        return real(*arguments)

    monkeypatch.setattr(pynvml, name, fails_once)
    facts = nvml.facts(root)
    assert [gpu.index for gpu in facts.gpus] == [1, 2, 3, 4, 5, 6, 7]
    assert [(lost.index, lost.uuid, nvml_errors.code_in(lost.reason)) for lost in facts.lost] == [
        (0, before.gpus[0].uuid, code)
    ]
    assert with_lost(facts, before).gpus[0] == before.gpus[0]
    assert nvml.facts(root) == before


def test_what_a_gpu_is_used_without_is_no_reason_to_lose_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(node.create(tmp_path / "n", "a100x8", mig=["gpu0: 1g.5gb x7"]).root)
    before = nvml.facts(root)
    for function in ("DeviceGetSerial", "SystemGetCudaDriverVersion", "SystemGetDriverVersion"):
        answers(monkeypatch, f"nvml{function}", 999)
    facts = nvml.facts(root)
    assert facts.gpus == tuple(gpu.replace(serial="") for gpu in before.gpus) and facts.driver == facts.cuda == ""
    answers(monkeypatch, "nvmlDeviceGetMigMode", 3)
    answers(monkeypatch, "nvmlDeviceGetMemoryInfo", 4)
    assert {(gpu.mig_capable, gpu.memory) for gpu in nvml.facts(root).gpus} == {(False, 0)}


def test_every_code_of_nvml_says_one_thing_of_the_gpu() -> None:
    codes = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    told = [nvml_errors.BROKEN, nvml_errors.ABOUT_NVML, nvml_errors.ABOUT_THE_QUESTION]
    assert codes - frozenset().union(*told) == {10, 20, 23, 27, 29, 999}
    assert sum(map(len, told)) == len(frozenset().union(*told)) and nvml_errors.LOST < nvml_errors.BROKEN
    assert {4, 13} < nvml_errors.ABOUT_THE_QUESTION and {15, 16} < nvml_errors.LOST


@pytest.mark.parametrize("code", [4, 13, 15, 999])
def test_the_state_tells_nvmls_code(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=1)
    with nvml.Session(str(made.root)) as session:
        answers(monkeypatch, "nvmlDeviceGetMemoryInfo", code)
        assert nvml_errors.code_in(session.state(made.gpus[0].uuid)) == code
        answers(monkeypatch, "nvmlDeviceGetMemoryInfo", 3)
        assert session.state(made.gpus[0].uuid) == ""


def test_what_is_about_nvml_is_about_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=2)
    with nvml.Session(str(made.root)) as session:
        answers(monkeypatch, "nvmlDeviceGetHandleByUUID", 1)
        with pytest.raises(NvmlError) as raised:
            session.state(made.gpus[0].uuid)
        assert raised.value.code == nvml_errors.UNINITIALIZED
        with pytest.raises(NvmlError, match="can't be asked for a GPU: Uninitialized"):
            session.watch([made.gpus[0].uuid])
        answers(monkeypatch, "nvmlDeviceGetUUID", 1)
        with pytest.raises(NvmlError, match="can't list the GPUs: Uninitialized"):
            session.facts()


def test_a_session_of_a_driver_that_was_replaced_leaves_the_new_one_alone(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=1)
    with nvml.Session(str(made.root)) as before:
        before.watch([made.gpus[0].uuid])
        inject.inject(made.folder, "driver 580.1.2")
        with nvml.Session(str(made.root)) as session:
            for act in (before.facts, lambda: before.state(made.gpus[0].uuid), lambda: before.wait(1)):
                with pytest.raises(NvmlError, match="the driver was replaced") as raised:
                    act()
                assert raised.value.code == nvml_errors.UNINITIALIZED
            before.close()
            assert len(session.facts().gpus) == 1


def test_the_end_of_a_session_hides_no_error(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=1)
    with pytest.raises(ZeroDivisionError), nvml.Session(str(made.root)):
        for library in made.library_folder.glob("libnvidia-ml*"):
            library.unlink()
        raise ZeroDivisionError


def test_a_minor_that_nvml_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = node.create(tmp_path / "n", "sparse")
    answers(monkeypatch, "nvmlDeviceGetMinorNumber", 3)
    assert [gpu.minor for gpu in nvml.facts(str(made.root)).gpus] == [gpu.minor for gpu in made.gpus]
    (first, *_) = sorted(made.root.glob("proc/driver/nvidia/gpus/*/information"))
    first.write_text(first.read_text().replace("Device Minor", "Nothing"))
    facts = nvml.facts(str(made.root))
    assert len(facts.gpus) == len(made.gpus) - 1
    (lost,) = facts.lost
    assert lost.uuid == made.gpus[0].uuid
    assert lost.reason.startswith("which /dev/nvidiaN it has isn't known: Not Supported (NVML 3) (wanted Device Minor")
    assert str(first) in lost.reason


def test_a_minor_that_wsl_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = node.create(tmp_path / "n", "wsl")
    answers(monkeypatch, "nvmlDeviceGetMinorNumber", 3)
    assert {(gpu.bus_id, gpu.minor) for gpu in nvml.facts(str(made.root)).gpus} == {("", -1)}


def test_a_profile_without_a_name_needs_the_whole_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(node.create(tmp_path / "n", "a100x8", mig=["gpu0: 1g.5gb x7"]).root)
    answers(monkeypatch, "nvmlDeviceGetMemoryInfo", 4)
    assert {mig.profile for mig in nvml.facts(root).gpus[0].mig} == {"1g.5gb"}  # a newer driver names it
    answers(monkeypatch, "nvmlDeviceGetName", 3)
    assert {mig.profile for mig in nvml.facts(root).gpus[0].mig} == {""}


# -- NVML does not start --


@pytest.mark.parametrize("module", ["", "570.86.15"])
def test_the_library_is_nowhere(tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By far the commonest failure: in a container that wasn't given the driver of its node."""
    monkeypatch.setattr(nvml_errors, "driver_version", lambda root: module)
    with pytest.raises(NvmlError, match=f"not in {tmp_path}/usr/lib64, .* more folders .*driver root") as raised:
        nvml.facts(str(tmp_path))
    assert raised.value.code == nvml_errors.LIBRARY_NOT_FOUND
    assert str(raised.value).count(str(tmp_path)) == 4  # three folders and the root
    assert ("install the NVIDIA driver" in str(raised.value)) is (not module)
    wanted = (
        f"driver {module} is loaded on this node, its library isn't here: run this container with the nvidia Runtime"
    )
    assert (wanted in str(raised.value)) is bool(module)


def test_the_library_is_in_a_folder_that_is_named(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8")
    root, apart = str(made.root), made.root / "lib/apart"
    (made.root / "usr/lib/x86_64-linux-gnu").rename(apart)
    (made.root / "etc/ld.so.cache").unlink()
    with pytest.raises(NvmlError, match="NVML library not found"):
        nvml.facts(root)
    for folder in ("/lib/apart", str(apart)):
        assert len(nvml.facts(root, search=[folder]).gpus) == 8
    with nvml.Session(root, ["/lib/apart"]) as session:
        assert session.watch([made.gpus[0].uuid]) == {} and session.state(made.gpus[0].uuid) == ""
    tree.write(made.root / "usr/lib64/libnvidia-ml.so.1", "text")  # the named folder goes first
    assert len(nvml.facts(root, search=["/lib/apart"]).gpus) == 8


def test_the_library_is_no_library(tmp_path: Path) -> None:
    tree.write(tmp_path / "usr/lib64/libnvidia-ml.so.1", "text")
    with pytest.raises(NvmlError, match=r"can't be loaded: .*(file too short|invalid ELF header)") as raised:
        nvml.facts(str(tmp_path))
    assert "not in" not in str(raised.value) and str(raised.value).count("libnvidia-ml.so.1") == 1


@pytest.mark.parametrize(
    ("code", "told", "remedy"),
    [
        (9, r"doesn't reach.*bound to nvidia, module 570\.86\.15", "nvidia-modprobe -c 0"),
        (18, r"library 570\.86\.15, kernel module 570\.86\.15 by their files", "reload the kernel module"),
        (4, "no permission", "device cgroup"),
        (15, "a GPU is lost", "reset the GPU"),
        (999, "999", "nvidia-smi"),
    ],
)
def test_failures_of_init_are_told_apart(tmp_path: Path, code: int, told: str, remedy: str) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=1)
    inject.inject(made.folder, f"nvml init fails with {code}")
    with pytest.raises(NvmlError, match=told) as raised:
        nvml.facts(str(made.root))
    assert raised.value.code == code and remedy in str(raised.value)
    inject.inject(made.folder, "nvml init works")
    assert len(nvml.facts(str(made.root)).gpus) == 1


def test_no_gpu_on_the_bus_is_not_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    error = nvml_errors.init_failed(9, "Driver Not Loaded", str(tmp_path), "libnvidia-ml.so.1")
    assert "no NVIDIA device on the PCI bus" in str(error) and "passed through" in str(error)


@pytest.mark.parametrize(("driver", "bound"), [("", "no driver"), ("nouveau", "nouveau")])
def test_a_module_that_is_not_loaded(tmp_path: Path, driver: str, bound: str) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    tree.write(device / "vendor", "0x10de\n")
    tree.write(device / "class", "0x030200\n")
    if driver:
        tree.link(device / "driver", f"../../../bus/pci/drivers/{driver}")
    error = nvml_errors.init_failed(9, "Driver Not Loaded", str(tmp_path), "libnvidia-ml.so.1")
    assert f"0000:19:00.0 bound to {bound} (wanted bound to nvidia)" in str(error)
    assert "modprobe nvidia" in str(error) and error.code == 9


def test_two_versions_are_both_told(tmp_path: Path) -> None:
    tree.create(tmp_path)
    library = tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    library.unlink()
    tree.link(library, "libnvidia-ml.so.580.1.2")
    error = nvml_errors.init_failed(18, "Driver/library version mismatch", str(tmp_path), str(library))
    assert "library 580.1.2, kernel module 570.86.15 (wanted the same version)" in str(error)


def test_a_slow_nvml_delays_procfs_not_at_all(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8")
    inject.inject(made.folder, "nvml init takes 1s")
    start = time.monotonic()
    procfs.facts(str(made.root))
    assert time.monotonic() - start < 0.5
    nvml.facts(str(made.root))
    assert time.monotonic() - start >= 1


@pytest.mark.parametrize(
    ("compute", "slices", "mig_mib", "total_mib", "name"),
    [
        (1, 1, 4864, 40536, "1g.5gb"),
        (2, 2, 9856, 40536, "2g.10gb"),
        (3, 3, 20096, 40536, "3g.20gb"),
        (7, 7, 40192, 40536, "7g.40gb"),
        (1, 1, 9856, 81559, "1g.10gb"),
        (1, 1, 5952, 24258, "1g.6gb"),
        (1, 1, 2560, 20480, "1g.3gb"),  # two and a half is rounded up
        (1, 2, 9856, 40536, "1c.2g.10gb"),
    ],
)
def test_profile_names(compute: int, slices: int, mig_mib: int, total_mib: int, name: str) -> None:
    assert profile_name(compute, slices, mig_mib << 20, total_mib << 20) == name
