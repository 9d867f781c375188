from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from gpulet.errors import NodeError, NvmlError
from gpulet.plugin.config import Config
from gpulet.plugin.health import (
    Acknowledged,
    Answer,
    Fault,
    Health,
    Memory,
    NvmlState,
    Policy,
    XidSeen,
    read_policy,
    step,
)
from gpulet.plugin.monitor import Monitor
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import Shared, Sharing
from gpulet.plugin.xid import CATALOGUE, describe
from support.hand_made import facts, gpu_uuid, mig_gpu
from support.plugin_process import until

A, B = gpu_uuid(0), gpu_uuid(1)
DEFAULT = Policy()


def after(*events, policy=DEFAULT, health=Health()):  # noqa: B008
    notices = []
    for moment, event in enumerate(events):
        health, new = step(health, event, policy, float(moment))
        notices += [notice.kind for notice in new]
    return health, notices


def devices(node, **settings):
    return [device for one in inventory(node, Config(**settings)).resources for device in one.devices]


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68, 109])
def test_the_peers_six_are_passed_over(number):
    assert after(XidSeen(A, number)) == (Health(), [])


@pytest.mark.parametrize("number", [48, 62, 69, 74, 79, 95, 555])
def test_others_make_the_gpu_unhealthy(number):
    health, notices = after(XidSeen(A, number))
    assert notices == ["GPUUnhealthy"]
    assert set(health.sick(devices(facts(2)))) == {A}


@pytest.mark.parametrize(
    ("disable", "enable", "acts", "passes"),
    [
        ("", "", (11, 555), (13, 109)),
        ("all", "", (), (13, 79, 555)),
        ("xids", "", (), (13, 79, 555)),
        ("", "all", (13, 555), ()),
        ("11", "11", (11, 555), (13,)),
        ("all", "79", (79,), (13, 48)),
        ("all", "all", (13, 79), ()),
        (" 110 ,68", "", (79,), (110, 68)),
        ("68,not-an-int,67,-5,,", "", (5, 79), (67, 68)),
        ("11,ALL", "", (), (11, 79)),
    ],
)
def test_the_two_variables(disable, enable, acts, passes):
    policy, _ = read_policy(disable, enable)
    assert [number for number in acts if not policy.acts_on(number)] == []
    assert [number for number in passes if policy.acts_on(number)] == []
    assert policy.watches is bool(acts)


def test_what_is_no_xid_is_named():
    assert read_policy("68,abc", "-1,all")[1] == ["abc", "-1"]


def test_the_catalogue_profile():
    policy, _ = read_policy("", "", "catalogue")
    assert [number for number in (94, 13, 31, 63) if policy.acts_on(number)] == []
    assert [number for number in (109, 79, 95, 777) if not policy.acts_on(number)] == []


def test_the_table_reads_well():
    assert describe(79) == "Xid 79 (GPU has fallen off the bus; action: reboot)"
    assert describe(777) == "Xid 777"
    for row in CATALOGUE.values():
        assert row.action in ("none", "restart-app", "reset", "reboot", "replace")
        assert row.scope in ("process", "gpu", "link", "node")
        assert row.recovery


def test_all_replicas_change_together():
    shared = devices(facts(2), time_slicing=Sharing((Shared("nvidia.com/gpu", 4),)))
    health, _ = after(XidSeen(A, 79))
    assert [device.id for device in shared if device.base in health.sick(shared)] == [f"{A}::{n}" for n in range(4)]


@pytest.mark.parametrize(
    ("gi", "ci", "slots"),
    [(9, 0, [2]), (9, -1, [2]), (-1, -1, [0, 1, 2, 3, 4, 5, 6]), (9, 1, []), (-1, 0, [0, 1, 2, 3, 4, 5, 6])],
)
def test_mig_instances(gi, ci, slots):
    node = facts(mig_gpu(0, *["1g.10gb"] * 7), mig_gpu(1, *["1g.10gb"] * 7))
    health, _ = after(XidSeen(A, 79, gi, ci))
    sick = health.sick(devices(node, mig_strategy="mixed"))
    assert sorted(sick) == [node.gpus[0].mig[slot].uuid for slot in slots]
    whole = health.sick(devices(node))
    assert set(whole) == {A}


def test_recovery_needs_evidence():
    health, notices = after(
        XidSeen(A, 74),
        Answer(A, "", 0),  # it answers, and the driver has not asked for anything yet: no evidence
        XidSeen(A, 13),  # nor is an Xid that means nothing
        Answer(A, "", 1),  # reset asked for
        Answer(B, "", 0),
    )
    assert notices == ["GPUUnhealthy"]
    assert health.faults[0].recovery == 1
    health, notices = after(Answer(A, "", 0), health=health)
    assert (health, notices) == (Health(), ["GPURecovered"])


def test_an_old_driver_that_tells_no_recovery_action():
    health, _ = after(XidSeen(A, 74), *[Answer(A)] * 5)
    assert health.faults
    assert after(Acknowledged(A), health=health) == (Health(), ["GPURecovered"])
    assert after(Acknowledged(A)) == (Health(), [])


def test_a_lost_gpu_that_answers_again_is_well():
    lost = Answer(A, "GPU is lost (NVML 15)")
    health, notices = after(XidSeen(A, 79), lost, lost)
    assert (len(health.faults), notices) == (2, ["GPUUnhealthy", "GPUUnhealthy"])
    assert after(Answer(A, "", -1), health=health) == (Health(), ["GPURecovered"])


def test_an_answer_that_came_late_is_no_evidence_against_an_xid():
    late = Answer(A, "Timeout (NVML 10)")
    broken, _ = after(XidSeen(A, 48))
    assert after(late, late, Answer(A, "", 0), health=broken) == (broken, ["GPUUnhealthy"])
    assert after(late, late, Answer(A, "", 0)) == (Health(), ["GPUUnhealthy", "GPURecovered"])


def test_a_silence_that_may_be_over_with_the_next_question_counts_when_it_comes_twice():
    late, well = Answer(A, "Unknown Error (NVML 999)"), Answer(A, "", 0)
    assert after(late, well, late, well, Answer(B, "Timeout (NVML 10)"), late, well) == (Health(), [])
    assert after(late, well, late, late, late)[1] == ["GPUUnhealthy"]
    assert after(late, Acknowledged(A), late) == (Health(), [])
    for code in (6, 8, 11, 15, 16, 28):
        assert after(Answer(A, f"whatever (NVML {code})"))[1] == ["GPUUnhealthy"]


def test_the_same_xid_again_says_nothing_new():
    assert after(*[XidSeen(A, 79)] * 1000)[1] == ["GPUUnhealthy"]


def test_an_event_of_an_unknown_gpu():
    assert after(XidSeen("", 79)) == (Health(), [])


def test_nvml_itself():
    health, notices = after(NvmlState("gone"), NvmlState("still gone"))
    assert notices == ["NVMLFailed"]
    assert health.sick(devices(facts(2))) == {A: "still gone", B: "still gone"}
    health, notices = after(NvmlState("no init", "facts"), NvmlState(), health=health)
    assert (notices, health.problem) == ([], "no init")
    assert after(NvmlState(user="facts"), health=health) == (Health(), ["NVMLRecovered"])


def test_faults_outlive_the_process_and_not_the_boot(tmp_path):
    memory = Memory(str(tmp_path / "state" / "health.json"), "boot-1")
    assert memory.load() == Health()
    health, _ = after(XidSeen(A, 79, 3, 0), Answer(A, "", 2))
    memory.save(health)
    assert Memory(memory.path, "boot-1").load() == health
    assert Memory(memory.path, "boot-2").load() == Health()
    good = {"uuid": A, "gi": 3, "ci": 0, "xid": 79, "reason": "why", "since": 1.5, "recovery": 2}
    wrong = [{**good, name: value} for name, value in [("recovery", "1"), ("gi", True), ("uuid", 1), ("since", None)]]
    rows = [{"uuid": 1}, 7, {**good, "more": 1}, *wrong, {**good, "since": float("nan")}]
    bad = [json.dumps({"boot_id": "boot-1", "faults": [row]}) for row in rows]
    for text in ("{", "[]", "[" * 200_000, '{"boot_id": "boot-1", "faults": 3}', *bad):
        (tmp_path / "state" / "health.json").write_text(text)
        with pytest.raises(ValueError):
            memory.load()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["health.json"]


def test_whoever_serves_again_takes_over_what_the_other_kept(tmp_path):
    memory = Memory(str(tmp_path / "health.json"), "boot-1")
    acknowledged, seen_by_both, came_since = (Fault(f"GPU-{name}", -1, -1, 79, "why", 10.0) for name in "abc")
    memory.save(Health((seen_by_both,)))
    os.utime(memory.path, (20.0, 20.0))
    own = Health((acknowledged, replace(seen_by_both, since=21.0), replace(came_since, since=30.0)), (("facts", "x"),))
    assert memory.joined(own) == Health((seen_by_both, replace(came_since, since=30.0)), own.problems)
    os.unlink(memory.path)
    assert memory.joined(own) == own


def test_a_fault_elsewhere():
    fault = Fault(B, -1, -1, 79, "x", 0)
    assert not any(fault.concerns(device) for device in devices(facts(1)))


def test_the_monitor_outlives_any_error(monkeypatch):
    """A thread that ended in silence would leave every GPU healthy for ever."""
    monkeypatch.setattr("gpulet.plugin.monitor.RETRY", 0.01)
    heard, tries = [], []

    class Broken:
        def watch(self, uuids):
            raise ZeroDivisionError("a bug") if len(tries) == 1 else NodeError("no events")

        def close(self):
            pass

    def open():
        tries.append(1)
        return Broken()

    monitor = Monitor(open, [A], heard.append)
    monitor.start()
    until(lambda: len(heard) > 1)
    monitor.stop()
    assert heard[:2] == [NvmlState("ZeroDivisionError: a bug"), NvmlState("no events")]


def test_a_lost_gpu_that_ends_the_wait_is_one_lost_gpu():
    heard = []

    class Session:
        def watch(self, uuids):
            return {}

        def wait(self, timeout_ms):
            raise NvmlError("NVML can't wait for events", code=15, seen="GPU is lost")

        def state(self, uuid):
            return "GPU is lost (NVML 15)" if uuid == A else ""

        def recovery(self, uuid):
            return 0

        def close(self):
            pass

    monitor = Monitor(Session, [A, B], heard.append)
    monitor.start()
    until(lambda: len(heard) > 2)
    monitor.stop()
    assert heard[:3] == [Answer(A, "GPU is lost (NVML 15)"), Answer(B, "", 0), NvmlState()]
    assert not any(isinstance(event, NvmlState) and event.problem for event in heard)


def test_a_gpu_whose_events_can_not_be_had_is_unhealthy_until_they_can():
    heard, asked = [], []

    class Session:
        def watch(self, uuids):
            asked.append(tuple(uuids))
            refused = {A: "Unknown Error (NVML 999)", B: "Not Supported (NVML 3)"} if len(asked) < 4 else {}
            return {uuid: refused[uuid] for uuid in uuids if uuid in refused}

        def wait(self, timeout_ms):
            return None

        def state(self, uuid):
            return ""

        def recovery(self, uuid):
            return 0

        def close(self):
            pass

    monitor = Monitor(Session, [A, B], heard.append, ask_every=0)
    monitor.start()
    until(lambda: heard.count(Answer(A, "", 0)) > 3)
    monitor.stop()
    assert asked == [(A, B), (A,), (A,), (A,)]  # one too old for events isn't tried again
    answers = [event for event in heard if isinstance(event, Answer)]
    assert {event.silence for event in answers if event.uuid == B} == {""}
    silences = [event.silence for event in answers if event.uuid == A]
    assert silences[:3] == ["it takes no registration for health events: Unknown Error (NVML 999)"] * 2 + [""]
    health, told = Health(), []
    for event in heard:
        health, notices = step(health, event, Policy(), 0)
        told += [(notice.kind, notice.uuid) for notice in notices]
    assert told == [("GPUUnhealthy", A), ("GPURecovered", A)]


def test_what_is_in_the_way_of_the_file(tmp_path):
    path = tmp_path / "state" / "health.json"
    memory = Memory(str(path), "boot-1")
    path.parent.mkdir()
    sick = Health((Fault("u", -1, -1, 79, "why", 1.0),))
    os.mkfifo(path.with_name("health.json.new"))
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a pipe"):
        memory.load()
    memory.save(sick)
    assert memory.load() == sick
    path.unlink()
    path.mkdir()
    for act in (memory.load, lambda: memory.save(sick)):
        with pytest.raises(OSError):
            act()
