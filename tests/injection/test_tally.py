"""tally.py: counts that runtimes append and the plugin reads; none is lost when the file is folded."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from gpulet.injection import tally

JIT = ("jit-cdi", "ok")


def test_one_line_each_and_their_sums(tmp_path: Path) -> None:
    folder = str(tmp_path / "made" / "anew")
    assert tally.read(folder) == {}
    for seconds in (0.0009, 0.003, 0.003, 7.0):
        tally.add(folder, *JIT, seconds)
    tally.add(folder, "auto", "refused", 0.0)
    found = tally.read(folder)
    assert found[JIT] == [7_006_900, 4, 1, 0, 2, 0, 0, 0, 0, 0, 0, 1]
    assert found["auto", "refused"][:3] == [0, 1, 1]
    assert (tmp_path / "made" / "anew" / tally.NAME).read_text().count("\n") == 5


def test_folding_keeps_every_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MOST", 500)
    folder = str(tmp_path)
    for number in range(1000):
        tally.add(folder, *JIT, number / 1e6)
        assert os.path.getsize(tmp_path / tally.NAME) <= 500
    assert tally.read(folder)[JIT][:3] == [sum(range(1000)), 1000, 1000]
    assert os.listdir(folder) == [tally.NAME]


def _add_many(folder: str) -> None:
    for _ in range(200):
        tally.add(folder, *JIT, 0.001)


def test_many_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_many, args=(str(tmp_path),)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert tally.read(str(tmp_path))[JIT][:2] == [1_600_000, 1600]


def test_a_line_that_came_while_it_was_folded_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / tally.NAME
    tally.add(str(tmp_path), *JIT, 0.001)
    late = os.open(path, os.O_WRONLY | os.O_APPEND)
    rename = os.rename

    def slow(old: str, new: str) -> None:
        os.write(late, b"jit-cdi ok 5\n")
        rename(old, new)

    monkeypatch.setattr(os, "rename", slow)
    tally.fold(str(path))
    os.close(late)
    assert tally.read(str(tmp_path))[JIT][:2] == [1005, 2]


def test_what_is_not_ours_does_not_count(tmp_path: Path) -> None:
    lines = [
        "jit-cdi ok",
        "jit-cdi ok x",
        "jit-cdi ok -1",
        "other ok 1",
        "cdi fine 1",
        "",
        "cdi ok 1 2 3",
        "cdi ok \xe9",
    ]
    lines += [f"cdi ok {'9' * 30}", "cdi ok 7", "cdi ok 1"]  # the last has no end yet: it is being written
    (tmp_path / tally.NAME).write_text("\n".join(lines))
    assert {key: total[:2] for key, total in tally.read(str(tmp_path)).items()} == {("cdi", "ok"): [7, 1]}


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "file in the way"])
def test_something_else_of_that_name_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    folder, place = tmp_path, tmp_path / tally.NAME
    target = tmp_path / "target"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(target)
    else:
        folder = tmp_path / "file"
        folder.touch()
    tally.add(str(folder), *JIT, 0.001)
    assert not target.exists()
    if kind == "pipe":
        assert tally.read(str(folder)) == {}
    else:
        with pytest.raises(OSError):
            tally.read(str(folder))
