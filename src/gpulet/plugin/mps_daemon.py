"""The program mps-control-daemon: keeps one MPS control daemon running for each resource that is shared through MPS.

A program apart from the plugin, since an MPS control daemon must outlive a restart of the plugin: its end is the end
of every process that computes through it. Layout of the MPS folder, as the peer's containers know it:

    <resource>/pipe, <resource>/log    what the control daemon and its clients share
    <resource>/.started, .ready        there while the daemon, all daemons are up (ours: with what it was told)
    <resource>/.held                   (ours) the GPUs that are to be given back to everybody
    shm                                the clients' /dev/shm
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait

from gpulet import mount_api
from gpulet.errors import GpuletError, NodeError, UsageError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin import aside, mps
from gpulet.plugin.config import Config
from gpulet.plugin.generation import with_lost
from gpulet.plugin.mps_control import Control, Plan, plan, remove
from gpulet.plugin.mps_process import Ended
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import PREFIX

log = logging.getLogger(__name__)

PROGRAM = "mps-control-daemon"
TICK = 0.2  # seconds between looks whether we are to end, while something is waited for
Key = tuple[str, str]  # a resource and the MPS folder that its control daemon is in


class Service:
    """Keeps the control daemons as the configuration and the node want them. stop: set once that is to end."""

    def __init__(
        self,
        load: Callable[[], Config],
        look: Callable[[Config], NodeFacts],
        stop: threading.Event | None = None,
    ) -> None:
        self._load, self._look = load, look
        self._stop = stop or threading.Event()
        self.controls: dict[Key, Control] = {}
        self._ends: dict[Key, Future[bool]] = {}  # those under way
        self._spared: set[str] = set()  # GPUs that nobody is to give back
        self._ready = ""
        self._looked: NodeFacts | None = None  # None where MPS isn't wanted: nobody has looked
        self._facts: NodeFacts | None = None  # the same with lost GPUs as they were
        self._lost: frozenset[str] = frozenset()

    def follow(self) -> None:
        """One look at everything. Raises GpuletError, for a configuration or node that can't be used; what runs goes
        on running."""
        config = self._load()
        root = mps.folder(config)
        wanted = {(name, root): new for name, new in self._plans(config).items()}
        gpus = {uuid for new in wanted.values() for uuid in new.uuids}
        for name in left_behind(root):
            if (name, root) not in wanted and (name, root) not in self.controls:
                self.controls[name, root] = self._leftover(name, config, gpus)
        # what NVML says nothing of now may be well, and a running daemon's
        self._spared = gpus | {uuid for control in self.controls.values() for uuid in self._unseen(control)}
        self._end(
            [key for key, one in self.controls.items() if not self._goes_on(one, wanted.get(key), config, gpus)],
            replaced=wanted,
        )
        if self._ready and self._ready != os.path.join(root, ".ready"):
            remove(self._ready)
        self._ready = os.path.join(root, ".ready")
        problems: list[GpuletError | OSError] = []
        for key, new in wanted.items():
            try:
                self._keep(key, new, config)
            except (NodeError, OSError) as error:  # the others' clients have nothing to do with it
                problems.append(error)
        owners = {uuid: key for key, new in wanted.items() for uuid in self.controls[key].held if uuid in new.uuids}
        for key, control in self.controls.items():
            control.leave({uuid for uuid, owner in owners.items() if owner != key})
        if problems:
            remove(self._ready)
            for problem in problems[1:]:
                log.error("%s", problem)
            raise problems[0]
        if os.path.isdir(os.path.dirname(self._ready)):
            with open(self._ready, "w", encoding="ascii"):
                pass

    def _plans(self, config: Config) -> Mapping[str, Plan]:
        self._looked = None
        if not config.mps_active:
            return {}
        # a lost GPU stays in its plan: another plan means an end of the daemon, and of its clients on all other GPUs
        self._looked = looked = self._ask(config)
        self._facts = with_lost(looked, self._facts)
        self._lost = frozenset(gpu.uuid for gpu in self._facts.gpus) - {gpu.uuid for gpu in looked.gpus}
        offered = inventory(self._facts, config)
        mps.check(offered.resources)
        return {one.name: plan(one) for one in offered.resources if mps.shared(one, config)}

    def _leftover(self, name: str, config: Config, gpus: set[str]) -> Control:
        """What an earlier run left of a resource that isn't wanted, or not yet."""
        control = Control(Plan(name), config, self._stop)
        which = ", ".join(control.held) or (
            "which GPUs it had isn't known: set those that are still exclusive back with nvidia-smi -i GPU -c DEFAULT"
        )
        way = "leaving it until all its GPUs answer" if self._may_return(control, config, gpus) else "ending it"
        log.warning("an earlier run left the MPS daemon of %s behind, %s: %s", name, way, which)
        return control

    def _goes_on(self, control: Control, new: Plan | None, config: Config, gpus: set[str]) -> bool:
        """Whether it has no end now. new: what it is to be; gpus: as for _may_return."""
        if control.environ != mps.environment(control.plan.resource, config):
            return False
        return control.take(new) if new else self._may_return(control, config, gpus)

    def _may_return(self, control: Control, config: Config, gpus: set[str]) -> bool:
        """Whether a leftover may be wanted once all GPUs answer: an end would be the end of its clients. gpus: those
        that others are to have now."""
        if control.plan.uuids or self._looked is None or config.sharing is None or not gpus.isdisjoint(control.held):
            return False
        named = control.plan.resource in {item.rename or item.name for item in config.sharing.resources}
        return named and bool(self._unseen(control) if control.held else self._looked.lost)

    def _unseen(self, control: Control) -> set[str]:
        """The GPUs that it holds and that don't answer now."""
        return set() if self._looked is None else {*control.held} - {gpu.uuid for gpu in self._looked.gpus}

    def _end(self, keys: Iterable[Key], replaced: Container[Key]) -> None:
        """End these, at the same time. One that still holds something stays for the next look, unless it is replaced by
        one that reads what it has noted. Raises Ended where we are to end meanwhile: stop waits for them then."""
        self._ends = {key: aside.begin(self.controls[key].stop, self._spared) for key in keys}
        while wait(self._ends.values(), TICK).not_done:
            if self._stop.is_set():
                raise Ended("ended before the MPS daemons that aren't wanted any more")
        for key, end in self._ends.items():
            if end.result() or key in replaced:
                del self.controls[key]
        self._ends = {}

    def _ask(self, config: Config) -> NodeFacts:
        """What the node has. Raises NodeError, or Ended where we are to end before it has answered."""
        answer, told = aside.begin(self._look, config), False
        began = time.monotonic()
        while not self._stop.is_set():
            try:
                return answer.result(TICK)
            except TimeoutError:
                if answer.done():
                    raise  # the look's own
            if not told and time.monotonic() - began >= aside.PATIENCE:
                told = True
                log.error("%s: waiting for it", aside.Unanswered())
        raise Ended("ended before the node has answered")

    def _keep(self, key: Key, new: Plan, config: Config) -> None:
        control = self.controls.get(key)
        if control is None:  # known before it is started: what a start leaves half done has to be ended too
            control = self.controls[key] = Control(new, config, self._stop)
            self._spared |= self._unseen(control)
        elif control.up and (problem := control.problem()):
            log.error("the MPS daemon of %s has died, starting it again: %s", new.resource, problem)
            control.fell()
        if control.up:
            control.catch_up(self._lost, self._spared)
        else:
            control.start(self._lost, self._spared)
        control.pass_on_log()

    def stop(self) -> None:
        """End all of them, at the same time: a Pod's end has its limit."""
        if self._ready:
            remove(self._ready)
        self._spared.clear()  # also for the ends under way
        ends = {key: aside.begin(self._finish, key) for key in self.controls}
        for (name, _), end in ends.items():
            if error := end.exception():
                log.error("the end of the MPS daemon of %s failed", name, exc_info=error)
        self.controls.clear()

    def _finish(self, key: Key) -> None:
        """The last end of one. Of one under way, what that hasn't tried: what has just hung would hang again."""
        control, under_way = self.controls[key], self._ends.get(key)
        if under_way is None or under_way.exception():
            control.stop()
        elif not under_way.result():
            control.stop(control.kept)


def left_behind(root: str) -> list[str]:
    """The resources in an MPS folder that have a control daemon, or GPUs that aren't everybody's. Only what is in the
    places that this program gives them counts: other daemons are other people's."""
    try:
        names = sorted(os.listdir(os.path.join(root, PREFIX))) if root else []
    except OSError:
        return []
    signs = (mps.HELD, os.path.join("pipe", mps.CONTROL))
    return [
        f"{PREFIX}{name}"
        for name in names
        if any(os.path.exists(os.path.join(root, PREFIX, name, sign)) for sign in signs)
    ]


def mount_shm(root: str, total_kib: int) -> None:
    """Mount the clients' shared memory, half of the machine's, on <root>/shm. Raises OSError."""
    target = os.path.join(root, "shm")
    os.makedirs(target, 0o755, exist_ok=True)
    if os.path.ismount(target):
        mount_api.umount2(target)
    size = f"{total_kib // 2}k" if total_kib else "65536k"
    mount_api.mount(
        "shm", target, "tmpfs", mount_api.MS_NOSUID | mount_api.MS_NODEV | mount_api.MS_NOEXEC, f"size={size}"
    )


def memory_kib(path: str = "/proc/meminfo") -> int:
    """The machine's memory, 0 where it can't be told."""
    try:
        with open(path, encoding="ascii") as stream:
            return next(int(line.split()[1]) for line in stream if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return 0


def run(words: Sequence[str], load: Callable[[], Config], look: Callable[[Config], NodeFacts]) -> int:
    """Until a signal: 0. `mount-shm` as first word does that alone. Raises GpuletError where the start fails."""
    if words[:1] == ["mount-shm"]:
        if len(words) > 1:
            raise UsageError("mount-shm takes no arguments", seen=words[1])
        mount_shm(mps.folder(load()), memory_kib())
        return 0
    stop, wake = threading.Event(), threading.Event()

    def ended(number: int, frame: object) -> None:
        stop.set()
        wake.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, ended)
    signal.signal(signal.SIGHUP, lambda number, frame: wake.set())
    config = load()  # one that can't be used ends the program at once, later the last one stays in force
    if not config.mps_active:
        unknown = "" if mps.folder(config) else "; what an earlier run may have left can't be looked for: no --mps-root"
        log.info("nothing is shared through MPS: waiting for a configuration that does%s", unknown)
    service = Service(load, look, stop)
    try:
        while not stop.is_set():
            wake.clear()
            try:
                service.follow()
            except (GpuletError, OSError) as error:
                if not stop.is_set():
                    log.error("%s; trying again", error)
            except Exception:  # an end would be the end of everything that computes through MPS
                log.exception("a look at the node failed; trying again")
            wake.wait(config.refresh_interval)
    finally:
        service.stop()
    return 0


if __name__ == "__main__":
    from gpulet.plugin.main import main

    sys.exit(main([PROGRAM, *sys.argv[1:]]))
