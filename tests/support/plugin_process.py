"""The device plugin for tests: in this process, or as a process of its own with facts made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from gpulet.plugin.config import load
from gpulet.plugin.daemon import Daemon
from gpulet.plugin.endpoint import Endpoint
from gpulet.plugin.metrics import Metrics

PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from support import hand_made
from gpulet.plugin.main import main
sys.exit(main(sys.argv[1:], look=lambda config: hand_made.facts({gpus})))
"""


@contextlib.contextmanager
def short_folder():
    """A folder whose sockets stay below the 108 bytes that a unix socket's path may have."""
    folder = tempfile.mkdtemp(prefix="gp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def start_process(folder: Path, *words: str, gpus: int = 8) -> subprocess.Popen:
    """The daemon in a process of its own, its log in folder/plugin.log."""
    program = PROGRAM.format(tests=str(Path(__file__).parent.parent), gpus=gpus)
    with open(folder / "plugin.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", program, "--kubelet-socket-dir", str(folder), *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={"PATH": os.environ["PATH"]},
        )


@contextlib.contextmanager
def running(
    folder: Path,
    look,
    *words: str,
    publish=lambda config, facts, imex: (),
    refresh_every: float = 10.0,
    report=None,
    look_as=None,
):
    """The daemon in a thread. look: gives facts; look_as: the same from a configuration. Gives a Running; whatever
    ends it unexpectedly is raised at the end."""
    argv = ["--kubelet-socket-dir", str(folder), f"--refresh-interval={refresh_every}", *words]
    plugin = Running(argv, look_as or (lambda config: look()), publish, report)
    plugin.thread.start()
    plugin.ready.wait(10)
    try:
        yield plugin
    finally:
        plugin.call(lambda daemon: daemon.stop.set())
        plugin.thread.join(10)
    assert not plugin.thread.is_alive()
    if plugin.error:
        raise plugin.error


class Running:
    def __init__(self, argv, look, publish, report=None):
        self.thread = threading.Thread(target=self._main, args=(argv, look, publish), name="plugin", daemon=True)
        self.report = report
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.daemon: Daemon | None = None

    def _main(self, argv, look, publish):
        try:
            asyncio.run(self._run(argv, look, publish))
        except BaseException as error:
            self.error = error
        finally:
            self.ready.set()

    async def _run(self, argv, look, publish):
        config = load(argv, {})
        self.loop = asyncio.get_running_loop()
        metrics = Metrics() if config.metrics_address else None
        self.daemon = Daemon(lambda: load(argv, {}), look, publish, metrics=metrics, report=self.report)
        if metrics:
            self.endpoint = Endpoint(config.metrics_address, self.daemon, metrics, fresh=0)
            await self.endpoint.start()
        self.ready.set()
        try:
            await self.daemon.run(config)
        finally:
            if metrics:
                await self.endpoint.stop()

    def call(self, action):
        """Run `action(daemon)` in the daemon's loop."""
        if self.loop and self.daemon and self.thread.is_alive():
            self.loop.call_soon_threadsafe(action, self.daemon)

    def reload(self):
        self.call(lambda daemon: daemon.reload())


def until(condition, timeout: float = 10.0):
    """Wait for a condition, or fail."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.005)
    return result


def get(port: int, path: str) -> tuple[int, str]:
    """Status and text of the daemon's HTTP answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
