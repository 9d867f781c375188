"""The state folder's files and folders of links go when nobody wants them, and no running container notices."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpulet import linux, mount_api
from gpulet.launch import beside, sweep
from gpulet.launch.beside import Laid

LINKS = (("pci-0", "../card0"), ("pci-1", "../card1"))


def laid(folder: Path, name: str, *, links: bool = False, days: float = 0) -> Path:
    thing = Laid(str(folder / name), links=LINKS) if links else Laid(str(folder / name), b"data")
    beside.lay([thing])
    then = time.time() - days * 86400
    os.utime(thing.path, (then, then))
    return Path(thing.path)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_what_nobody_wanted_for_a_day_goes(tmp_path: Path) -> None:
    for links in (False, True):
        laid(tmp_path, f"old-{links}", links=links, days=2)
        laid(tmp_path, f"new-{links}", links=links)
    (tmp_path / "half.4194999").mkdir()
    (tmp_path / "half.4194999" / "pci-0").symlink_to("x")
    os.utime(tmp_path / "half.4194999", (0, 0))
    sweep.sweep(str(tmp_path), time.time() - sweep.AGE)
    assert names(tmp_path) == ["new-False", "new-True"]


def test_what_is_not_ours_stays_and_hinders_nothing(tmp_path: Path) -> None:
    for name in "bdfhkm":
        (tmp_path / name / "deeper").mkdir(parents=True)
        (tmp_path / name / "a-link").symlink_to("x")
        os.utime(tmp_path / name, (0, 0))
    for name in "aceg":
        laid(tmp_path, name * 32, links=True, days=2)
    sweep.sweep(str(tmp_path), time.time() - sweep.AGE)
    assert names(tmp_path) == list("bdfhkm")
    assert names(tmp_path / "b") == ["a-link", "deeper"]


def test_what_cannot_be_taken_away_hinders_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdef":
        laid(tmp_path, name, days=2)
    unlink = os.unlink

    def stubborn(path: str) -> None:
        if path.endswith(("/b", "/e")):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", stubborn)
    sweep.sweep(str(tmp_path), time.time() - sweep.AGE)
    assert names(tmp_path) == ["b", "e"]


@pytest.mark.parametrize("links", [False, True])
def test_what_a_new_container_wants_counts_as_new(tmp_path: Path, links: bool) -> None:
    path = laid(tmp_path, "a", links=links, days=2)
    beside.lay([Laid(str(path), links=LINKS) if links else Laid(str(path), b"data")])
    sweep.sweep(str(tmp_path), time.time() - sweep.AGE)
    assert names(tmp_path) == ["a"]


def test_laying_sweeps_by_itself_before_a_folder_grows(tmp_path: Path) -> None:
    for number in range(sweep.MANY * 2):
        laid(tmp_path, f"{number:032x}", days=2)
    assert len(names(tmp_path)) <= sweep.MANY


def test_laying_again_looks_at_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laid(tmp_path, "a")
    monkeypatch.setattr(sweep, "sweep_sometimes", None)
    laid(tmp_path, "a")


@pytest.mark.root
def test_what_a_container_has_mounted_stays_whole(tmp_path: Path) -> None:
    """A process in a mount namespace of its own, as a container is, keeps its links and its file."""
    links = laid(tmp_path / "links", "a" * 32, links=True, days=2)
    unused = laid(tmp_path / "links", "b" * 32, links=True, days=2)
    file = laid(tmp_path / "caches", "c" * 32, days=2)
    place, on = tmp_path / "place", tmp_path / "on"
    place.mkdir()
    on.write_text("")
    (told, tell), (asked, ask) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            linux.unshare(linux.CLONE_NEWNS)
            mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
            mount_api.mount(str(links), str(place), "", mount_api.MS_BIND)
            mount_api.mount(str(file), str(on), "", mount_api.MS_BIND)
            os.write(tell, b".")
            os.read(asked, 1)
            os._exit(0 if (names(place), on.read_bytes()) == (["pci-0", "pci-1"], b"data") else 1)
        finally:
            os._exit(2)
    os.close(tell)
    assert os.read(told, 1) == b"."
    for folder in ("links", "caches"):
        sweep.sweep(str(tmp_path / folder), time.time() - sweep.AGE)
    assert (names(links), unused.exists(), names(tmp_path / "caches")) == (["pci-0", "pci-1"], False, [])
    os.write(ask, b".")
    assert os.waitpid(pid, 0)[1] == 0
    sweep.sweep(str(tmp_path / "links"), time.time() - sweep.AGE)
    assert names(tmp_path / "links") == []
    for fd in (told, asked, ask):
        os.close(fd)
