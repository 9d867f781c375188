"""Which devices are unhealthy and why: a pure step over events. monitor.py brings the events.

A GPU that an Xid or its own silence made unhealthy stays so until there is positive evidence of recovery: the driver's
recovery action has gone back to none, a lost GPU answers again, the node has booted anew, or an operator says so. That
it answers a query, or another Xid that means nothing, is no evidence. Silence counts at once where NVML's word for it
says that the GPU is gone or broken, any other when the GPU is silent the next time too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from gpulet.node.nvml_errors import BROKEN, LOST, code_in
from gpulet.plugin import files
from gpulet.plugin.resources import Device
from gpulet.plugin.xid import CATALOGUE, IGNORED_BY_DEFAULT, describe

ALL_XIDS = ("all", "xids")


@dataclass(frozen=True, slots=True)
class Policy:
    """Which Xids make a device unhealthy. catalogue: by the table's action instead of the peer's list."""

    disabled: frozenset[int] = frozenset()
    enabled: frozenset[int] = frozenset()
    all_disabled: bool = False
    all_enabled: bool = False
    catalogue: bool = False

    def acts_on(self, number: int) -> bool:
        """Whether this Xid makes its device unhealthy. What is enabled beats what is disabled."""
        if self.all_enabled or number in self.enabled:
            return True
        if self.all_disabled or number in self.disabled:
            return False
        if self.catalogue:
            row = CATALOGUE.get(number)
            return row is None or row.action not in ("none", "restart-app")
        return number not in IGNORED_BY_DEFAULT

    @property
    def watches(self) -> bool:
        """Whether any Xid can matter."""
        return not self.all_disabled or self.all_enabled or bool(self.enabled)


def read_policy(disable: str, enable: str, profile: str = "default") -> tuple[Policy, list[str]]:
    """The policy from DP_DISABLE_HEALTHCHECKS, DP_ENABLE_HEALTHCHECKS and the profile, and the items not understood.

    An item is "all", "xids" (the same) or a number; one of the former makes the whole variable mean all.
    """
    numbers, everything, strange = [], [], []
    for text in (disable, enable):
        items = [item.strip() for item in text.lower().split(",") if item.strip()]
        everything.append(any(item in ALL_XIDS for item in items))
        numbers.append(frozenset(int(item) for item in items if item.isascii() and item.isdigit()))
        strange += [item for item in items if item not in ALL_XIDS and not (item.isascii() and item.isdigit())]
    return Policy(numbers[0], numbers[1], everything[0], everything[1], profile == "catalogue"), strange


# -- events --


@dataclass(frozen=True, slots=True)
class XidSeen:
    """An Xid of a GPU, or of one of its MIG instances. gi, ci: -1 where unknown; uuid "" where even that is."""

    uuid: str
    number: int
    gi: int = -1
    ci: int = -1


@dataclass(frozen=True, slots=True)
class Answer:
    """What a GPU said when it was asked. silence: "" or why it doesn't answer; recovery: the driver's recovery action,
    -1 where this driver doesn't tell."""

    uuid: str
    silence: str = ""
    recovery: int = -1


@dataclass(frozen=True, slots=True)
class NvmlState:
    """Whether NVML works for one of its users. problem: "" or why not; user: "events" (the monitor's wait) or "facts"
    (the look at the node)."""

    problem: str = ""
    user: str = "events"


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The operator says that a GPU is well."""

    uuid: str


Event = XidSeen | Answer | NvmlState | Acknowledged


# -- state --


@dataclass(frozen=True, slots=True)
class Fault:
    """Why part of a GPU is unhealthy. xid: 0 where it is silence; since: seconds since the epoch; recovery: the worst
    recovery action seen since, 0 for none yet."""

    uuid: str
    gi: int
    ci: int
    xid: int
    reason: str
    since: float
    recovery: int = 0

    def concerns(self, device: Device) -> bool:
        """Whether the device is, or is on, what failed. A whole GPU suffers from any of its instances."""
        if device.gpu_uuid != self.uuid:
            return False
        return not device.mig or (self.gi in (-1, device.gi) and self.ci in (-1, device.ci))


@dataclass(frozen=True, slots=True)
class Health:
    """All faults, and NVML's own troubles (user, problem), which make every device unhealthy while they last. doubts:
    UUIDs of GPUs whose last answer was a silence that may be over with the next; nobody is told of them."""

    faults: tuple[Fault, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    doubts: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def problem(self) -> str:
        """NVML's trouble in words, "" where there is none."""
        return "; ".join(dict.fromkeys(text for _, text in self.problems))

    def sick(self, devices: Iterable[Device]) -> dict[str, str]:
        """Base id -> reason, of the devices that are unhealthy."""
        found: dict[str, str] = {}
        for device in devices if self.faults or self.problem else ():
            if device.base not in found:
                reason = next((fault.reason for fault in self.faults if fault.concerns(device)), self.problem)
                if reason:
                    found[device.base] = reason
        return found


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that people want to know: "GPUUnhealthy", "GPURecovered", "NVMLFailed", "NVMLRecovered", and what
    news.py adds. pod: namespace, name and UID of the Pod that it is about; None: the node."""

    kind: str
    uuid: str
    text: str
    pod: tuple[str, str, str] | None = None


def step(health: Health, event: Event, policy: Policy, now: float) -> tuple[Health, list[Notice]]:
    """The health after an event, and what there is to tell. now: seconds since the epoch."""
    if isinstance(event, NvmlState):
        others = tuple(item for item in health.problems if item[0] != event.user)
        new = replace(health, problems=(*others, (event.user, event.problem)) if event.problem else others)
        if bool(new.problem) == bool(health.problem):
            return new, []
        kind = "NVMLFailed" if new.problem else "NVMLRecovered"
        return new, [Notice(kind, "", new.problem or "NVML works again")]
    if isinstance(event, XidSeen):
        return _xid(health, event, policy, now)
    if isinstance(event, Acknowledged):
        well = replace(health, doubts=health.doubts - {event.uuid})
        return _recovered(well, event.uuid, "acknowledged by the operator")
    return _answer(health, event, now)


def _xid(health: Health, event: XidSeen, policy: Policy, now: float) -> tuple[Health, list[Notice]]:
    if not event.uuid or not policy.acts_on(event.number):
        return health, []
    same = (event.uuid, event.gi, event.ci)
    if any((fault.uuid, fault.gi, fault.ci) == same and fault.xid for fault in health.faults):
        return health, []
    fault = Fault(event.uuid, event.gi, event.ci, event.number, describe(event.number), now)
    text = f"XidCriticalError: Xid={event.number} on Device={event.uuid}; marking device as unhealthy. {fault.reason}"
    return replace(health, faults=(*health.faults, fault)), [Notice("GPUUnhealthy", event.uuid, text)]


def _answer(health: Health, answer: Answer, now: float) -> tuple[Health, list[Notice]]:
    doubted = answer.uuid in health.doubts
    if answer.silence and not doubted and code_in(answer.silence) not in BROKEN:
        return replace(health, doubts=health.doubts | {answer.uuid}), []
    if doubted and not answer.silence:
        health = replace(health, doubts=health.doubts - {answer.uuid})
    own = [fault for fault in health.faults if fault.uuid == answer.uuid]
    silent = any(fault.xid == 0 for fault in own)
    if answer.silence:
        if silent:
            return health, []
        fault = Fault(answer.uuid, -1, -1, 0, f"the GPU doesn't answer: {answer.silence}", now)
        notice = Notice("GPUUnhealthy", answer.uuid, fault.reason)
        return replace(health, faults=(*health.faults, fault)), [notice]
    lost = any(fault.xid == 0 and code_in(fault.reason) in LOST for fault in own)
    if silent and (len(own) == 1 or lost):  # what was lost comes back anew, what was only late as it was
        return _recovered(health, answer.uuid, "it answers again")
    if silent:
        return replace(health, faults=tuple(fault for fault in health.faults if fault not in own or fault.xid)), []
    if own and answer.recovery == 0 and any(fault.recovery for fault in own):
        return _recovered(health, answer.uuid, "the driver asks for no recovery action any more")
    if own and answer.recovery > 0:
        marked = tuple(
            replace(fault, recovery=max(fault.recovery, answer.recovery)) if fault.uuid == answer.uuid else fault
            for fault in health.faults
        )
        return replace(health, faults=marked), []
    return health, []


def _recovered(health: Health, uuid: str, evidence: str) -> tuple[Health, list[Notice]]:
    left = tuple(fault for fault in health.faults if fault.uuid != uuid)
    if len(left) == len(health.faults):
        return health, []
    return replace(health, faults=left), [Notice("GPURecovered", uuid, evidence)]


# -- across restarts --


@dataclass(slots=True)
class Memory:
    """Faults on disk, with the boot in which they happened: a restarted plugin neither forgets nor outlives them."""

    path: str
    boot_id: str = field(default="")

    def load(self) -> Health:
        """The faults of this boot. A missing or older file means none. Raises OSError, or ValueError for a file that
        isn't ours: then nothing is known, which somebody should be told."""
        try:
            data = json.loads(files.read(self.path), parse_constant=_no_number)
            if data["boot_id"] != self.boot_id:
                return Health()
            return Health(tuple(_fault(row) for row in data["faults"]))
        except FileNotFoundError:
            return Health()
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"not as we write it: {error}") from error

    def put_aside(self) -> str:
        """Keep a file that can't be read from being replaced; returns its new path. Raises OSError."""
        aside = f"{self.path}.unread"
        os.replace(self.path, aside)
        return aside

    def joined(self, own: Health) -> Health:
        """Our health after another process kept the file for a while: its faults, and those of ours that came after it
        last wrote. Raises as `load`."""
        theirs = self.load()
        try:
            written = os.stat(self.path).st_mtime
        except FileNotFoundError:
            written = 0.0
        seen = {(fault.uuid, fault.gi, fault.ci) for fault in theirs.faults}
        later = [one for one in own.faults if one.since > written and (one.uuid, one.gi, one.ci) not in seen]
        return replace(own, faults=(*theirs.faults, *later))

    def save(self, health: Health) -> None:
        """Replace the file. Raises OSError."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        aside = f"{self.path}.new"
        try:
            os.unlink(aside)  # of one that was killed, or whatever lies there
        except FileNotFoundError:
            pass
        with open(aside, "x", encoding="utf-8") as stream:
            json.dump({"boot_id": self.boot_id, "faults": [asdict(fault) for fault in health.faults]}, stream)
        os.replace(aside, self.path)


_TYPES = {"uuid": str, "gi": int, "ci": int, "xid": int, "reason": str, "since": int | float, "recovery": int}


def _fault(row: object) -> Fault:
    """A fault as `save` writes it. Raises TypeError for any other value."""
    if not isinstance(row, dict) or row.keys() != _TYPES.keys():
        raise TypeError(f"no fault: {row!r:.80}")
    for name, kind in _TYPES.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise TypeError(f"{name} of a fault: {row[name]!r:.80}")
    return Fault(**row)


def _no_number(text: str) -> float:
    raise ValueError(f"not as we write it: {text}")
