"""What the health thread makes of NVML's answers before anybody decides about a GPU."""

from __future__ import annotations

import logging
import threading

import pytest

from gpulet.errors import NvmlError
from gpulet.plugin.health import Answer, Health, NvmlState, Policy, step
from gpulet.plugin.monitor import Monitor
from support.hand_made import gpu_uuid
from support.plugin_process import until

A, B = gpu_uuid(0), gpu_uuid(1)


class Nvml:
    """NVML whose GPUs are all well, until something is said otherwise. opened: how often it was started."""

    def __init__(self) -> None:
        self.opened = 0
        self.refused: dict[str, str] = {}
        self.said: dict[str, str] = {}
        self.starts: NvmlError | None = None
        self.waits: list[NvmlError] = []

    def __call__(self):
        self.opened += 1
        if self.starts and self.opened > 1:
            raise self.starts
        return self

    def watch(self, uuids):
        return {uuid: self.refused[uuid] for uuid in uuids if uuid in self.refused}

    def wait(self, timeout_ms):
        if self.waits:
            raise self.waits.pop()

    def state(self, uuid):
        return self.said.get(uuid, "")

    def recovery(self, uuid):
        return 0

    def close(self):
        pass


@pytest.fixture
def nvml():
    return Nvml()


def heard_of(nvml, enough):
    """What a monitor of A and B tells until it is enough."""
    heard = []
    monitor = Monitor(nvml, [A, B], heard.append, ask_every=0)
    monitor.start()
    until(lambda: enough(heard))
    monitor.stop()
    return heard


@pytest.mark.parametrize("reason", ["Insufficient Permissions (NVML 4)", "Function Not Found (NVML 13)"])
def test_an_answer_about_the_question_is_an_answer(nvml, reason, caplog):
    """A GPU in MIG mode refuses an unprivileged plugin what it asks, and works all the same."""
    nvml.said = {A: reason, B: reason}
    heard = heard_of(nvml, lambda heard: len(heard) > 8)
    assert {event for event in heard if isinstance(event, Answer)} == {Answer(A, "", 0), Answer(B, "", 0)}
    (line,) = caplog.messages
    assert line.startswith(f"GPU {A} (and 1 more) doesn't tell its memory") and reason in line
    assert ("NVIDIA_MIG_MONITOR_DEVICES=all" in line) is ("NVML 4" in reason)


def test_a_refused_registration_for_events_is_no_gpus_fault(nvml, caplog):
    nvml.refused = {A: "Insufficient Permissions (NVML 4)", B: "Unknown Error (NVML 999)"}
    heard = heard_of(nvml, lambda heard: len(heard) > 8)
    silences = {event.uuid: event.silence for event in heard if isinstance(event, Answer)}
    assert silences == {A: "", B: "it takes no registration for health events: Unknown Error (NVML 999)"}
    (line,) = caplog.messages
    assert line.startswith(f"GPU {A} has no health events: Insufficient Permissions (NVML 4); it counts as healthy")


def test_nvml_that_fails_is_started_anew_before_anything_is_made_of_it(nvml, caplog):
    """So it is while the driver is replaced."""
    caplog.set_level(logging.WARNING)
    nvml.waits = [NvmlError("NVML can't wait for events", code=1, seen="Uninitialized")]
    heard = heard_of(nvml, lambda heard: heard.count(Answer(A, "", 0)) > 2)
    assert nvml.opened == 2
    assert {event for event in heard if isinstance(event, NvmlState)} == {NvmlState()}
    assert caplog.messages == ["NVML can't wait for events: Uninitialized: starting NVML anew"]


@pytest.mark.parametrize("starts", [True, False])
def test_nvml_that_fails_again_is_judged(nvml, starts):
    waits = NvmlError("NVML can't wait for events", code=999, seen="Unknown Error")
    nvml.waits = [waits] * 2
    if not starts:
        nvml.starts = NvmlError("driver library and kernel module differ in version", code=18)
    heard = heard_of(nvml, lambda heard: any(isinstance(event, NvmlState) and event.problem for event in heard))
    assert nvml.opened == 2
    assert heard[-1] == NvmlState(str(nvml.starts or waits))


def test_nvml_that_only_fails_when_a_gpu_is_asked_has_failed(nvml, monkeypatch):
    """Its wait works all the same; the node went to and fro between all of its GPUs and none."""
    monkeypatch.setattr("gpulet.plugin.monitor.RETRY", 0.01)
    fails = NvmlError("NVML can't be asked for a GPU", code=1, seen="Uninitialized")
    asked = []

    def state(uuid):
        asked.append(uuid)
        if len(asked) < 9:
            raise fails
        return ""

    nvml.state = state
    heard = heard_of(nvml, lambda heard: NvmlState() in heard)
    health, kinds = Health(), []
    for event in heard:
        health, notices = step(health, event, Policy(), 0)
        kinds += [notice.kind for notice in notices]
    assert kinds == ["NVMLFailed", "NVMLRecovered"]
    assert heard[: heard.index(NvmlState())] == [NvmlState(str(fails))] * 7 + [Answer(A, "", 0), Answer(B, "", 0)]


def test_a_gpu_that_hangs_hides_nothing_of_those_before_it(nvml):
    hangs, heard = threading.Event(), []

    def state(uuid):
        if uuid == B:
            assert hangs.wait(30)
        return "GPU is lost (NVML 15)"

    nvml.state = state
    monitor = Monitor(nvml, [A, B], heard.append, ask_every=0)
    monitor.start()
    try:
        until(lambda: heard)
        assert heard == [Answer(A, "GPU is lost (NVML 15)")]
    finally:
        hangs.set()
        monitor.stop()
    assert heard[1] == Answer(B, "GPU is lost (NVML 15)")


def test_a_wait_that_ends_again_and_again_asks_no_oftener(nvml, caplog):
    """An answer that counts when it comes twice is to come twice at the interval."""
    nvml.wait = raising(NvmlError("NVML can't wait for events", code=15, seen="GPU is lost"))
    heard = []
    monitor = Monitor(nvml, [A, B], heard.append, ask_every=60)
    monitor.start()
    until(lambda: nvml.opened > 3)
    monitor.stop()
    assert heard == [Answer(A, "", 0), Answer(B, "", 0), NvmlState()]
    assert caplog.messages == ["NVML can't wait for events: GPU is lost: asking which, and watching the others anew"]


def raising(error):
    def function(*_):
        raise error

    return function
