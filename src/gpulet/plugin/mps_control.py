"""One MPS control daemon: what it is to be, how it is started, told its limits, asked and ended. For mps_daemon.py.

Whatever has been begun can be undone, by us or by the next run after us: a GPU is noted in a file before it is taken
from everybody, and the note goes when it has been given back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Container, Iterable
from dataclasses import dataclass

from gpulet.errors import GpuletError, NodeError
from gpulet.plugin import aside, files, mps
from gpulet.plugin.config import Config
from gpulet.plugin.mps_process import Ended, run
from gpulet.plugin.resources import Resource

log = logging.getLogger(__name__)

SMI = "nvidia-smi"
SELINUX, LABEL = "/sys/fs/selinux", b"system_u:object_r:container_file_t:s0\0"  # containers may use the pipe


@dataclass(frozen=True, slots=True)
class Plan:
    """What one resource's control daemon is to be, by default nothing any more. uuids: its GPUs; limits: what it is
    told of each of them, "" for nothing; threads: of all."""

    resource: str
    uuids: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    threads: str = ""

    @property
    def commands(self) -> tuple[str, ...]:
        """All that it is told once it runs."""
        return *filter(None, self.limits), self.threads

    @property
    def told(self) -> str:
        """The same as .started has it."""
        return "\n".join(self.commands)


def plan(resource: Resource) -> Plan:
    """The plan for a resource of which all devices, or some, are shared.

    Each replica may pin its part of a GPU's memory, in whole MiB, and use its part of the threads, in whole percent.
    The memory's limit goes by index: by UUID the control daemon takes it and doesn't apply it.
    """
    replicas = [device for device in resource.devices if device.replicas]
    gpus = {device.base: device for device in replicas}
    limits = tuple(
        f"set_default_device_pinned_mem_limit {device.index} {(device.memory // device.replicas) >> 20}M"
        if device.memory
        else ""
        for device in gpus.values()
    )
    threads = f"set_default_active_thread_percentage {100 * len(gpus) // len(replicas)}"
    return Plan(resource.name, tuple(gpus), limits, threads)


class Control:
    """One resource's control daemon. ending: set once we are to end, which gives up whatever doesn't belong to that.

    up: whether it has been started and told everything; held: the GPUs that are, or may be, not everybody's; kept:
    those that couldn't be given back the last time, and why.
    """

    def __init__(self, plan: Plan, config: Config, ending: threading.Event | None = None) -> None:
        self.plan, self.config = plan, config
        self.environ = mps.environment(plan.resource, config)
        self.pipe = self.environ["CUDA_MPS_PIPE_DIRECTORY"]
        self.log = self.environ["CUDA_MPS_LOG_DIRECTORY"]
        self.control = os.path.join(self.pipe, mps.CONTROL)  # the daemon makes it first of all
        self.started = mps.started(plan.resource, config)
        self.note = os.path.join(os.path.dirname(self.pipe), mps.HELD)
        self.up = False
        self.held: tuple[str, ...] = _noted(self.note)
        self.kept: dict[str, str] = {}
        self._ending = ending or threading.Event()
        self._begun = False  # whether a daemon of ours may be there, be it without a control file yet
        self._read = 0  # how much of control.log has been passed on
        self._left: dict[str, str] = {}  # GPUs without their mode and limit yet, and why

    def take(self, new: Plan) -> bool:
        """Have this plan where that ends nobody: it differs only in what wasn't known, a GPU that the daemon had from
        an earlier run, or a limit. What is known now is set by catch_up, what isn't known any more stays."""
        mine = dict(zip(self.plan.uuids, self.plan.limits, strict=True))
        its = dict(zip(new.uuids, new.limits, strict=True))
        if mine and (self.plan.threads != new.threads or not mine.keys() <= its.keys() <= {*mine, *self.held}):
            return False
        if any("" not in (limit, its[uuid]) and limit != its[uuid] for uuid, limit in mine.items()):
            return False
        both = {uuid: limit or mine.get(uuid, "") for uuid, limit in its.items()}
        for uuid, limit in both.items():
            if limit != mine.get(uuid):
                self._left.setdefault(uuid, "")
        self.plan = Plan(new.resource, tuple(both), tuple(both.values()), new.threads)
        return True

    def start(self, lost: Container[str], spared: Container[str]) -> None:
        """Run it, unless it already does, and set the limits. A GPU that is lost, or for which its mode can't be set,
        is left for later: the others' clients have nothing to do with it. spared: GPUs that aren't to be given back,
        its own among them. Raises NodeError, OSError, Ended; what has been done until then is for another start or for
        stop."""
        for name in (mps.PROGRAM, SMI):  # before any GPU is taken from everybody
            self._program(name)
        self._left = {}
        self._release(spared)  # what another plan, of an earlier run, had
        self._claim(self.plan.uuids, lost)
        for folder in (self.pipe, self.log):
            os.makedirs(folder, 0o755, exist_ok=True)
        if os.path.isdir(SELINUX):
            os.setxattr(self.pipe, "security.selinux", LABEL)
        problem = self.problem()
        if problem or _text(self.started) != self.plan.told:  # else its clients may go on: it has these limits
            remove(self.started)
        if problem:
            self._begun = True
            self._run(mps.PROGRAM, "-d")
        self._limit(self.plan.uuids)
        self._run(mps.PROGRAM, told=self.plan.threads)
        self._mark()
        self.up = True
        log.info("MPS daemon of %s runs: %s", self.plan.resource, "; ".join(self.plan.commands))

    def fell(self) -> None:
        """It has died: nobody may count on it until it is started again."""
        self.up = False
        remove(self.started)

    def catch_up(self, lost: Container[str], spared: Container[str]) -> None:
        """Set what was left for later, for GPUs that have come back. As start, it raises NodeError, OSError, Ended."""
        self._release(spared)
        back = [uuid for uuid in self._left if uuid not in lost]
        if back:
            self._claim(back, lost)
            self._limit(back)
            self._mark()

    def leave(self, uuids: Container[str]) -> None:
        """GPUs that another daemon has noted as its own: they are for that one to give back."""
        self._note(uuid for uuid in self.held if uuid not in uuids)

    def _mark(self) -> None:
        """Say that it has its limits, and which. Raises OSError."""
        with open(self.started, "w", encoding="ascii") as stream:
            stream.write(self.plan.told)

    def _claim(self, uuids: Iterable[str], lost: Container[str]) -> None:
        """Have these GPUs for the daemon alone, and know which are left. Raises NodeError where none can be had, and
        OSError, Ended."""
        problems = {}
        self._hold((*self.held, *(uuid for uuid in uuids if uuid not in lost)))
        for uuid in uuids:
            problem: GpuletError | None = None
            if uuid in lost:
                problem = NodeError(f"GPU {uuid} doesn't answer")
            else:
                try:
                    self._run(SMI, "-i", uuid, "-c", "EXCLUSIVE_PROCESS")
                except NodeError as error:
                    problem = error
            if problem:
                problems[uuid] = problem
            else:
                self._left.pop(uuid, None)
        if len(problems) == len(self.plan.uuids):
            raise next(iter(problems.values()))
        for uuid, problem in problems.items():
            if self._left.get(uuid) != str(problem):
                log.warning("MPS daemon of %s: without one GPU for now: %s", self.plan.resource, problem)
            self._left[uuid] = str(problem)

    def _limit(self, uuids: Iterable[str]) -> None:
        """Tell the daemon the limits of those of these GPUs that it has. Raises NodeError, Ended."""
        limits = dict(zip(self.plan.uuids, self.plan.limits, strict=True))
        for uuid in uuids:
            if uuid not in self._left and limits[uuid]:
                try:
                    self._run(mps.PROGRAM, told=limits[uuid])
                except NodeError as error:
                    self._left[uuid] = str(error)  # so that it is told again
                    raise

    def problem(self) -> str:
        """ "" where the daemon answers, else why we think that it doesn't run. Raises Ended."""
        if not os.path.exists(self.control):
            return f"no control file in {self.pipe}"
        try:
            self._run(mps.PROGRAM, told=mps.QUESTION)
        except NodeError as error:
            return str(error)
        return ""

    def stop(self, wanted: Container[str] = ()) -> bool:
        """End it and give the GPUs back to everybody, but for those that are wanted for another one. Every step is
        tried, since the next ones still help. Returns whether it runs no more and holds nothing; else it may be called
        again. Raises Ended where it is to be called again for our own end."""
        self.fell()
        runs = False
        if self._begun or os.path.exists(self.control):
            try:
                self._run(mps.PROGRAM, told="quit", last=True)
            except NodeError as error:
                log.warning("%s", error)
                runs = not self._ending.is_set() and not self.problem()  # it may have been dead before
            if not runs:
                remove(self.control)
                self._begun = False
        self._release(wanted, last=True)
        self.pass_on_log()
        if not runs:
            shutil.rmtree(self.log, ignore_errors=True)
        return not runs and not self.held

    def _release(self, wanted: Container[str], *, last: bool = False) -> None:
        """Give GPUs back, all at once: one that hangs isn't to take the others' time. What fails is told once. last: it
        belongs to the end. Raises Ended where it doesn't."""
        done = {
            uuid: aside.begin(self._run, SMI, "-i", uuid, "-c", "DEFAULT", last=last)
            for uuid in self.held
            if uuid not in wanted
        }
        errors = {uuid: error for uuid, promise in done.items() if (error := promise.exception())}
        self._note(uuid for uuid in self.held if uuid not in done or uuid in errors)
        for uuid, error in errors.items():
            if isinstance(error, Ended):
                raise error
            if self.kept.get(uuid) != str(error):
                log.warning("GPU %s isn't everybody's again: %s", uuid, error)
        self.kept = {uuid: str(error) for uuid, error in errors.items()}

    def _note(self, held: Iterable[str]) -> None:
        """_hold where what is given up can't be noted: it is noted as held, and given back once more."""
        try:
            self._hold(held)
        except OSError as error:
            log.warning("%s can't be written: %s", self.note, error.strerror)

    def _hold(self, uuids: Iterable[str]) -> None:
        """Have this as the GPUs that aren't everybody's, and note it for the run after us. Raises OSError."""
        held = tuple(dict.fromkeys(uuids))
        if held == self.held:
            return
        if held:
            os.makedirs(os.path.dirname(self.note), 0o755, exist_ok=True)
            with open(f"{self.note}.new", "w", encoding="utf-8") as stream:
                stream.write("".join(f"{uuid}\n" for uuid in held))
            os.replace(f"{self.note}.new", self.note)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.note)
        self.held = held

    def pass_on_log(self) -> None:
        """What the daemon has written since the last time, into our log."""
        try:
            with open(os.path.join(self.log, "control.log"), encoding="utf-8", errors="replace") as stream:
                stream.seek(self._read)
                for line in stream.read().splitlines():
                    level = logging.DEBUG if mps.QUESTION in line else logging.INFO  # we ask at each look
                    log.log(level, "%s: %s", self.plan.resource, line)
                self._read = stream.tell()
        except OSError:
            pass  # nothing written yet

    def _program(self, name: str) -> str:
        program, where = mps.find_program(name, self.config)
        if program is None:
            raise NodeError(f"{name} is neither in {where}", remedy="look at --driver-root")
        return program

    def _run(self, name: str, *words: str, told: str = "", last: bool = False) -> None:
        """Run a program to its end. last: it belongs to our own end. Raises NodeError; Ended where it doesn't."""
        about = f"{name} {' '.join(words) or repr(told)} of {self.plan.resource}"
        run([self._program(name), *words], about, self.environ, told, self._ending, last=last)


def _noted(path: str) -> tuple[str, ...]:
    """The GPUs that an earlier run noted and didn't give back."""
    return tuple(_text(path).split())


def _text(path: str) -> str:
    """A file's text, "" where it can't be read."""
    try:
        return files.read(path)
    except (OSError, ValueError):
        return ""


def remove(path: str) -> None:
    """A file, where it is there and can be removed."""
    try:
        os.unlink(path)
    except OSError:
        pass
