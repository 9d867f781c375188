"""tally.py: counts that runtimes append and the plugin reads; none is lost when the file is folded."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
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


def _add_many(folder: str, many: int) -> None:
    for _ in range(many):
        tally.add(folder, *JIT, 0.001)


@pytest.mark.parametrize(("most", "many"), [(tally.MOST, 200), (600, 2000)])
def test_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, many: int) -> None:
    monkeypatch.setattr(tally, "MOST", most)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_many, args=(str(tmp_path), many)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert tally.read(str(tmp_path))[JIT][:2] == [8000 * many, 8 * many]


def test_a_line_that_came_while_it_was_folded_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MOST", 0)
    path = tmp_path / tally.NAME
    path.write_text("jit-cdi ok 1000\n")
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


def test_a_process_that_was_stopped_with_the_lock_makes_nobody_wait_long(tmp_path: Path) -> None:
    tally.add(str(tmp_path), *JIT, 0.001)
    ready, told = os.pipe()
    child = os.fork()
    if not child:
        os.lockf(os.open(tmp_path / tally.NAME, os.O_RDWR), os.F_LOCK, 0)
        os.write(told, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    began = time.monotonic()
    tally.add(str(tmp_path), *JIT, 0.001)
    assert time.monotonic() - began < 1
    assert tally.read(str(tmp_path))[JIT][1] == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(told)
