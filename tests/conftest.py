"""What the tests ask of the machine."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading

import pytest


def pytest_configure() -> None:
    if os.statvfs(tempfile.gettempdir()).f_flag & os.ST_NODEV:  # as Debian 13 mounts /tmp: no node opens there
        os.environ["TMPDIR"] = tempfile.tempdir = "/var/tmp"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.geteuid() != 0 and {"root", "e2e"} & {mark.name for mark in item.iter_markers()}:
        pytest.skip("needs root")


def pytest_unconfigure() -> None:
    """A thread that a failed test left behind would keep the interpreter for ever: the run ends, and shows it."""
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in left:
        thread.join(5)  # one that is on its way out
    if names := [thread.name for thread in left if thread.is_alive()]:
        print(f"threads that tests left behind: {', '.join(names)}", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        sys.stdout.flush()
        os._exit(1)
