"""The program mps-control-daemon: keeps one MPS control daemon running for each resource that is shared through MPS.

A program apart from the plugin, since an MPS control daemon must outlive a restart of the plugin: its end is the end
of every process that computes through it. Layout of the MPS folder, as the peer's containers know it:

    <resource>/pipe, <resource>/log    what the control daemon and its clients share
    <resource>/.started, .ready        there while the daemon, all daemons are up
    shm                                the clients' /dev/shm
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpulet import linux
from gpulet.errors import GpuletError, NodeError, UsageError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin import mps
from gpulet.plugin.config import Config
from gpulet.plugin.generation import with_lost
from gpulet.plugin.resources import Resource, inventory

log = logging.getLogger(__name__)

PROGRAM = "mps-control-daemon"
TIMEOUT = 30.0  # seconds for any one process that we start: a hung one must not stop the others
SELINUX, LABEL = "/sys/fs/selinux", b"system_u:object_r:container_file_t:s0\0"  # containers may use the pipe


@dataclass(frozen=True, slots=True)
class Plan:
    """What one resource's control daemon is to be. uuids: its GPUs; commands: what it is told once it runs."""

    resource: str
    uuids: tuple[str, ...]
    commands: tuple[str, ...]


def plan(resource: Resource) -> Plan:
    """The plan for a shared resource.

    Each replica may pin its part of a GPU's memory, in whole MiB, and use its part of the threads, in whole percent.
    The memory's limit goes by index: by UUID the control daemon takes it and doesn't apply it.
    """
    gpus = {device.base: device for device in resource.devices}
    commands = [
        f"set_default_device_pinned_mem_limit {device.index} {(device.memory // device.replicas) >> 20}M"
        for device in gpus.values()
        if device.memory
    ]
    commands.append(f"set_default_active_thread_percentage {100 * len(gpus) // len(resource.devices)}")
    return Plan(resource.name, tuple(gpus), tuple(commands))


class Control:
    """One resource's control daemon."""

    def __init__(self, plan: Plan, config: Config) -> None:
        self.plan, self.config = plan, config
        self.environ = mps.environment(plan.resource, config)
        self.pipe = self.environ["CUDA_MPS_PIPE_DIRECTORY"]
        self.log = self.environ["CUDA_MPS_LOG_DIRECTORY"]
        self.started = os.path.join(os.path.dirname(self.pipe), ".started")
        self._read = 0  # how much of control.log has been passed on

    def start(self) -> None:
        """Run it, unless it already does, and set the limits. Raises NodeError."""
        self._compute_mode("EXCLUSIVE_PROCESS")
        for folder in (self.pipe, self.log):
            os.makedirs(folder, 0o755, exist_ok=True)
        if os.path.isdir(SELINUX):
            os.setxattr(self.pipe, "security.selinux", LABEL)
        if self.problem():
            self._run(mps.PROGRAM, "-d")
        for command in self.plan.commands:
            self._run(mps.PROGRAM, told=command)
        with open(self.started, "w", encoding="ascii"):
            pass
        log.info("MPS daemon of %s runs: %s", self.plan.resource, "; ".join(self.plan.commands))

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
        for step in (lambda: self._run(mps.PROGRAM, told="quit"), lambda: self._compute_mode("DEFAULT")):
            try:
                step()
            except NodeError as error:
                log.warning("%s", error)
        for path in (self.started, os.path.join(self.pipe, "control")):
            _remove(path)
        self.pass_on_log()
        shutil.rmtree(self.log, ignore_errors=True)

    def pass_on_log(self) -> None:
        """What the daemon has written since the last time, into our log."""
        try:
            with open(os.path.join(self.log, "control.log"), encoding="utf-8", errors="replace") as stream:
                stream.seek(self._read)
                for line in stream.read().splitlines():
                    log.info("%s: %s", self.plan.resource, line)
                self._read = stream.tell()
        except OSError:
            pass  # nothing written yet

    def _compute_mode(self, mode: str) -> None:
        for uuid in self.plan.uuids:
            self._run("nvidia-smi", "-i", uuid, "-c", mode)

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


class Service:
    """Keeps the control daemons as the configuration and the node want them."""

    def __init__(self, load: Callable[[], Config], look: Callable[[Config], NodeFacts]) -> None:
        self._load, self._look = load, look
        self.controls: dict[str, Control] = {}
        self._ready = ""
        self._facts: NodeFacts | None = None

    def follow(self) -> None:
        """One look at everything. Raises GpuletError, for a configuration or node that can't be used; what runs goes
        on running."""
        config = self._load()
        wanted = self._plans(config)
        for name, control in list(self.controls.items()):
            if wanted.get(name) != control.plan or mps.environment(name, config) != control.environ:
                self.controls.pop(name).stop()
        self._ready = os.path.join(mps.folder(config), ".ready")
        problems: list[GpuletError | OSError] = []
        for name, new in wanted.items():
            try:
                self._keep(name, new, config)
            except (NodeError, OSError) as error:  # the others' clients have nothing to do with it
                problems.append(error)
        if problems:
            _remove(self._ready)
            for problem in problems[1:]:
                log.error("%s", problem)
            raise problems[0]
        if os.path.isdir(os.path.dirname(self._ready)):
            with open(self._ready, "w", encoding="ascii"):
                pass

    def _plans(self, config: Config) -> Mapping[str, Plan]:
        if not config.mps_active:
            return {}
        # a lost GPU stays in its plan: another plan means an end of the daemon, and of its clients on all other GPUs
        self._facts = with_lost(self._look(config), self._facts)
        offered = inventory(self._facts, config)
        mps.check(offered.resources)
        return {one.name: plan(one) for one in offered.resources if mps.shared(one, config)}

    def _keep(self, name: str, new: Plan, config: Config) -> None:
        control = self.controls.get(name)
        if control is None:
            control = Control(new, config)
            control.start()
            self.controls[name] = control
        elif problem := control.problem():
            log.error("the MPS daemon of %s has died, starting it again: %s", name, problem)
            _remove(control.started)
            control.start()
        control.pass_on_log()

    def stop(self) -> None:
        """End all of them."""
        if self._ready:
            _remove(self._ready)
        for name in list(self.controls):
            self.controls.pop(name).stop()


def mount_shm(root: str, total_kib: int) -> None:
    """Mount the clients' shared memory, half of the machine's, on <root>/shm. Raises OSError."""
    target = os.path.join(root, "shm")
    os.makedirs(target, 0o755, exist_ok=True)
    if os.path.ismount(target):
        linux.umount2(target)
    size = f"{total_kib // 2}k" if total_kib else "65536k"
    linux.mount("shm", target, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, f"size={size}")


def memory_kib(path: str = "/proc/meminfo") -> int:
    """The machine's memory, 0 where it can't be told."""
    try:
        with open(path, encoding="ascii") as stream:
            return next(int(line.split()[1]) for line in stream if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return 0


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


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
        log.info("nothing is shared through MPS: waiting for a configuration that does")
    service = Service(load, look)
    try:
        while not stop.is_set():
            wake.clear()
            try:
                service.follow()
            except (GpuletError, OSError) as error:
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
