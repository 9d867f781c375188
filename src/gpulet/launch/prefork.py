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

WORKERS, MOST_WORKERS = 4, 64
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
ENDS = HEARD[:2]
LOOK_EVERY = 5.0  # seconds
SILENCE = 10.0  # seconds after which a shell that took a worker won't ask any more
REST = 1.0  # seconds between workers where they fail


def main(folder: str, argv: Sequence[str] | None = None) -> int:
    """Runs the program. folder: where the launchers of this installation look for workers, "" where they
    don't."""
    try:
        count = _count(list(sys.argv[1:] if argv is None else argv))
        if count == 0:
            return 0
        if not folder:
            raise ConfigError("no launcher asks for workers here", seen="/bin/sh", wanted="dash or busybox there")
        return Keeper(folder, count).run()
    except GpuletError as error:
        print(f"gpulet-prefork: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"gpulet-prefork: {error}", file=sys.stderr)
        return 1


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
        self._workers: dict[int, str] = {}  # process -> its folder
        self._made = 0
        self._loaded: list[object] = []

    def run(self) -> int:
        """Until a signal ends it. Raises ConfigError."""
        self._prepare()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
        launcher = _state(sys.argv[0])
        self._loaded = load()
        if not worker.current():
            raise ConfigError("gpulet has changed since its launchers were written", remedy="run: gpulet install")
        try:
            while worker.current() and _state(sys.argv[0]) == launcher:
                while len(self._workers) < self.count:
                    self._start()
                heard = signal.sigtimedwait(HEARD, LOOK_EVERY)
                if heard and heard.si_signo in ENDS:
                    return 0
                self._reap()
                self._end_silent()
        finally:
            self._end_all()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        if _state(sys.argv[0]) is None:
            raise ConfigError("this program is gone", seen=sys.argv[0], remedy="run: gpulet install")
        os.execv(sys.argv[0], sys.argv)

    def _prepare(self) -> None:
        """The folder, which is ours alone from now on, without what a killed keeper left. Raises ConfigError."""
        try:
            worker.check()
        except OSError as error:
            raise ConfigError(
                "this kernel can't do it", seen=f"pidfd_getfd: {error.strerror}", wanted="Linux 5.6"
            ) from None
        try:
            os.makedirs(os.path.dirname(os.path.dirname(self.folder)), exist_ok=True)
            os.makedirs(os.path.dirname(self.folder), 0o700, exist_ok=True)
            os.makedirs(self.folder, 0o700, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"can't keep workers in {self.folder}", seen=error.strerror, remedy="become root"
            ) from error
        if not linux.lock(self._lock):
            raise ConfigError("workers are kept already", seen=self.folder, remedy="end the other gpulet-prefork first")
        for name in os.listdir(self.folder):
            shutil.rmtree(f"{self.folder}/{name}", ignore_errors=True)

    def _start(self) -> None:
        self._made += 1
        name = f"{os.getpid()}-{self._made}"
        hidden, published = f"{self.folder}/.{name}", f"{self.folder}/{name}"
        os.mkdir(hidden, 0o700)
        for pipe in (worker.ASK, worker.ANSWER):
            os.mkfifo(f"{hidden}/{pipe}", 0o600)
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            self._workers[pid] = published
            return
        try:
            os.close(self._lock)  # the next keeper's, whatever a worker is still at when this one is killed
            for (
                _
            ) in self._loaded:  # counts a reference to each, which makes its page this process's own: now, not later
                pass
            linux.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
            if os.getppid() == keeper:
                worker.serve(hidden, published)
        except BaseException:
            import traceback

            traceback.print_exc()
        os._exit(1)

    def _reap(self) -> None:
        """Takes away what ended workers leave."""
        failed = False
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            shutil.rmtree(self._workers.pop(pid), ignore_errors=True)
            failed |= status != 0
        if failed:
            time.sleep(REST)

    def _end_silent(self) -> None:
        """Ends workers whose shell took them and was killed before it asked."""
        for pid, folder in self._workers.items():
            try:
                taken = time.time() - os.stat(f"{folder}/{worker.TAKEN}").st_mtime
            except OSError:
                continue
            if taken > SILENCE:
                os.kill(pid, signal.SIGTERM)  # one that is at work doesn't mind

    def _end_all(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGTERM)
        for pid, folder in self._workers.items():
            os.waitpid(pid, 0)
            shutil.rmtree(folder, ignore_errors=True)


def _state(path: str) -> tuple[int, int] | None:
    """What tells one version of a file from another, None where there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns


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
