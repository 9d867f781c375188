"""gpulet-prefork: keeps workers ready, so that starting a container doesn't wait for an interpreter to start.

    gpulet-prefork [--workers N]

Each worker (worker.py) serves one container and is then replaced. Nothing depends on this program: where it doesn't
run, or no worker is free, the launcher starts Python as ever, and what kills this program ends the idle workers too.
A worker is a copy of this process, which has loaded everything and does nothing else. Ends on SIGTERM and SIGINT.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import time

from gpulet import linux
from gpulet.errors import ConfigError, GpuletError, UsageError
from gpulet.launch import worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

WORKERS, MOST_WORKERS = 4, 64
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
ENDS = HEARD[:2]
LOOK_EVERY = 5.0  # seconds
SILENCE = 10.0  # seconds after which a shell that took a worker won't ask any more
PATIENCE = 120.0  # seconds for one container, as many as a kubelet waits; then its shell does the work
GRACE = 10.0  # seconds for what is under way when this program ends
REST = 1.0  # seconds before the next try where workers can't be made


def main(folder: str, argv: Sequence[str] | None = None) -> int:
    """Runs the program. folder: where the launchers of this installation look for workers, "" where they don't."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whatever whoever starts us does with it
    try:
        count = _count(list(sys.argv[1:] if argv is None else argv))
        if count == 0:
            return 0
        if not folder:
            raise ConfigError("no launcher asks for workers here", seen="/bin/sh", wanted="dash or busybox there")
        if [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)] != [0, 1, 2]:
            raise ConfigError("standard input, output or error is closed", remedy="open it, if only to /dev/null")
        return Keeper(folder, count).run()
    except GpuletError as error:
        return _tell(str(error)) or error.exit_code
    except OSError as error:
        return _tell(str(error)) or 1


def _count(words: list[str]) -> int:
    """The number of workers, 0 where help was all that was wanted. Raises UsageError."""
    if words in (["--help"], ["-h"]):
        print(
            "usage: gpulet-prefork [--workers N]\n\nKeep N workers ready (default 4) that start GPU containers faster."
        )
        return 0
    if len(words) == 1 and words[0].startswith("--workers="):
        words = ["--workers", words[0].partition("=")[2]]
    if not words:
        return WORKERS
    if len(words) != 2 or words[0] != "--workers":
        raise UsageError("words", seen=" ".join(words), wanted="nothing, or --workers N")
    if not words[1].isascii() or not words[1].isdigit() or not 1 <= int(words[1]) <= MOST_WORKERS:
        raise UsageError("--workers", seen=words[1], wanted=f"a number from 1 to {MOST_WORKERS}")
    return int(words[1])


class Keeper:
    """Keeps `count` workers ready in a folder."""

    def __init__(self, folder: str, count: int) -> None:
        self.folder = folder
        self.count = count
        self._workers: dict[int, str] = {}  # process -> its folder's name
        self._told: set[str] = set()
        self._aspects = list(worker.Client("self").aspects)
        self._loaded: list[object] = []
        self._packs: list[Any] = []

    def run(self) -> int:
        """Until a signal ends it. Raises ConfigError."""
        self._prepare()
        launcher = _state(sys.argv[0])
        self._loaded, self._packs = load(), packs()
        if not self._is_current():
            raise ConfigError("gpulet has changed since its launchers were written", remedy="run: gpulet install")
        try:
            while _state(sys.argv[0]) == launcher and self._is_current():
                more = self._fill()
                heard = signal.sigtimedwait(HEARD, LOOK_EVERY if more else REST)
                if heard and heard.si_signo in ENDS:
                    return 0
                self._reap()
                self._end_slow()
        finally:
            self._end_all()
        if _state(sys.argv[0]) is None:
            raise ConfigError("this program is gone", seen=sys.argv[0], remedy="run: gpulet install")
        os.execv(sys.argv[0], sys.argv)

    def _prepare(self) -> None:
        """The folder, which is ours alone from now on. Raises ConfigError."""
        try:
            worker.check()
        except OSError as error:
            raise ConfigError(
                "this kernel can't do it", seen=f"pidfd_getfd: {error.strerror}", wanted="Linux 5.6"
            ) from None
        workers = os.path.dirname(self.folder)
        try:
            os.makedirs(os.path.dirname(workers), exist_ok=True)  # the state folder, whose other contents are no secret
            for path in (workers, self.folder):
                os.makedirs(path, 0o700, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"can't keep workers in {self.folder}", seen=error.strerror, remedy="become root"
            ) from error
        if not linux.lock(self._lock):
            raise ConfigError("workers are kept already", seen=self.folder, remedy="end the other gpulet-prefork first")

    def _is_current(self) -> bool:
        """Whether the folder is there, and our modules are still what was loaded."""
        return os.path.isdir(self.folder) and all(pack.unchanged() for pack in self._packs)

    def _fill(self) -> bool:
        """Makes as many workers as there should be; whether that could be done."""
        try:
            self._sweep()
            while len(self._workers) < self.count:
                self._start()
        except OSError as error:  # too many processes, a full disk
            self._tell_once(f"can't make workers: {error}; trying again")
            return False
        return True

    def _start(self) -> None:
        name = f"{time.time_ns():x}"  # never used again: a shell may be late
        os.mkdir(f"{self.folder}/.{name}", 0o700)
        for pipe in (worker.ASK, worker.ANSWER):
            os.mkfifo(f"{self.folder}/.{name}/{pipe}", 0o600)
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            self._workers[pid] = name
            return
        try:
            os.close(self._lock)  # the next keeper's, whatever a worker is still at when this one is killed
            linux.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
            own_pages(self._loaded)
            if os.getppid() == keeper:
                worker.serve(f"{self.folder}/.{name}", f"{self.folder}/{name}", self._packs)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)

    def _sweep(self) -> None:
        """Takes away what workers leave that ended, or that a killed keeper had."""
        alive = set(self._workers.values())
        for name in os.listdir(self.folder):
            if name.lstrip(".") not in alive:
                shutil.rmtree(f"{self.folder}/{name}", ignore_errors=True)

    def _reap(self) -> None:
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            self._workers.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if code == 1:
                time.sleep(REST)  # a fault of ours, told above: not as fast as can be
            elif 0 <= code - worker.UNLIKE < len(self._aspects):
                what = self._aspects[code - worker.UNLIKE]
                self._tell_once(
                    f"who calls gpulet-runtime differs from this program in its {what}: workers can't serve it"
                )

    def _end_slow(self) -> None:
        """Ends workers whose shell was killed before it asked, and those that take longer than anybody waits."""
        for pid, name in self._workers.items():
            try:
                taken = time.time() - os.stat(f"{self.folder}/{name}/{worker.TAKEN}").st_mtime
            except OSError:
                continue
            if taken > PATIENCE or (taken > SILENCE and os.path.exists(f"{self.folder}/{name}/{worker.ASK}")):
                os.kill(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Ends the idle workers, and those at work once that is done."""
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        late = time.monotonic() + GRACE
        while self._workers and time.monotonic() < late:
            self._reap()
            time.sleep(0.01)
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._workers.clear()
        if os.path.isdir(self.folder):
            self._sweep()

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _tell(text)


def load() -> list[object]:
    """Loads what a usual `create` does, once for all workers; every object that there is then."""
    from gpulet.injection import cdi_hooks, frozen, narrow, tally  # noqa: F401
    from gpulet.launch import aliases, beside, carry, legacy, log, plan, shortcut  # noqa: F401
    from gpulet.request import cuda  # noqa: F401

    linux.libc()
    gc.disable()
    loaded = gc.get_objects()
    gc.freeze()
    return loaded


def own_pages(objects: list[object]) -> None:
    """Has the memory that objects lie in be this process's own and no longer its parent's: now, not when every
    microsecond counts. Looking at one is enough, since that counts a reference in it."""
    for _ in objects:
        pass


def packs() -> list[Any]:
    """What our modules are loaded from (engines/packed.py), where the launcher has one."""
    return [one for one in sys.meta_path if hasattr(one, "unchanged")]


def _state(path: str) -> tuple[int, int] | None:
    """What tells one version of a file from another, None where there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


def _tell(text: str) -> int:
    print(f"gpulet-prefork: {text}", file=sys.stderr, flush=True)
    return 0
