"""logs.py: whoever speaks in the process does so in the wanted form, and the same thing once."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest

from support import plugin_process as plugin

CODE = """
import asyncio, logging, sys, threading, warnings
from gpulet.plugin import logs
logs.start("json", "warning")
for _ in range(100):
    logging.getLogger("asyncio").error("no descriptor\\nfor %s", _)
warnings.warn("old")
thread = threading.Thread(target=lambda: int("x"), name="worker")
thread.start()
thread.join()
raise ValueError("a bug")
"""


def test_everybody_speaks_in_one_form():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"].partition("\n")[0] for line in lines] == [
        "no descriptor",
        "<string>:7: UserWarning: old",
        "the thread worker ended by a bug: invalid literal for int() with base 10: 'x'",
        "ended by a bug: a bug",
    ]
    assert "ValueError" in lines[-1]["error"]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_without_descriptors_it_says_so_in_few_lines_and_goes_on():
    with plugin.short_folder() as folder:
        port = free_port()
        process = plugin.start_process(folder, f"--metrics-address=127.0.0.1:{port}", "--log-format=json")
        clients = []
        try:
            plugin.until(lambda: (folder / "plugin.log").read_text().count("\n") >= 2)
            plugin.until(lambda: plugin.get(port, "/healthz") == (200, "ok\n"))
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (24, 24))
            clients += [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
            time.sleep(2)
            for client in clients:
                client.close()
            plugin.until(lambda: plugin.get(port, "/healthz") == (200, "ok\n"))
        finally:
            for client in clients:
                client.close()
            process.terminate()
            process.wait(10)
        lines = (folder / "plugin.log").read_text().splitlines()
        assert any("out of system resource" in line for line in lines)
        assert len(lines) < 30
        for line in lines:
            json.loads(line)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_starts_ends_it_without_a_word(number):
    code = f"""
import os, sys
from gpulet.plugin import entry
class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "gpulet.plugin.main":
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Early())
sys.exit(entry.main() or 7)
"""
    environ = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", code, "--log-format=json"], capture_output=True, text=True, env=environ
    )
    assert (done.returncode, done.stderr) == (0, "")
