"""The demo's folder: gone afterwards, swept where its demo was killed, left alone where it lives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulet.errors import EngineError, NodeError
from gpulet.sim.workplace import PREFIX, sweep, whole, workplace


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_gone_afterwards(temporary: Path) -> None:
    with workplace(keep=False) as folder:
        (folder / "file").touch()
        assert folder.parent == temporary
    assert not list(temporary.iterdir())


def test_kept(temporary: Path) -> None:
    with workplace(keep=True) as folder:
        pass
    sweep(temporary)
    assert list(temporary.iterdir()) == [folder]


def test_sweep_takes_the_dead_and_leaves_the_living(temporary: Path) -> None:
    dead, foreign = temporary / f"{PREFIX}dead", temporary / "gpulet-other"
    dead.mkdir()
    foreign.mkdir()
    link = temporary / f"{PREFIX}link"
    link.symlink_to(foreign)
    with workplace(keep=False) as living:
        sweep(temporary)
        assert living.is_dir() and not dead.exists() and foreign.is_dir() and link.is_symlink()


def test_what_fails_while_a_folder_is_filled_leaves_nothing(temporary: Path) -> None:
    folder = temporary / "n"
    with pytest.raises(NodeError, match=f"^{folder} can't be filled: {folder}/file: No space"), whole(folder):
        (folder / "a/b").mkdir(parents=True)
        (folder / "link").symlink_to(temporary)
        raise OSError(28, "No space left on device", "/bin/source", None, f"{folder}/file")
    assert not list(temporary.iterdir())
    with pytest.raises(KeyboardInterrupt), whole(temporary):
        (temporary / "file").touch()
        raise KeyboardInterrupt
    assert temporary.is_dir() and not list(temporary.iterdir())


def test_nowhere_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(EngineError, match="No usable temporary directory found; set TMPDIR"), workplace(keep=False):
        pass


@pytest.mark.parametrize("flag", [os.ST_NODEV, os.ST_NOEXEC])
def test_another_folder_where_nothing_opens_or_runs_in_tmp(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, flag: int
) -> None:
    other = temporary / "o"
    other.mkdir()
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=flag))
    monkeypatch.setattr("gpulet.sim.workplace.SECOND", str(other))
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    with workplace(keep=False) as folder:
        assert folder.parent == other
    monkeypatch.setenv("TMPDIR", str(temporary))  # somebody's choice is refused later, by name
    with workplace(keep=False) as folder:
        assert folder.parent == temporary


def test_too_long_for_sockets(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = temporary / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(EngineError, match="TMPDIR"), workplace(keep=False):
        pass
    assert not os.listdir(long)
