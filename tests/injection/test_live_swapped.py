"""A hostile image whose folders are swapped for links that lead out of it, between any two of our system calls.

What test_live_race.py leaves to chance is gone through here one by one: the work is done once for each of its calls,
and before that call one folder becomes a link. Nothing outside the root may ever change.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpulet import linux
from gpulet.errors import StepFailed
from gpulet.injection import rootfs
from gpulet.injection.model import RootfsWork, SymLink
from support.namespaced import tree

pytestmark = pytest.mark.root

SWAPPED = ("usr/lib", "etc", "opt", "run")
LINKS = tuple(SymLink("target", f"/{folder}/{name}") for folder in SWAPPED for name in ("a/b", "c"))
WORK = RootfsWork(LINKS, folders=("/opt/lib",), profile_minors=(0,))


@contextmanager
def before_each_call(act: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls act(n) before the n-th system call of what runs within; the list holds how many there have been."""
    count = [0]

    def look(frame: Any, event: str, called: Any) -> None:
        ours = event == "call" and frame.f_code is linux.syscall.__code__
        if ours or (event == "c_call" and getattr(called, "__module__", "") == "posix"):
            count[0] += 1
            act(count[0])

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield count
    finally:
        sys.setprofile(before)


class Scene:
    """A root with its folders, and a folder outside of the same shape, to which the links lead."""

    def __init__(self, folder: Path) -> None:
        self.root, self.outside = folder / "root", folder / "outside"
        for path in SWAPPED:
            (self.root / path).mkdir(parents=True)
            (self.outside / path).mkdir(parents=True)
            (self.outside / path / "c").write_text("untouched")
        (self.outside / "etc/ld.so.cache").write_text("untouched")
        self.ways = tuple(f"{start}{self.outside}" for start in ("", "../" * 40, "/proc/self/root"))
        self.before = tree(self.outside)

    def swap(self, path: str, way: str) -> None:
        """Puts a link to the same folder outside in the place of one of the root's."""
        os.rename(self.root / path, self.root / "aside")
        os.symlink(f"{way}/{path}", self.root / path)

    def swap_back(self, path: str) -> None:
        os.unlink(self.root / path)
        os.rename(self.root / "aside", self.root / path)

    def clean(self) -> None:
        """Makes the root bare again: what is done already isn't done once more."""
        for folder, folders, files in os.walk(self.root, topdown=False):
            for name in files:
                os.unlink(Path(folder, name))
            for name in folders:
                path = Path(folder, name)
                if path.is_symlink():
                    path.unlink()
                else:
                    path.rmdir()
        for path in SWAPPED:
            (self.root / path).mkdir(parents=True)

    def calls(self) -> int:
        """How many system calls the work takes where nobody disturbs it."""
        rootfs.prepare(str(self.root), WORK)  # the first time modules are loaded too
        self.clean()
        with before_each_call(lambda n: None) as count:
            rootfs.prepare(str(self.root), WORK)
        self.clean()
        return count[0]

    def disturbed(self, path: str, way: str, at: int, back: int) -> bool:
        """Does the work; the folder is a link from before call `at` to before call `back`. Whether it came through."""
        swapped = []

        def act(n: int) -> None:
            if n == at:
                self.swap(path, way)
                swapped.append(n)
            elif n == back and swapped:
                self.swap_back(path)
                swapped.clear()

        try:
            with before_each_call(act) as count:
                rootfs.prepare(str(self.root), WORK)
            return True
        except StepFailed:
            return False
        finally:
            assert count[0] >= at, "the work was over before the swap"
            if swapped:
                self.swap_back(path)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


@pytest.mark.parametrize("lasts", [1, 1 << 20])
@pytest.mark.parametrize("path", SWAPPED)
def test_a_swap_before_any_call(scene: Scene, path: str, lasts: int) -> None:
    outcomes = set()
    calls = scene.calls()
    assert calls > 50
    for at in range(1, calls + 1):
        outcomes.add(scene.disturbed(path, scene.ways[at % 3], at, at + lasts))
        assert tree(scene.outside) == scene.before, f"before call {at}"
        scene.clean()
    assert True in outcomes


def test_it_would_be_seen_if_paths_were_resolved_by_the_hosts_rules(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = scene.calls()

    def naive(root: int, path: str, flags: int) -> int:
        return os.open(path.lstrip("/") or ".", flags, dir_fd=root)

    monkeypatch.setattr(linux, "open_in_root", naive)
    for at in range(1, calls + 1):
        scene.disturbed("usr/lib", str(scene.outside), at, 1 << 20)
        if tree(scene.outside) != scene.before:
            return
        scene.clean()
    pytest.fail("nothing outside was touched, so the other tests prove nothing")
