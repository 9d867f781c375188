"""The benchmarks are no part of the package: they lie beside it, in the repository's folder."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path short enough for the sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="gp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
