"""What the tests ask of the machine."""

from __future__ import annotations

import os
import tempfile

import pytest


def pytest_configure() -> None:
    if os.statvfs(tempfile.gettempdir()).f_flag & os.ST_NODEV:  # as Debian 13 mounts /tmp: no node opens there
        os.environ["TMPDIR"] = tempfile.tempdir = "/var/tmp"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.geteuid() != 0 and {"root", "e2e"} & {mark.name for mark in item.iter_markers()}:
        pytest.skip("needs root")
