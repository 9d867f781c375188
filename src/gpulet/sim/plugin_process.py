"""The device plugin as its own process, kept running as a DaemonSet would keep it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "gpulet-device-plugin"
FIRST_DELAY, LONGEST_DELAY = 0.1, 10.0  # seconds before it is started again, doubled each time
HEALTHY = 10.0  # seconds of running after which an end counts as the first again

# what a process needs from its surroundings; a shell's CONFIG_FILE or MIG_STRATEGY is not meant for this plugin
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "PYTHONDONTWRITEBYTECODE")


def environment() -> dict[str, str]:
    """The environment for a program of ours that is configured by its arguments alone."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


class PluginProcess:
    """`gpulet-device-plugin` as its own process, started again when it dies, as a DaemonSet's Pod would be."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = list(command)
        self._log = log
        self._stopping = threading.Event()
        self.starts = 0
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, name="plugin-keeper", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())

    def _keep(self) -> None:
        delay, since = FIRST_DELAY, time.monotonic()
        while not self._stopping.wait(0.05):
            if self._process.poll() is not None:
                if time.monotonic() - since > HEALTHY:
                    delay = FIRST_DELAY
                if self._stopping.wait(delay):
                    return
                delay = min(delay * 2, LONGEST_DELAY)
                self._process, since = self._start(), time.monotonic()

    def kill(self) -> None:
        """SIGKILL, for those who want to see it come back."""
        self._process.kill()

    def refused(self) -> bool:
        """Whether it ended by itself with an error, rather than by a signal from somebody."""
        return (self._process.returncode or 0) > 0

    def failed(self) -> str:
        """The plugin's last word where it has ended, else ""."""
        if self._process.poll() is None:
            return ""
        lines = [line for line in self._log.read_text(errors="replace").split("\n") if line.startswith(PROGRAM)]
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def stop(self) -> None:
        self._stopping.set()
        self._keeper.join()
        stop_process(self._process)


def stop_process(process: subprocess.Popen[bytes], grace: float = 5.0) -> None:
    """Ends a process that we started: asks, waits, then insists."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
