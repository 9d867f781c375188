"""A worker: an interpreter that has everything loaded for one `gpulet-runtime create`, and waits for that container.

Its folder holds two pipes. The launcher's shell (engines/launchers.py) takes a worker by making the file `taken` there,
which can be made once, with its own process's number; opens `answer` to read, and then `ask`, which is all that wakes
the worker; and reads what to do:

    a path     become this low-level runtime, with the words that you were called with
    a number   exit with it: config.json is as it was, and why is said where you would have said it
    nothing    start Python, and do it all yourself

The worker alone can write into `answer`, so whatever kills it comes out as nothing, and a shell never waits for a dead
one. What the work depends on is taken from the shell's process: its words, environment, folder, umask and
output. A shell that isn't as the worker is in all that a container's start can depend on gets no answer.
"""

from __future__ import annotations

import os
import sys
from _signal import SIGTERM, signal  # type: ignore[import-not-found]  # as in programs.py

from gpulet import linux
from gpulet.codec import read_all
from gpulet.launch import runtime, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

ASK, ANSWER, TAKEN = "ask", "answer", "taken"
ASKED, HELD = 7, 8  # the shell's descriptors of `ask` and `answer`
SYS_pidfd_getfd = 438  # on every architecture
EBADF = 9
NAMESPACES = ("mnt", "pid", "user")
ALIKE = ("Uid:", "Gid:", "Groups:", "CapEff:")  # lines of /proc/PID/status


class Unlike(Exception):
    """The shell's process isn't one that this worker can stand in for. For nobody to see: it does its work itself."""


class Client:
    """What a shell's process is like, as far as a container's start can depend on it. process: its number, or "self".
    Raises OSError."""

    def __init__(self, process: str) -> None:
        there = f"/proc/{process}"
        lines = _read(f"{there}/status").decode().splitlines()
        status = {name: value for name, _, value in (line.partition("\t") for line in lines)}
        self.umask = int(status["Umask:"], 8)
        root = os.stat(f"{there}/root")
        self.alike = (
            [status[name] for name in ALIKE],
            [os.stat(f"{there}/ns/{kind}").st_ino for kind in NAMESPACES],
            (root.st_dev, root.st_ino),
            _read(f"{there}/attr/current"),  # what a security module holds it for
        )


def serve(folder: str, published: str) -> NoReturn:
    """Waits for one shell, does its work, and ends. folder: with the pipes; published: the name that shells find it by,
    which it gets now."""
    os.environ.clear()
    own = Client("self")
    answer = os.open(f"{folder}/{ANSWER}", os.O_RDWR | os.O_CLOEXEC)
    os.rename(folder, published)
    os.close(os.open(f"{published}/{ASK}", os.O_RDONLY | os.O_CLOEXEC))  # waits for somebody who holds it for writing
    signal(SIGTERM, lambda number, frame: None)  # what has begun is brought to its end
    try:
        pid = int(_read(f"{published}/{TAKEN}"))
        if os.readlink(f"/proc/{pid}/fd/{HELD}") != f"{published}/{ANSWER}":
            raise Unlike
        _take_over(pid, own)
    except (Unlike, OSError, ValueError, KeyError):
        os._exit(0)

    def become(path: str, arguments: Sequence[str]) -> NoReturn:
        if "\n" not in path and list(arguments) == sys.argv[1:]:
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


def current() -> bool:
    """Whether our modules are still as they were loaded."""
    packs: list[Any] = [one for one in sys.meta_path if hasattr(one, "unchanged")]
    return all(pack.unchanged() for pack in packs)


def _take_over(pid: int, own: Client) -> None:
    """Puts this process in the place of the shell that asks. Raises Unlike, OSError."""
    there, client = f"/proc/{pid}", Client(str(pid))
    if client.alike != own.alike:
        raise Unlike
    _, *words = _read(f"{there}/cmdline").split(b"\0")[:-1]  # the first is the shell's own name
    sys.argv[:] = map(os.fsdecode, words)
    for entry in _read(f"{there}/environ").split(b"\0"):
        name, equals, value = entry.partition(b"=")
        if name and equals:
            os.environb[name] = value
    os.chdir(f"{there}/cwd")
    os.umask(client.umask)
    process = os.pidfd_open(pid)
    for number in (1, 2):  # the first is the pipe's while the shell reads
        os.dup2(_descriptor(process, number), number)


def _descriptor(process: int, number: int) -> int:
    """A copy of another process's descriptor; one of nothing where it has closed that. Raises OSError."""
    try:
        return linux.syscall(SYS_pidfd_getfd, process, number, 0)
    except OSError as error:
        if error.errno != EBADF:
            raise
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return read_all(descriptor)
    except OSError:  # /proc/PID/attr without a security module
        return b""
    finally:
        os.close(descriptor)
