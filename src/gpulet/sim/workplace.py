"""Folders that are to be filled, whole or not at all; and the demo's.

The demo's is locked as long as its demo lives, so that a later demo can tell a folder that was left by one that was
killed, and take it away with its control groups.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpulet.errors import EngineError, NodeError
from gpulet.sim.cgroups import remove_tree

PREFIX = "gpulet-demo-"
SECOND = "/var/tmp"  # hier(7): the other folder for temporary files, on the disk
# sun_path has 108 bytes (unix(7)); the longest socket below the folder is kubelet/nvidia-mig-1g.10gb.me.all.sock
LONGEST = 108 - len("/kubelet/nvidia-mig-1g.10gb.me.all.sock") - 1


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """A new or empty folder gets filled, or is again as it was, so that the next try isn't refused for what a failed
    one has left. NodeError for what the system refuses."""
    new = not folder.exists()
    try:
        yield
    except BaseException as error:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if new and folder.is_dir():
            folder.rmdir()
        if isinstance(error, OSError):
            where = error.filename2 or error.filename  # of two, the one written to
            seen = f"{where}: {error.strerror}" if where else error.strerror
            raise NodeError(f"{folder} can't be filled", seen=seen) from error
        raise


@contextmanager
def workplace(keep: bool) -> Iterator[Path]:
    """A new folder, gone afterwards unless it is to be kept. What killed demos left is removed first."""
    folder, lock = _locked("gpulet-kept-" if keep else PREFIX)
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked(prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        try:
            parent = _parent()
            sweep(parent)
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            raise EngineError(
                "no folder for the demo",
                seen=f"{error.filename}: {error.strerror}" if error.filename else error.strerror,
                remedy="set TMPDIR to a writable one",
            ) from error
        if len(os.fsencode(folder)) > LONGEST:
            folder.rmdir()
            raise EngineError(
                "the demo's folder",
                seen=f"{folder} ({len(os.fsencode(folder))} bytes)",
                wanted=f"a path of at most {LONGEST} bytes, since sockets lie in it",
                remedy="set TMPDIR to a shorter one",
            )
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:  # another demo may have swept it away before the lock was ours
            return folder, lock
        os.close(lock)


def _parent() -> Path:
    """The folder for temporary files; if nobody has chosen it, one in which nodes open and programs run, as they don't
    where /tmp is mounted as systemd does it (Debian 13)."""
    parent = Path(tempfile.gettempdir())
    chosen = any(name in os.environ for name in ("TMPDIR", "TEMP", "TMP"))
    if not chosen and os.statvfs(parent).f_flag & (os.ST_NODEV | os.ST_NOEXEC):
        return Path(SECOND)
    return parent


def sweep(parent: Path) -> None:
    """Removes the folders of demos that are no more, and their control groups. Those of others are left alone."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its demo lives
            continue
        finally:
            os.close(lock)
