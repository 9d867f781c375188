"""Several processes of ours at one root, and what one that was killed leaves there."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulet import linux, mount_api
from gpulet.errors import StepFailed
from gpulet.injection import beneath, live, rootfs
from gpulet.injection.beneath import Root
from gpulet.injection.model import RootfsWork, SymLink

WORK = RootfsWork((SymLink("libcuda.so.1", "/lib/libcuda.so"),))
LINK = "lib/libcuda.so"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "etc").mkdir(parents=True)
    return made


@pytest.fixture
def held(root: Path) -> Iterator[int]:
    """A descriptor by which somebody else holds the root's lock."""
    fd = os.open(root, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
    os.close(fd)


def test_what_one_takes_back_another_hasnt_counted_on(root: Path) -> None:
    """Two containers on one root: the first fails after it made a link; the second must end up with it."""
    second = threading.Thread(target=rootfs.prepare, args=(str(root), WORK))
    with pytest.raises(RuntimeError), Root(str(root)) as first:
        first.symlink("libcuda.so.1", "/" + LINK)
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it took the first one's link for there already"
        raise RuntimeError
    second.join(10)
    assert os.readlink(root / LINK) == "libcuda.so.1"


def test_nobody_waits_for_ever(root: Path, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may hold a lock on its own root as long as it likes."""
    monkeypatch.setattr(beneath, "WAITS", 3)
    (root / "lib").mkdir()
    (root / LINK).write_text("another")
    assert rootfs.prepare(str(root), WORK) == ("link /lib/libcuda.so -> libcuda.so.1",)
    assert os.listdir(root / "lib") == ["libcuda.so"]


def test_the_lock_ends_with_the_work(root: Path) -> None:
    rootfs.prepare(str(root), WORK)
    fd = os.open(root, os.O_RDONLY)
    assert linux.lock(fd)
    os.close(fd)


@pytest.mark.parametrize("left", ["file", "link"])
def test_what_a_killed_run_left_goes_with_the_next(root: Path, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_args: object, **_more: object) -> None:
        raise KeyboardInterrupt  # as if the process ended between the two system calls

    (root / "etc/x").write_text("old")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), Root(str(root)) as first:
        patched.setattr(os, "rename", killed)
        first.write("/etc/x", b"new") if left == "file" else first.symlink("y", "/etc/x")
    (aside,) = {path.name for path in (root / "etc").iterdir()} - {"x"}
    assert aside.startswith(".gpulet-")
    with Root(str(root)) as second:
        second.write("/etc/x", b"new") if left == "file" else second.symlink("y", "/etc/x")
    assert os.listdir(root / "etc") == ["x"]


def test_an_image_can_put_nothing_in_the_way_of_what_is_made_aside(root: Path) -> None:
    outside = root.parent / "outside"
    outside.write_text("mine")
    (root / "etc" / beneath.ASIDE).symlink_to(outside)
    with Root(str(root)) as one:
        one.write("/etc/x", b"new")
    assert outside.read_text() == "mine"
    (root / "etc" / beneath.ASIDE / "inner").mkdir(parents=True)
    with Root(str(root)) as one:
        one.write("/etc/x", b"newer")
    assert sorted(os.listdir(root / "etc")) == [beneath.ASIDE, "x"]


def test_what_cant_be_taken_back_hides_neither_the_error_nor_the_rest(root: Path) -> None:
    (root / "etc/x").write_text("old")
    with pytest.raises(RuntimeError), Root(str(root)) as one:
        one.symlink("y", "/link")
        one.write("/etc/x", b"new")
        shutil.rmtree(root / "etc")
        raise RuntimeError
    assert os.listdir(root) == []


@pytest.mark.root
@pytest.mark.parametrize("kind", ["file", "folder", "device"])
def test_what_is_mounted_over_a_place_stays(root: Path, kind: str) -> None:
    """A rename over a mount is EBUSY; what isn't a file was taken for the image's own fault."""
    theirs, place = root.parent / "theirs", root / "etc/x"
    if kind == "folder":
        theirs.mkdir()
        place.mkdir()
    else:
        theirs.write_text("theirs") if kind == "file" else theirs.symlink_to("/dev/null")
        place.touch()
    seen = theirs.stat()

    def work() -> tuple[str, ...]:
        linux.unshare(linux.CLONE_NEWNS)
        mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
        mount_api.mount(str(theirs), str(place), "", mount_api.MS_BIND)
        mount_api.mount("none", "/proc", "tmpfs", 0)  # a container's own may hold anything, and make who opens it wait
        os.makedirs("/proc/self/fdinfo")
        for number in range(64):
            os.mkfifo(f"/proc/self/fdinfo/{number}")
        with Root(str(root)) as held:
            changed = [held.symlink("a", "/etc/x"), held.write("/etc/x", b"ours"), held.write("/etc/y", b"ours")]
            still = os.path.samestat(place.stat(), seen)
            return (*held.left, str(held.covered("/etc/y")), str(changed), str(still))

    answer = ("/etc/x", "/etc/x", "False", "[False, False, True]", "True")
    assert live.in_child(work) == answer
    assert sorted(os.listdir(root / "etc")) == ["x", "y"]


def test_a_full_disk_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Root(str(root)) as one, monkeypatch.context() as patched:
        patched.setattr(os, "fchmod", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StepFailed, match="No space left"):
            one.write("/etc/x", b"new")
    assert os.listdir(root / "etc") == []
