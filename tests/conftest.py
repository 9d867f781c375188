"""What a mark asks of the machine."""

from __future__ import annotations

import os

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.geteuid() != 0 and {"root", "e2e"} & {mark.name for mark in item.iter_markers()}:
        pytest.skip("needs root")
