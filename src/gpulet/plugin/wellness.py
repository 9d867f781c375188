"""The daemon's part of health: hears events, keeps the faults, says when the lists that go out must change."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from gpulet.node.gpu import NodeFacts
from gpulet.plugin.config import Config
from gpulet.plugin.health import (
    Acknowledged,
    Answer,
    Event,
    Health,
    Memory,
    Notice,
    NvmlState,
    Policy,
    XidSeen,
    read_policy,
    step,
)
from gpulet.plugin.monitor import Monitor, Session

log = logging.getLogger(__name__)

WELL = "well"  # the folder in which the operator says that a GPU is well
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """What tells this boot of the machine from every other, "" where the kernel doesn't say."""
    try:
        with open(BOOT_ID, encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return ""


class Wellness:
    """Health of one daemon. open: starts an NVML session for a configuration, None: no health checks; changed: called
    in the loop, once for any number of events, when what is unhealthy may have changed; told: called with each Notice
    and each Xid."""

    def __init__(
        self,
        open: Callable[[Config], Session] | None,
        changed: Callable[[], None],
        told: Callable[[Notice | XidSeen], None] = lambda _: None,
    ) -> None:
        self.health = Health()
        self.policy = Policy()
        self.recovery: dict[str, int] = {}  # UUID -> the recovery action that the driver last asked for
        self.heard = 0.0  # when the monitor last got an answer of NVML, seconds since the epoch
        self.aside = False  # another process serves, and keeps the faults
        self._open, self._changed, self._told = open, changed, told
        self._memory: Memory | None = None
        self._folder: str | None = None  # of the memory, None before the first
        self._unsaved = False
        self._trouble = ""  # why faults can't be kept, said once
        self._monitor: Monitor | None = None
        self._watched: tuple[object, ...] | None = None  # what the monitor was started for
        self._scheduled = False
        self._stuck: set[str] = set()  # acknowledgements that can't be removed

    def adopt(self, config: Config, facts: NodeFacts) -> None:
        """Watch these GPUs under this configuration from now on."""
        self.policy, strange = read_policy(
            config.disable_healthchecks, config.enable_healthchecks, config.health_profile
        )
        for item in strange:
            log.warning("health checks: %r is no Xid: ignored", item)
        self._remember(config.state_dir)
        self._watch(config, tuple(gpu.uuid for gpu in facts.gpus) if facts.source == "nvml" else ())

    def _watch(self, config: Config, uuids: tuple[str, ...]) -> None:
        """Have a monitor of these GPUs. One that watches them already goes on, since an Xid between two is nobody's."""
        opener = self._open if self.policy.watches and uuids else None
        wanted = (config.lookup_root, config.refresh_interval, uuids) if opener else None
        if wanted == self._watched:
            return
        before, self._monitor, self._watched = self._monitor, None, wanted
        self.health = replace(self.health, doubts=frozenset())  # its next question comes at once, not after an interval
        if opener:
            loop = asyncio.get_running_loop()
            monitor = Monitor(
                lambda: opener(config),
                uuids,
                lambda event: self._from_thread(loop, monitor, event),
                config.refresh_interval,
            )
            self._monitor = monitor
            monitor.start()
        if before:  # after the new one, so that none goes by; it may wait in NVML, and the loop has kubelets to answer
            threading.Thread(target=before.stop, name="health-stop", daemon=True).start()

    def _remember(self, folder: str) -> None:
        """Keep faults in this folder from now on, "" for nowhere. Those from before a restart are read at the start."""
        if folder == self._folder:
            return
        first, self._folder = self._folder is None, folder
        path = os.path.join(folder, "health.json")
        self._memory = Memory(path, boot_id()) if folder else None
        if not self._memory or not first:
            self._unsaved = True
            return
        try:
            self.health = self._memory.load()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            log.error("faults from before the restart can't be read in %s: %s%s", path, why, self._put_aside(error))
        for fault in self.health.faults:
            log.warning("GPU %s is still unhealthy from before the restart: %s%s",
                        fault.uuid, fault.reason, self._remedy(fault.uuid))  # fmt: skip

    def _remedy(self, uuid: str) -> str:
        """Until when a GPU is unhealthy, as the end of a line: a restart, which people try first, doesn't help."""
        if not any(fault.uuid == uuid and fault.xid for fault in self.health.faults):
            return "; until it answers"
        ways = ["its recovery action, once the driver asks for one, is none again", "the node has rebooted"]
        if self.recovery.get(uuid) == -1:
            del ways[0]  # this driver never asks
        if self._folder:
            ways.append(f"somebody makes the file {os.path.join(self._folder, WELL, uuid)}")
        return f"; until {' or '.join(ways)}"

    def _put_aside(self, error: Exception) -> str:
        """Keep a file that isn't ours from being replaced by the next fault; what was done, for people."""
        if not self._memory or isinstance(error, OSError):
            return ""
        try:
            return f"; it is kept as {self._memory.put_aside()}"
        except (OSError, ValueError) as failure:
            return f"; it can't be put aside: {failure}"

    def stand_aside(self, yes: bool) -> None:
        """Whether another process serves in our stead: then the folder, with the operator's word in it, is that one's.
        Whoever serves again goes on from what the other kept."""
        if yes == self.aside:
            return
        self.aside = yes
        if yes or not self._memory:
            return
        before = self.health
        try:
            self.health = self._memory.joined(before)
        except (OSError, ValueError) as error:
            path, kept = self._memory.path, self._put_aside(error)
            log.error("faults that the other plugin kept can't be read in %s: %s%s", path, error, kept)
        self._unsaved = True
        if self.health != before:
            self._changed()

    def keep(self) -> None:
        """Save the faults, where they have changed since they were saved; what fails is tried again the next time."""
        if not self._memory or not self._unsaved or self.aside:
            return
        try:
            self._memory.save(self.health)
        except (OSError, ValueError) as error:
            trouble = f"{self._memory.path}: {error.strerror if isinstance(error, OSError) else error}"
            if trouble != self._trouble:
                log.error("faults can't be kept in %s; trying again, said once", trouble)
            self._trouble = trouble
            return
        self._unsaved = False
        if self._trouble:
            self._trouble = ""
            log.info("faults are kept in %s again", self._memory.path)

    def _from_thread(self, loop: asyncio.AbstractEventLoop, monitor: Monitor, event: Event) -> None:
        try:
            loop.call_soon_threadsafe(self._from_monitor, monitor, event)
        except RuntimeError:
            pass  # the loop has just been closed: nobody listens any more

    def _from_monitor(self, monitor: Monitor, event: Event) -> None:
        if monitor is not self._monitor and not isinstance(event, XidSeen):
            return  # what one that is on its way out thinks of NVML or of a GPU, nobody would take back
        if not isinstance(event, NvmlState) or not event.problem:  # that health can't be checked is no check
            self.heard = time.time()
        self.hear(event)

    def hear(self, event: Event) -> None:
        """Take an event in."""
        before = self.health
        self.health, notices = step(before, event, self.policy, time.time())
        if isinstance(event, XidSeen):
            self._told(event)
        if isinstance(event, Answer) and not event.silence:
            self.recovery[event.uuid] = event.recovery
        for notice in notices:
            if not (isinstance(event, NvmlState) and event.user == "facts" and event.problem):  # the look has told that
                remedy = self._remedy(notice.uuid) if notice.kind == "GPUUnhealthy" else ""
                log.log(logging.INFO if notice.kind.endswith("Recovered") else logging.ERROR,
                        "%s: %s%s", f"{notice.kind} {notice.uuid}".rstrip(), notice.text, remedy)  # fmt: skip
            self._told(notice)
        if self.health != before and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._flush, before)

    def _flush(self, before: Health) -> None:
        self._scheduled = False
        self._changed()  # first: neither a disk that fails nor one that is slow may keep a fault from the kubelet
        if self.health.faults != before.faults:
            self._unsaved = True
            asyncio.get_running_loop().call_soon(self.keep)

    def take_acknowledgements(self, config: Config) -> None:
        """The operator's word: each file STATE_DIR/well/<GPU's UUID> clears that GPU's faults, and is removed."""
        folder = os.path.join(config.state_dir, WELL)
        if self.aside or not config.state_dir or not os.path.isdir(folder):
            return
        for uuid in sorted(os.listdir(folder)):
            try:
                os.unlink(os.path.join(folder, uuid))  # first: what can't be removed would count again at each look
            except OSError as error:
                if uuid not in self._stuck:
                    log.error("%s/%s can't be removed and doesn't count: %s", folder, uuid, error.strerror)
                self._stuck.add(uuid)
                continue
            known = any(fault.uuid == uuid for fault in self.health.faults)
            log.info("the operator says that %s is well%s", uuid, "" if known else ", which had no fault")
            self.hear(Acknowledged(uuid))

    def stop(self) -> None:
        """End the watch."""
        monitor, self._monitor = self._monitor, None
        self._watched = None
        if monitor:
            monitor.stop()
