"""Control groups and GPUs' nodes for the tests of device rules."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cgroup_folders import hierarchy, made


@pytest.fixture
def v1() -> Iterator[Path]:
    yield from made(hierarchy("cgroup", "devices"))


@pytest.fixture
def v2() -> Iterator[Path]:
    yield from made(hierarchy("cgroup2"))


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Of the GPUs with the minors 0, 1 and 2."""
    found = [tmp_path / f"nvidia{minor}" for minor in range(3)]
    for minor, node in enumerate(found):
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, minor))
    return found
