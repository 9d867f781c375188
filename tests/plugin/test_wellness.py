from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from gpulet.plugin.config import Config
from gpulet.plugin.health import Acknowledged, Answer, Fault, NvmlState, XidSeen
from gpulet.plugin.sharing import Shared, Sharing
from gpulet.plugin.wellness import Wellness, boot_id
from support.hand_made import facts, gpu_uuid

A = gpu_uuid(0)


class Sessions:
    """NVML of which each session is counted and tells of one Xid when asked for `xid`."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.closed = 0
        self.xid = threading.Event()
        self.fails = threading.Event()

    def __call__(self, config: Config) -> Sessions:
        self.opened.append(config.driver_root)
        return self

    def watch(self, uuids, mask=8):
        return {}

    def wait(self, timeout_ms):
        time.sleep(0.005)
        if self.fails.is_set():
            raise RuntimeError("NVML is gone")

    def state(self, uuid):
        return ""

    def recovery(self, uuid):
        return 0

    def close(self):
        self.closed += 1


def played(scene, sessions=None, **settings) -> None:
    """Play `scene(wellness, config, changes)` in an event loop."""

    async def run():
        changes = []
        wellness = Wellness(sessions, lambda: changes.append(wellness.health))
        config = Config(**{"refresh_interval": 0.01, **settings})
        wellness.adopt(config, facts(2))
        try:
            await scene(wellness, config, changes)
        finally:
            await asyncio.to_thread(wellness.stop)

    asyncio.run(run())


async def until(condition):
    limit = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < limit
        await asyncio.sleep(0.005)


def test_the_monitor_goes_on_over_a_new_configuration():
    """Each start of it is a moment in which an Xid is nobody's."""
    sessions = Sessions()

    async def scene(wellness, config, changes):
        first = wellness._monitor
        shared = Sharing((Shared("nvidia.com/gpu", 2),))
        for other in ({"time_slicing": shared}, {"health_profile": "catalogue"}, {"mig_strategy": "mixed"}):
            wellness.adopt(Config(refresh_interval=0.01, **other), facts(2))
            assert wellness._monitor is first
        began = time.monotonic()
        wellness.adopt(Config(refresh_interval=0.01, driver_root="/other"), facts(2))
        wellness.adopt(Config(refresh_interval=0.01, driver_root="/other"), facts(3))
        assert time.monotonic() - began < 0.1
        assert wellness._monitor is not first
        await until(lambda: len(sessions.opened) == 3 and sessions.closed == 2)

    played(scene, sessions)


def test_what_a_monitor_on_its_way_out_thinks_of_nvml_does_not_stay():
    sessions = Sessions()

    async def scene(wellness, config, changes):
        before = wellness._monitor
        wellness.adopt(Config(driver_root="/other"), facts(2))
        wellness._from_monitor(before, NvmlState("the old root is gone"))
        assert wellness.health.problem == ""
        wellness._from_monitor(before, XidSeen(A, 79))
        assert [fault.uuid for fault in wellness.health.faults] == [A]

    played(scene, sessions)


def test_only_the_monitors_answers_are_health_checks():
    sessions = Sessions()

    async def without(wellness, config, changes):
        wellness.hear(NvmlState(user="facts"))
        wellness.hear(Acknowledged(A))
        assert wellness.heard == 0.0

    async def with_one(wellness, config, changes):
        await until(lambda: wellness.heard > 0)
        sessions.fails.set()
        await until(lambda: wellness.health.problem)
        last = wellness.heard
        wellness._from_monitor(wellness._monitor, NvmlState("still gone"))
        assert wellness.heard == last

    played(without, disable_healthchecks="all")
    played(with_one, sessions)


@pytest.mark.parametrize("folder", ["/proc/none", "/a\0b"])
def test_no_failure_of_saving_keeps_a_fault_from_the_kubelet(folder, caplog):
    async def scene(wellness, config, changes):
        wellness.hear(XidSeen(A, 79))
        await asyncio.sleep(0.05)
        assert [fault.uuid for fault in changes[-1].faults] == [A]
        wellness.keep()
        assert caplog.text.count("faults can't be kept in") == 1

    played(scene, state_dir=folder)


def test_the_kubelet_is_told_before_the_disk(monkeypatch, tmp_path):
    order = []
    monkeypatch.setattr("gpulet.plugin.health.Memory.save", lambda *_: order.append("disk"))

    async def scene(wellness, config, changes):
        wellness._changed = lambda: order.append("kubelet")
        wellness.hear(XidSeen(A, 79))
        await asyncio.sleep(0.01)
        assert order == ["kubelet", "disk"]

    played(scene, state_dir=str(tmp_path))


@pytest.mark.parametrize("kept", [True, False])
def test_until_when_a_gpu_is_unhealthy_is_told_with_the_fault_and_after_a_restart(kept, tmp_path, caplog):
    """Xid 69 says that the process is to be restarted; a plugin that is restarted stays unhealthy."""
    word = tmp_path / "well" / A

    async def fails(wellness, config, changes):
        wellness.hear(XidSeen(A, 69))
        wellness.hear(Answer(gpu_uuid(1), "GPU is lost (NVML 15)"))
        await asyncio.sleep(0.02)

    async def restarted(wellness, config, changes):
        assert len(wellness.health.faults) == (2 if kept else 0)
        word.parent.mkdir()
        word.touch()
        wellness.take_acknowledgements(config)

    state = str(tmp_path) if kept else ""
    played(fails, state_dir=state)
    played(restarted, state_dir=state)
    ends = [line for line in caplog.messages if "Xid 69" in line]
    remedy = "; until its recovery action, once the driver asks for one, is none again or the node has rebooted"
    remedy += f" or somebody makes the file {word}" if kept else ""
    assert ends and all(line.endswith(remedy) for line in ends)
    assert len(ends) == len([line for line in caplog.messages if line.endswith("(NVML 15); until it answers")])
    assert len(ends) == (2 if kept else 1)


def test_nothing_is_promised_of_a_recovery_action_that_no_driver_tells(caplog):
    async def scene(wellness, config, changes):
        wellness.hear(Answer(A, "", -1))
        wellness.hear(XidSeen(A, 69))

    played(scene, state_dir="")
    assert caplog.messages[-1].endswith("; until the node has rebooted")


def test_a_new_watch_begins_without_the_doubts_of_the_old():
    late = Answer(A, "Unknown Error (NVML 999)")

    async def scene(wellness, config, changes):
        wellness.hear(late)
        wellness.adopt(config, facts(2))
        assert wellness.health.doubts == {A}
        wellness.adopt(config, facts(3))
        wellness.hear(late)
        assert not wellness.health.faults

    sessions = Sessions()
    sessions.fails.set()  # it has no answers of its own
    played(scene, sessions)


def test_the_log_has_the_recovery_that_the_look_at_the_node_brings(caplog):
    caplog.set_level("INFO")

    async def scene(wellness, config, changes):
        wellness.hear(NvmlState("gone", user="facts"))
        wellness.hear(NvmlState("gone"))
        wellness.hear(NvmlState())
        wellness.hear(NvmlState(user="facts"))

    played(scene)
    assert caplog.messages == ["NVMLRecovered: NVML works again"]


def test_what_concerns_all_gpus_has_no_name_before_its_colon(caplog):
    async def scene(wellness, config, changes):
        wellness.hear(NvmlState("gone"))

    played(scene)
    assert caplog.messages == ["NVMLFailed: gone"]


def test_a_file_that_is_not_ours_is_kept_aside_and_told_once(tmp_path, caplog):
    (tmp_path / "health.json").write_text("[" * 200_000)

    async def scene(wellness, config, changes):
        assert wellness.health.faults == ()

    played(scene, state_dir=str(tmp_path))
    played(scene, state_dir=str(tmp_path))
    assert caplog.text.count("can't be read") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["health.json.unread"]


def test_who_stands_aside_leaves_the_folder_alone(tmp_path):
    """In a rolling update two plugins have one state folder; it is the one's that serves."""

    async def scene(wellness, config, changes):
        kept, word = tmp_path / "health.json", tmp_path / "well" / A
        wellness.stand_aside(True)
        wellness.hear(XidSeen(A, 79))
        wellness.hear(XidSeen(gpu_uuid(1), 79))
        await asyncio.sleep(0.01)
        wellness.keep()
        assert not kept.exists()
        word.parent.mkdir()
        word.touch()
        wellness.take_acknowledgements(config)
        assert word.exists()
        # the other one takes the operator's word for the first GPU, and ends
        time.sleep(0.02)
        word.unlink()
        rows = [{"uuid": gpu_uuid(1), "gi": -1, "ci": -1, "xid": 79, "reason": "why", "since": 1.0, "recovery": 0}]
        kept.write_text(json.dumps({"boot_id": boot_id(), "faults": rows}))
        wellness.stand_aside(False)
        assert wellness.health.faults == (Fault(**rows[0]),) == changes[-1].faults
        wellness.hear(Answer(A, "", 0))
        word.touch()
        wellness.take_acknowledgements(config)
        assert not word.exists()

    played(scene, state_dir=str(tmp_path))
