"""System calls: resolution beneath a root by the kernel and by hand, and errors that name their object."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulet import linux, mount_api

NAMES = ("a", "b", "c", "etc", "lib", "..", ".")


@pytest.fixture(scope="module")
def forest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders, files and links of every kind; beside the root lies what must never be reached."""
    top = tmp_path_factory.mktemp("forest")
    (top / "secret").write_text("outside")
    (top / "a").mkdir()
    (top / "a/b").write_text("outside too")
    root = top / "root"
    for folder in ("a/b/c", "etc/lib", "lib/a"):
        (root / folder).mkdir(parents=True)
    (root / "a/b/file").write_text("in")
    for path, text in {
        "c": "a/b",
        "b": "/a/b/c",
        "a/etc": "../../../../../../etc",
        "a/lib": "/..//lib/./a",
        "etc/a": "nowhere",
        "etc/b": str(top / "a"),
        "etc/c": "../secret",
        "lib/b": "b",
        "lib/c": "../c/../b",
        "a/b/a": "file",
        "a/b/c/a": "..",
    }.items():
        (root / path).symlink_to(text)
    return root


def place(root: Path, answer: object) -> object:
    if isinstance(answer, int):
        path = os.readlink(f"/proc/self/fd/{answer}")
        os.close(answer)
        assert path == str(root) or path.startswith(f"{root}/"), "this left the root"
        return path
    return answer


def ask(function: object, root: int, path: str, flags: int) -> object:
    try:
        return function(root, path, flags)  # type: ignore[operator]
    except OSError as error:
        return errno.errorcode[error.errno or 0]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    parts=st.lists(st.sampled_from(NAMES), max_size=7),
    absolute=st.booleans(),
    flags=st.sampled_from([os.O_PATH, os.O_PATH | os.O_NOFOLLOW, os.O_PATH | os.O_DIRECTORY, os.O_RDONLY]),
)
def test_by_hand_is_as_the_kernel_does(forest: Path, parts: list[str], absolute: bool, flags: int) -> None:
    path = ("/" if absolute else "") + "/".join(parts) or "."
    root = os.open(forest, os.O_PATH)
    try:
        by_kernel = place(forest, ask(linux.openat2, root, path, flags))
        by_hand = place(forest, ask(linux.walk, root, path, flags))
    finally:
        os.close(root)
    assert by_hand == by_kernel


def test_an_old_kernel_gets_the_walk(forest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(linux, "openat2", refuse)
    monkeypatch.setattr(linux, "_have_openat2", True)
    root = os.open(forest, os.O_PATH)
    assert place(forest, linux.open_in_root(root, "/c/a", os.O_PATH)) == str(forest / "a/b/file")
    os.close(root)
    assert not linux._have_openat2


def test_a_refusal_that_means_this_file_is_no_old_kernel(forest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = linux.openat2

    def refuse(dirfd: int, path: str, *args: int, **more: int) -> int:
        if path == "/c":
            raise OSError(errno.EPERM, "not this one", path)
        return real(dirfd, path, *args, **more)

    monkeypatch.setattr(linux, "openat2", refuse)
    root = os.open(forest, os.O_PATH)
    with pytest.raises(PermissionError):
        linux.open_in_root(root, "/c", os.O_PATH)
    os.close(root)
    assert linux._have_openat2


def test_the_walk_leaves_no_descriptor_open(forest: Path) -> None:
    root = os.open(forest, os.O_PATH)
    before = os.listdir("/proc/self/fd")
    for path in ("/c/a", "/etc/a", "/lib/b", "/a/../../../c"):
        place(forest, ask(linux.walk, root, path, os.O_PATH))
    assert os.listdir("/proc/self/fd") == before
    os.close(root)


def test_errors_name_the_object() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        mount_api.open_tree("/nowhere/at/all", 0)
    assert caught.value.filename == "/nowhere/at/all"
    with pytest.raises(OSError) as caught_too:
        mount_api.umount2("/nowhere")
    assert caught_too.value.filename == "/nowhere"


def test_space_holds_what_it_was_given() -> None:
    assert linux.Space.of(b"a\0b").bytes() == b"a\0b"
    assert linux.Space(3).bytes() == bytes(3)
    assert linux.Space.of(b"").bytes() == b""
