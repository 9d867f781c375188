"""One of NVIDIA's programs run to its end, or given up: each may hang for as long as a driver does. For mps_control."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence

from gpulet.errors import GpuletError, NodeError

TIMEOUT = 30.0  # seconds for any one program: a hung one must not stop the others
LAST_TIMEOUT = 6.0  # the same once we are to end: there are two steps one after the other, and a Pod has 30 s for all
TICK = 0.1  # seconds between looks whether we are to end


class Ended(GpuletError):
    """We are to end: what was being begun has been given up."""


def run(
    command: Sequence[str], about: str, environ: Mapping[str, str], told: str, ending: threading.Event, *, last: bool
) -> None:
    """Run a program to its end. about: what it is called in errors; told: its standard input; ending: set once we are
    to end; last: it belongs to that end, and is run all the same.

    Raises NodeError where it can't be run, hangs or fails; Ended where it is given up for the end.
    """
    if ending.is_set() and not last:
        raise Ended(f"{about} not begun any more")
    try:
        # what it says goes into memory: a daemon that it leaves behind may keep a pipe open for ever
        with open(os.memfd_create("said"), "w+b") as said:
            code = _wait(_begin(command, environ, told.encode(), said.fileno()), ending, last)
            said.seek(0)
            output = b" ".join(said.read().split()).decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeError(f"{about} failed", seen=error) from error
    if code:
        raise NodeError(f"{about} ended with {code}", seen=output or None)


def _begin(command: Sequence[str], environ: Mapping[str, str], told: bytes, output: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,  # so that all of it can be killed, and a terminal's Ctrl-C ends us and no step
    )
    assert process.stdin
    try:
        with process.stdin as pipe:
            pipe.write(told)
    except BrokenPipeError:
        pass  # it doesn't read; its exit code says the rest
    return process


def _wait(process: subprocess.Popen[bytes], ending: threading.Event, last: bool) -> int:
    """Its exit code. Raises TimeoutExpired, Ended."""
    began = time.monotonic()
    while True:
        try:
            return process.wait(TICK)
        except subprocess.TimeoutExpired as error:
            timeout = LAST_TIMEOUT if ending.is_set() else TIMEOUT
            if ending.is_set() and not last:
                _kill(process)
                raise Ended("given up") from error
            if time.monotonic() - began >= timeout:
                _kill(process)
                error.timeout = timeout
                raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """A process and those that it has started. One that hangs in the driver dies later, and isn't waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(TICK)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
