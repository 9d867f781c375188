"""One MPS control daemon: what it is to be, how it is started, told its limits, asked and ended. For mps_daemon.py."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from gpulet.errors import GpuletError, NodeError
from gpulet.plugin import mps
from gpulet.plugin.config import Config
from gpulet.plugin.resources import Resource

log = logging.getLogger(__name__)

TIMEOUT = 30.0  # seconds for any one process that we start: a hung one must not stop the others
SELINUX, LABEL = "/sys/fs/selinux", b"system_u:object_r:container_file_t:s0\0"  # containers may use the pipe


@dataclass(frozen=True, slots=True)
class Plan:
    """What one resource's control daemon is to be. uuids: its GPUs; limits: what it is told of each of them, "" for
    nothing; threads: of all."""

    resource: str
    uuids: tuple[str, ...]
    limits: tuple[str, ...]
    threads: str

    @property
    def commands(self) -> tuple[str, ...]:
        """All that it is told once it runs."""
        return *filter(None, self.limits), self.threads


def plan(resource: Resource) -> Plan:
    """The plan for a shared resource.

    Each replica may pin its part of a GPU's memory, in whole MiB, and use its part of the threads, in whole percent.
    The memory's limit goes by index: by UUID the control daemon takes it and doesn't apply it.
    """
    gpus = {device.base: device for device in resource.devices}
    limits = tuple(
        f"set_default_device_pinned_mem_limit {device.index} {(device.memory // device.replicas) >> 20}M"
        if device.memory
        else ""
        for device in gpus.values()
    )
    threads = f"set_default_active_thread_percentage {100 * len(gpus) // len(resource.devices)}"
    return Plan(resource.name, tuple(gpus), limits, threads)


class Control:
    """One resource's control daemon."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self.plan, self.config = plan, config
        self.environ = mps.environment(plan.resource, config)
        self.pipe = self.environ["CUDA_MPS_PIPE_DIRECTORY"]
        self.log = self.environ["CUDA_MPS_LOG_DIRECTORY"]
        self.started = os.path.join(os.path.dirname(self.pipe), ".started")
        self._read = 0  # how much of control.log has been passed on
        self._left: dict[str, str] = {}  # GPUs without their mode and limit yet, and why

    def start(self, lost: Container[str] = ()) -> None:
        """Run it, unless it already does, and set the limits. A GPU that is lost, or for which its mode can't be set,
        is left for later: the others' clients have nothing to do with it. Raises NodeError."""
        self._left = {}
        self._claim(self.plan.uuids, lost)
        for folder in (self.pipe, self.log):
            os.makedirs(folder, 0o755, exist_ok=True)
        if os.path.isdir(SELINUX):
            os.setxattr(self.pipe, "security.selinux", LABEL)
        if self.problem():
            self._run(mps.PROGRAM, "-d")
        for command in (*self._limits(self.plan.uuids), self.plan.threads):
            self._run(mps.PROGRAM, told=command)
        with open(self.started, "w", encoding="ascii"):
            pass
        log.info("MPS daemon of %s runs: %s", self.plan.resource, "; ".join(self.plan.commands))

    def catch_up(self, lost: Container[str]) -> None:
        """Set what was left for later, for GPUs that have come back. Raises NodeError."""
        back = [uuid for uuid in self._left if uuid not in lost]
        if back:
            self._claim(back, lost)
            for command in self._limits(back):
                self._run(mps.PROGRAM, told=command)

    def _claim(self, uuids: Iterable[str], lost: Container[str]) -> None:
        """Have these GPUs for the daemon alone, and know which are left. Raises NodeError where none can be had."""
        problems = {}
        for uuid in uuids:
            problem: GpuletError | None = None
            if uuid in lost:
                problem = NodeError(f"GPU {uuid} doesn't answer")
            else:
                try:
                    self._run("nvidia-smi", "-i", uuid, "-c", "EXCLUSIVE_PROCESS")
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

    def _limits(self, uuids: Iterable[str]) -> Iterator[str]:
        limits = dict(zip(self.plan.uuids, self.plan.limits, strict=True))
        return (limits[uuid] for uuid in uuids if uuid not in self._left and limits[uuid])

    def problem(self) -> str:
        """ "" where the daemon answers, else why we think that it doesn't run."""
        if not os.path.exists(os.path.join(self.pipe, "control")):  # the daemon makes it first of all
            return f"no control file in {self.pipe}"
        try:
            self._run(mps.PROGRAM, told=mps.QUESTION)
        except NodeError as error:
            return str(error)
        return ""

    def stop(self) -> None:
        """End it and give the GPUs back to everybody; goes on where a step fails, since the next ones still help."""
        calls = [
            (mps.PROGRAM, (), "quit"),
            *(("nvidia-smi", ("-i", uuid, "-c", "DEFAULT"), "") for uuid in self.plan.uuids),
        ]
        for name, words, told in calls:
            try:
                self._run(name, *words, told=told)
            except NodeError as error:
                log.warning("%s", error)
        for path in (self.started, os.path.join(self.pipe, "control")):
            remove(path)
        self.pass_on_log()
        shutil.rmtree(self.log, ignore_errors=True)

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

    def _run(self, name: str, *words: str, told: str = "") -> str:
        program, where = mps.find_program(name, self.config)
        if program is None:
            raise NodeError(f"{name} is neither in {where}", remedy="look at --driver-root")
        about = f"{name} {' '.join(words) or repr(told)}"
        try:
            done = subprocess.run(
                [program, *words], env=self.environ, input=told.encode(), capture_output=True, timeout=TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodeError(f"{about} of {self.plan.resource} failed", seen=error) from error
        if done.returncode:
            said = b" ".join((done.stderr or done.stdout).split()).decode(errors="replace")
            raise NodeError(f"{about} of {self.plan.resource} ended with {done.returncode}", seen=said or None)
        return done.stdout.decode(errors="replace")


def remove(path: str) -> None:
    """A file, where it is there and can be removed."""
    try:
        os.unlink(path)
    except OSError:
        pass
