"""A worker: an interpreter that has everything loaded for one `gpulet-runtime create`, and waits for that container.

Its folder holds two pipes. The launcher's shell (engines/launchers.py) takes a worker by making the file `taken` there,
which can be made once, with its own process's number; opens `answer` to read; writes a byte to `ask`, which is what
wakes the worker; and reads what to do:

    a path     become this low-level runtime, with the words that you were called with
    a number   exit with it: config.json is as it was, and why is said where you would have said it
    nothing    start Python, and do it all yourself

The worker alone can write into `answer`, so whatever kills it comes out as nothing, and a shell never waits for a dead
one; one that is stopped is killed in time by prefork.py. What the work depends on is taken from the shell's process:
its words, environment, folder, umask and standard error. A shell that isn't as the worker is in all that a container's
start can depend on gets no answer, and what kills the shell ends the work too.
"""

from __future__ import annotations

import os
import sys
import time
from _signal import SIGTERM, signal  # type: ignore[import-not-found]  # as in programs.py
from _thread import start_new_thread
from select import select

from gpulet import linux
from gpulet.codec import read_all
from gpulet.launch import programs, runtime, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

ASK, ANSWER, TAKEN = "ask", "answer", "taken"
ASKED, HELD = 7, 8  # the shell's descriptors of `ask` and `answer`
SYS_pidfd_getfd = 438  # on every architecture
EBADF = 9
UNLIKE = 16  # exit status, and after it: the shell differed in the first, second, ... of Client's aspects
ELF_MACHINE = slice(18, 20)  # e_machine, elf(5)


class Client:
    """What a process is like, as far as a container's start can depend on it. process: its number, or "self". Raises
    OSError."""

    def __init__(self, process: str) -> None:
        there = f"/proc/{process}"
        lines = _read(f"{there}/status").decode(errors="replace").splitlines()
        status = {name: value for name, _, value in (line.partition("\t") for line in lines)}
        root = os.stat(f"{there}/root")
        self.umask = int(status["Umask:"], 8)
        self.aspects = {
            "user": (status["Uid:"], status["Gid:"]),
            "capabilities": status["CapEff:"],
            "mount namespace": _namespace(there, "mnt"),
            "PID namespace": _namespace(there, "pid"),
            "user namespace": _namespace(there, "user"),
            "root": (root.st_dev, root.st_ino),
            "security module's label": _read(f"{there}/attr/current"),
        }


def serve(folder: str, published: str, packs: Sequence[Any]) -> NoReturn:
    """Waits for one shell, does its work, and ends. folder: with the pipes; published: the name that shells find it by,
    which it gets now; packs: what our modules were loaded from (engines/packed.py)."""
    os.environ.clear()
    own, folders = Client("self"), [pack.folders() for pack in packs]
    answer = os.open(f"{folder}/{ANSWER}", os.O_RDWR | os.O_CLOEXEC)
    ask = os.open(f"{folder}/{ASK}", os.O_RDWR | os.O_CLOEXEC)
    os.rename(folder, published)
    os.read(ask, 1)
    signal(SIGTERM, lambda number, frame: None)  # what has begun is brought to its end
    try:
        os.unlink(f"{published}/{ASK}")
        if [pack.folders() for pack in packs] != folders:  # another version: what isn't loaded yet wouldn't fit
            os._exit(0)
        unlike = _take_over(int(_read(f"{published}/{TAKEN}")), f"{published}/{ANSWER}", own)
    except (OSError, ValueError, KeyError):
        os._exit(0)
    if unlike:
        os._exit(UNLIKE + list(own.aspects).index(unlike[0]))

    def become(path: str, arguments: Sequence[str]) -> NoReturn:
        if "\n" not in path and list(arguments) == sys.argv[1:] and startable(path):
            os.write(answer, f"{path}\n".encode(errors="surrogateescape"))
        os._exit(0)

    code = runtime.main(become=become)
    start.flush()
    os.write(answer, f"{code}\n".encode())
    os._exit(0)


def check() -> None:
    """Whether this kernel lets a worker take over a shell's output. Raises OSError."""
    process = os.pidfd_open(os.getpid())
    try:
        os.close(linux.syscall(SYS_pidfd_getfd, process, process, 0))
    finally:
        os.close(process)


def startable(path: str) -> bool:
    """Whether a program is one that the kernel starts. A shell would take another for a script of its own, or end
    without a word to the engine."""
    head, own = _head(path), _head("/proc/self/exe")
    if head[:2] == b"#!":
        return programs.is_program(os.fsdecode(head[2:].split(b"\n")[0].strip().split(b" ")[0]))
    return head[:5] == own[:5] and head[ELF_MACHINE] == own[ELF_MACHINE]


def _take_over(pid: int, answer: str, own: Client) -> list[str]:
    """Puts this process in the place of the shell that asks, and has it end with that. Answers in what the shell is
    unlike this process, and then it isn't done. Raises OSError."""
    there, process = f"/proc/{pid}", os.pidfd_open(pid)
    client = Client(str(pid))
    unlike = [name for name, value in own.aspects.items() if client.aspects[name] != value]
    if unlike:
        return unlike
    _, *words = _read(f"{there}/cmdline").split(b"\0")[:-1]  # the first is the shell's own name
    entries = [entry.partition(b"=") for entry in _read(f"{there}/environ").split(b"\0")]
    os.chdir(f"{there}/cwd")
    os.umask(client.umask)
    os.dup2(_descriptor(process, 2), 2)
    if os.readlink(f"{there}/fd/{HELD}") != answer:  # asked last: so all of that was of the process that took us
        raise ProcessLookupError
    start_new_thread(_end_with, (process,))
    sys.argv[:] = map(os.fsdecode, words)
    for name, equals, value in entries:
        if name and equals:
            os.environb[name] = value
    time.tzset()
    return []


def _end_with(process: int) -> None:
    """Ends this process when another one has ended, as an engine that kills what it has called expects."""
    select([process], [], [])
    os._exit(0)


def _descriptor(process: int, number: int) -> int:
    """A copy of another process's descriptor; one of nothing where it has closed that. Raises OSError."""
    try:
        return linux.syscall(SYS_pidfd_getfd, process, number, 0)
    except OSError as error:
        if error.errno != EBADF:
            raise
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _namespace(there: str, kind: str) -> int:
    return os.stat(f"{there}/ns/{kind}").st_ino


def _head(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 256)
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_all(descriptor)
    except OSError:  # /proc/PID/attr without a security module
        return b""
    finally:
        os.close(descriptor)
