"""The stand-in libnvidia-ml, asked through nvidia-ml-py as any program would."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gpulet.sim import description, inject, node
from support.sim_nvml import ask

GPU_IS_LOST, NOT_SUPPORTED, NOT_FOUND = 15, 3, 6
WITH_NVML = [name for name in description.profiles() if description.load_profile(name).platform != "tegra"]

FACTS = """
n.nvmlInit()
answer = {"driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion(), "gpus": []}
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    answer["gpus"].append({
        "index": n.nvmlDeviceGetIndex(h), "minor": n.nvmlDeviceGetMinorNumber(h), "uuid": n.nvmlDeviceGetUUID(h),
        "name": n.nvmlDeviceGetName(h), "bus": n.nvmlDeviceGetPciInfo(h).busId, "serial": n.nvmlDeviceGetSerial(h),
        "pci": [n.nvmlDeviceGetPciInfo(h).pciDeviceId, n.nvmlDeviceGetPciInfo(h).pciSubSystemId],
        "address": [n.nvmlDeviceGetPciInfo(h).domain, n.nvmlDeviceGetPciInfo(h).bus, n.nvmlDeviceGetPciInfo(h).device],
        "brand": n.nvmlDeviceGetBrand(h), "arch": list(n.nvmlDeviceGetCudaComputeCapability(h)),
        "memory": n.nvmlDeviceGetMemoryInfo(h).total, "memory2": n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).total,
        "mig": attempt(n.nvmlDeviceGetMigMode, h),
    })
"""


@pytest.mark.parametrize("profile", WITH_NVML)
def test_every_fact_of_every_profile(tmp_path: Path, profile: str) -> None:
    made = node.create(tmp_path / "n", profile)
    got = ask(made.library_folder / "libnvidia-ml.so.1", FACTS)
    assert got["driver"] == made.description.driver
    assert f"{got['cuda'] // 1000}.{got['cuda'] % 1000 // 10}" == made.description.cuda
    assert len(got["gpus"]) == len(made.gpus)
    for gpu, seen in zip(made.gpus, got["gpus"], strict=True):
        domain, bus, rest = gpu.bus_id.split(":")
        assert seen == {
            "index": gpu.index,
            "minor": gpu.minor,
            "uuid": gpu.uuid,
            "name": gpu.name,
            "bus": gpu.bus_id.upper(),
            "serial": gpu.serial,
            "pci": [int(word, 16) for word in gpu.pci],
            "address": [int(domain, 16), int(bus, 16), int(rest[:2], 16)],
            "brand": description.BRANDS[gpu.brand],
            "arch": [int(part) for part in gpu.arch.split(".")],
            "memory": gpu.memory * 2**20,
            "memory2": gpu.memory * 2**20,
            "mig": [0, 0] if made.description.mig_profiles(gpu) else {"error": NOT_SUPPORTED},
        }


def test_handles_by_uuid_bus_and_serial_lead_to_the_same_gpu(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "sparse")
    gpu = made.gpus[2]
    code = f"""
n.nvmlInit()
find = [n.nvmlDeviceGetHandleByUUID, n.nvmlDeviceGetHandleByPciBusId, n.nvmlDeviceGetHandleBySerial]
keys = [b"{gpu.uuid}", b"{gpu.proc_name}", b"{gpu.serial}"]
answer = [n.nvmlDeviceGetIndex(f(k)) for f, k in zip(find, keys)]
answer.append(attempt(n.nvmlDeviceGetHandleByUUID, b"GPU-00000000-0000-4000-8000-000000000000"))
"""
    assert ask(made.library_folder / "libnvidia-ml.so.1", code) == [2, 2, 2, {"error": NOT_FOUND}]


LINKS = """
n.nvmlInit()
count = n.nvmlDeviceGetCount()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
answer = {
    "levels": [[n.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in handles] for a in handles],
    "ends": [], "types": [], "p2p": [n.nvmlDeviceGetP2PStatus(handles[0], b, 2) for b in handles[1:]],
}
for handle in handles:
    ends, types = [], []
    for link in range(36):
        if attempt(n.nvmlDeviceGetNvLinkState, handle, link) != 1:
            break
        ends.append(n.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        types.append(n.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link))
    answer["ends"].append(ends)
    answer["types"].append(types)
"""


def test_a_mesh_names_the_gpu_at_each_end(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "dgx-1v")
    got = ask(made.library_folder / "libnvidia-ml.so.1", LINKS)
    buses = [gpu.bus_id.upper() for gpu in made.gpus]
    count = [[ends.count(bus) for bus in buses] for ends in got["ends"]]
    assert [len(ends) for ends in got["ends"]] == [6] * 8
    assert count == [list(row) for row in zip(*count, strict=True)], "a link has two ends"
    assert count[0] == [0, 1, 1, 2, 2, 0, 0, 0]
    assert got["levels"][0] == [0, 10, 30, 30, 50, 50, 50, 50]
    assert got["p2p"] == [0, 0, 0, 0, 5, 5, 5]


def test_with_nvswitches_the_far_end_is_a_switch_and_no_gpu(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8")
    got = ask(made.library_folder / "libnvidia-ml.so.1", LINKS)
    buses = {gpu.bus_id.upper() for gpu in made.gpus}
    assert got["types"] == [[2] * 18] * 8
    assert not buses & {end for ends in got["ends"] for end in ends}
    assert got["p2p"] == [0] * 7


def test_switches_below_a_switch_are_a_level_of_their_own(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "rtxpro6000x8")
    got = ask(made.library_folder / "libnvidia-ml.so.1", LINKS)
    assert got["levels"][2] == [20, 20, 0, 10, 50, 50, 50, 50]
    assert got["ends"] == [[]] * 8


MIG = """
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
answer = {"mode": list(n.nvmlDeviceGetMigMode(h)), "devices": []}
for slot in range(n.nvmlDeviceGetMaxMigDeviceCount(h)):
    try:
        m = n.nvmlDeviceGetMigDeviceHandleByIndex(h, slot)
    except n.NVMLError_NotFound:
        continue
    gi = n.nvmlDeviceGetGpuInstanceById(h, n.nvmlDeviceGetGpuInstanceId(m))
    info = n.nvmlGpuInstanceGetInfo(gi)
    c = n.nvmlGpuInstanceGetComputeInstanceById(gi, n.nvmlDeviceGetComputeInstanceId(m))
    a = n.nvmlDeviceGetAttributes(m)
    answer["devices"].append({
        "slot": slot, "uuid": n.nvmlDeviceGetUUID(m), "gi": n.nvmlDeviceGetGpuInstanceId(m),
        "ci": n.nvmlDeviceGetComputeInstanceId(m), "is_mig": n.nvmlDeviceIsMigDeviceHandle(m).value,
        "parent": n.nvmlDeviceGetIndex(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m)),
        "name": n.nvmlDeviceGetName(m), "profile": info.profileId, "start": info.placement.start,
        "size": info.placement.size, "memory": a.memorySizeMB, "total": n.nvmlDeviceGetMemoryInfo(m).total >> 20,
        "slices": [a.computeInstanceSliceCount, a.gpuInstanceSliceCount],
        "again": n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(m))),
        "compute": n.nvmlComputeInstanceGetInfo(c).id,
    })
def profile(kind):
    info = n.nvmlDeviceGetGpuInstanceProfileInfo(h, kind)
    return [info.id, info.name]
answer["profiles"] = [attempt(profile, kind) for kind in range(18)]
"""


def test_mig_devices_instances_and_profiles(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", mig=["gpu0: 1g.10gb x2, 1c.3g.40gb x2, 2g.20gb"])
    got = ask(made.library_folder / "libnvidia-ml.so.1", MIG)
    assert got["mode"] == [1, 1]
    kinds = made.description.mig_profiles(made.gpus[0])
    for mig, seen in zip(made.gpus[0].mig, got["devices"], strict=True):
        kind = kinds[mig.profile]
        assert seen == {
            "slot": mig.slot,
            "uuid": mig.uuid,
            "gi": mig.gi,
            "ci": mig.ci,
            "is_mig": 1,
            "parent": 0,
            "name": f"NVIDIA H100 80GB HBM3 MIG {'1c.' if mig.ci_slices < kind.slices else ''}{mig.profile}",
            "profile": kind.id,
            "start": mig.start,
            "size": kind.size,
            "memory": kind.memory,
            "total": kind.memory,
            "slices": [mig.ci_slices, kind.slices],
            "again": mig.uuid,
            "compute": mig.ci,
        }
    offered = {kind.kind: [kind.id, f"MIG {name}"] for name, kind in kinds.items()}
    assert got["profiles"] == [offered.get(number, {"error": NOT_SUPPORTED}) for number in range(18)]


def test_only_gpus_with_a_node_in_dev_are_listed_and_indices_close_up(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8")
    for minor in (0, 1, 4):
        (made.root / f"dev/nvidia{minor}").unlink()
    got = ask(made.library_folder / "libnvidia-ml.so.1", FACTS)
    assert [(gpu["index"], gpu["minor"]) for gpu in got["gpus"]] == [(0, 2), (1, 3), (2, 5), (3, 6), (4, 7)]


def test_without_any_device_node_nvml_starts_and_counts_none(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    (made.root / "dev/nvidia0").unlink()
    assert ask(made.library_folder / "libnvidia-ml.so.1", FACTS)["gpus"] == []


def test_a_mig_device_without_its_capability_nodes_is_not_listed(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", mig=["gpu0: 3g.40gb x2"])
    gone = made.gpus[0].mig[0]
    (made.root / f"dev/nvidia-caps/nvidia-cap{3 + gone.gi * 9}").unlink()
    got = ask(made.library_folder / "libnvidia-ml.so.1", MIG)
    assert [device["uuid"] for device in got["devices"]] == [made.gpus[0].mig[1].uuid]


@pytest.mark.root
def test_a_node_that_may_not_be_opened_hides_its_gpu() -> None:
    """nobody can't open a node of mode 0600: the same refusal that a device cgroup gives."""
    code = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1])
os.setgid(65534); os.setuid(65534)
count = ctypes.c_uint()
assert library.nvmlInit_v2() == 0
library.nvmlDeviceGetCount_v2(ctypes.byref(count))
print(count.value)
"""
    with tempfile.TemporaryDirectory(prefix="gp") as folder:  # pytest's own folders are closed to others than root
        Path(folder).chmod(0o755)
        made = node.create(Path(folder) / "n", "h100x8")
        for minor in (1, 6):
            (made.root / f"dev/nvidia{minor}").chmod(0o600)
        command = [sys.executable, "-c", code, str(made.library_folder / "libnvidia-ml.so.1")]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "6", done.stderr


WATCH = """
import time
n.nvmlInit()
watched = n.nvmlEventSetCreate()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
for handle in handles:
    assert n.nvmlDeviceGetSupportedEventTypes(handle) & n.nvmlEventTypeXidCriticalError
    n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, watched)
print("ready", flush=True)
"""


def _watcher(library: Path, code: str) -> subprocess.Popen[str]:
    head = f"import ctypes, json, sys\nimport pynvml as n\nn.nvmlLib = ctypes.CDLL({str(library)!r})\n"
    process = subprocess.Popen([sys.executable, "-c", head + WATCH + code], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def test_an_xid_reaches_every_waiting_process_at_once(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8")
    code = """
event = n.nvmlEventSetWait_v2(watched, 10000)
print(json.dumps([time.monotonic(), n.nvmlDeviceGetIndex(event.device), event.eventType, event.eventData,
    event.gpuInstanceId, event.computeInstanceId]))
"""
    library = made.library_folder / "libnvidia-ml.so.1"
    inject.inject(made.folder, "gpu 5 xid 13")  # before anybody watched: nobody's business
    watchers = [_watcher(library, code) for _ in range(2)]
    start = time.monotonic()
    inject.inject(made.folder, "gpu 3 xid 79 gi 7 ci 0")
    for watcher in watchers:
        out, _ = watcher.communicate(timeout=20)
        when, *event = json.loads(out)
        assert event == [3, 8, 79, 7, 0]
        assert when - start < 1
        assert watcher.returncode == 0


def test_events_queue_in_order_and_waiting_ends_in_time(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    code = """
sys.stdin.readline()
got = []
start = time.monotonic()
while True:
    try:
        got.append(n.nvmlEventSetWait_v2(watched, 200).eventData)
    except n.NVMLError_Timeout:
        break
print(json.dumps([got, time.monotonic() - start]))
"""
    library = made.library_folder / "libnvidia-ml.so.1"
    head = f"import ctypes, json, sys\nimport pynvml as n\nn.nvmlLib = ctypes.CDLL({str(library)!r})\n"
    with subprocess.Popen(
        [sys.executable, "-c", head + WATCH + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdin
        process.stdout.readline()
        for xid in (79, 48, 31):
            inject.inject(made.folder, f"gpu 0 xid {xid}")
        process.stdin.write("\n")
        process.stdin.close()
        got, seconds = json.loads(process.stdout.read())
    assert got == [79, 48, 31]
    assert 0.15 < seconds < 2


def test_a_lost_gpu_fails_by_itself_and_comes_back(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "l40sx4")
    library = made.library_folder / "libnvidia-ml.so.1"
    code = """
n.nvmlInit()
answer = [attempt(lambda: n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i))) for i in range(n.nvmlDeviceGetCount())]
"""
    whole = [gpu.uuid for gpu in made.gpus]
    inject.inject(made.folder, "gpu 1 lost")
    assert ask(library, code) == [whole[0], {"error": GPU_IS_LOST}, *whole[2:]]
    assert node.load(made.folder).gpus[1].lost
    inject.inject(made.folder, "gpu 1 found")
    assert ask(library, code) == whole


def test_handles_of_a_running_process_notice_the_loss(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "l40sx4")
    code = f"""
import gpulet.sim.inject as inject
n.nvmlInit()
handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(4)]
watched = n.nvmlEventSetCreate()
for handle in handles:
    n.nvmlDeviceRegisterEvents(handle, n.nvmlEventTypeXidCriticalError, watched)
inject.inject({str(made.folder)!r}, "gpu 2 lost")
answer = [attempt(n.nvmlDeviceGetMinorNumber, handle) for handle in handles]
answer.append(attempt(n.nvmlEventSetWait_v2, watched, 5000))
"""
    lost = {"error": GPU_IS_LOST}
    assert ask(made.library_folder / "libnvidia-ml.so.1", code) == [0, 1, lost, 3, lost]


def test_initialisation_fails_and_delays_as_told(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    library = made.library_folder / "libnvidia-ml.so.1"
    code = "import time\nstart = time.monotonic()\nanswer = [attempt(n.nvmlInit), time.monotonic() - start]\n"
    inject.inject(made.folder, "nvml init fails with 9")
    assert ask(library, code)[0] == {"error": 9}
    inject.inject(made.folder, "nvml init works")
    inject.inject(made.folder, "nvml init takes 0.3s")
    result, seconds = ask(library, code)
    assert result is None
    assert 0.3 <= seconds < 2


def test_a_mig_change_is_seen_by_a_running_process(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "a100x8")
    code = f"""
import gpulet.sim.inject as inject
n.nvmlInit()
handle = n.nvmlDeviceGetHandleByIndex(1)
before = list(n.nvmlDeviceGetMigMode(handle))
inject.inject({str(made.folder)!r}, "mig gpu1 3g.20gb×2")
uuids = [n.nvmlDeviceGetUUID(n.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)) for i in range(2)]
answer = [before, list(n.nvmlDeviceGetMigMode(handle)), uuids]
"""
    got = ask(made.library_folder / "libnvidia-ml.so.1", code)
    now = node.load(made.folder).gpus[1].mig
    assert got == [[0, 0], [1, 1], [mig.uuid for mig in now]]
    assert [mig.profile for mig in now] == ["3g.20gb"] * 2


def test_a_driver_upgrade_leaves_the_old_library_behind(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    old = made.library_folder / f"libnvidia-ml.so.{made.description.driver}"
    code = f"""
import gpulet.sim.inject as inject
n.nvmlInit()
inject.inject({str(made.folder)!r}, "driver 580.65.06")
answer = [n.nvmlSystemGetDriverVersion()]
n.nvmlShutdown()
answer.append(attempt(n.nvmlInit))
"""
    assert ask(old, code) == ["580.65.06", {"error": 18}]
    assert not old.exists()
    assert ask(made.library_folder / "libnvidia-ml.so.1", FACTS)["driver"] == "580.65.06"
    assert (made.root / "usr/lib/firmware/nvidia/580.65.06/gsp_tu10x.bin").exists()
    assert "580.65.06" in (made.root / "proc/driver/nvidia/version").read_text()


def test_fabric_of_a_rack_and_recovery_action(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "gb200x4")
    code = """
import ctypes
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
info = n.c_nvmlGpuFabricInfo_v2_t()
info.version = n.nvmlGpuFabricInfo_v2
n.nvmlDeviceGetGpuFabricInfoV(h, ctypes.byref(info))
value = n.nvmlDeviceGetFieldValues(h, [n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0]
answer = [bytes(info.clusterUuid).hex(), info.cliqueId, info.state, value.nvmlReturn, value.value.uiVal]
"""
    inject.inject(made.folder, "gpu 0 recovery 1")
    cluster = made.description.cluster.replace("-", "")
    assert ask(made.library_folder / "libnvidia-ml.so.1", code) == [cluster, 32766, 3, 0, 1]


def test_calls_before_init_say_uninitialised(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    code = "answer = [attempt(n.nvmlDeviceGetCount), attempt(n.nvmlSystemGetDriverVersion)]"
    assert ask(made.library_folder / "libnvidia-ml.so.1", code) == [{"error": 1}] * 2
