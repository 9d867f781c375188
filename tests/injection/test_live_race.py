"""A hostile image whose folders are swapped for links that lead out of it, all the time, while we work in it.

Ten thousand paths are made, mounted on or written; nothing outside the root may change, whatever the outcome inside.
Between which of our calls a swap falls is chance here; test_live_swapped.py goes through them one by one.
"""

from __future__ import annotations

import mmap
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from gpulet.errors import StepFailed
from gpulet.injection import live, rootfs
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from support.namespaced import mounts, namespaced, tree

pytestmark = pytest.mark.root

ROUNDS = 10_000
DRIVER = "proc/driver/nvidia"
SWAPPED = ("usr/lib", "etc", "dev", "opt", DRIVER, "run")  # none within another: the race must not leave by itself


def swap_for_ever(root: Path, outside: Path, turns: mmap.mmap) -> None:
    """Exchanges each folder with a link out of the root and back, over and over, as fast as can be, and counts it."""
    targets = (str(outside), "../" * 40 + str(outside)[1:], "/proc/self/root" + str(outside))
    turn = 0
    while True:
        turn += 1
        turns[:8] = turn.to_bytes(8, "little")
        for path in SWAPPED:
            rename(root / path, root / aside(path))
            try:
                os.symlink(targets[turn % len(targets)] + (f"/{path}" if turn % 2 else ""), root / path)
            except OSError:
                continue
        for path in reversed(SWAPPED):
            rename(root / aside(path), root / path)


def aside(path: str) -> str:
    return f".aside-{path.replace('/', '-')}"


def rename(here: Path, there: Path) -> None:
    try:
        if there.is_symlink():
            os.unlink(there)
        os.rename(here, there)
    except OSError:
        pass


@pytest.fixture
def scene(tmp_path: Path):  # type: ignore[no-untyped-def]
    """(root, outside, host, how many turns the racing process has done by now), with that process at work."""
    root, outside, host = tmp_path / "root", tmp_path / "outside", tmp_path / "host"
    for path in SWAPPED:
        (root / path).mkdir(parents=True, exist_ok=True)
        (outside / path).mkdir(parents=True, exist_ok=True)
    (outside / "ld.so.cache").write_text("untouched")
    (outside / "nvidia0").write_text("untouched")
    host.mkdir()
    (host / "libcuda.so.1").write_text("library")
    os.mknod(host / "nvidia0", stat.S_IFCHR | 0o666, os.makedev(195, 0))
    turns = mmap.mmap(-1, 8)  # shared with the child
    pid = os.fork()
    if not pid:
        try:
            os.nice(5)
            swap_for_ever(root, outside, turns)
        finally:
            os._exit(1)
    yield root, outside, host, lambda: int.from_bytes(turns[:8], "little")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_work_beneath_the_root(scene) -> None:  # type: ignore[no-untyped-def]
    root, outside, _, turns = scene
    before = tree(outside)
    names = [f"/{folder}/{name}" for folder in SWAPPED for name in ("a/b", "c")]
    done = failed = 0
    began = turns()
    ends = time.monotonic() + 60
    while done + failed < ROUNDS and time.monotonic() < ends:
        for at in range(0, len(names), 4):
            links = tuple(SymLink(f"{done}", name) for name in names[at : at + 4])
            try:
                done += (
                    len(rootfs.prepare(str(root), RootfsWork(links, folders=("/opt/lib",), profile_minors=(0,)))) + 1
                )
            except StepFailed:
                failed += 1
    assert done + failed >= ROUNDS, "too slow to mean anything"
    assert done > ROUNDS // 10
    assert turns() - began > 100, "the other process stood still"
    assert tree(outside) == before


def test_mounts_into_a_container(scene) -> None:  # type: ignore[no-untyped-def]
    root, outside, host, _ = scene
    before, mounted = tree(outside), mounts()
    work = Injection(
        devices=(DeviceNode("/dev/nvidia0", str(host / "nvidia0"), 195, 0),),
        mounts=tuple(
            Mount(str(host / "libcuda.so.1"), path, kind="binary")
            for path in ("/usr/lib/libcuda.so.1", "/opt/x/libcuda.so.1", "/run/y/libcuda.so.1", "/etc/nvidia/z")
        ),
        rootfs=RootfsWork((SymLink("x", "/etc/link"),)),
    )
    paths = set()
    good = 0
    for _ in range(60):
        with namespaced(root) as pid:
            try:
                live.apply(work, pid, str(root), cgroups=False)
                good += 1
            except StepFailed:
                pass
            paths |= set(mounts(pid)) - set(mounted)
    assert good
    assert all(path == str(root) or path.startswith(f"{root}/") for path in paths)
    assert tree(outside) == before
    assert mounts() == mounted
