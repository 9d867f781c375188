"""The demo's folder. It is locked as long as its demo lives, so that a later demo can tell a folder that was left by
one that was killed, and take it away with its control groups.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpulet.errors import EngineError
from gpulet.sim.cgroups import remove_tree

PREFIX = "gpulet-demo-"
# sun_path has 108 bytes (unix(7)); the longest socket below the folder is kubelet/nvidia-mig-1g.10gb.me.all.sock
LONGEST = 108 - len("/kubelet/nvidia-mig-1g.10gb.me.all.sock") - 1


@contextmanager
def workplace(keep: bool) -> Iterator[Path]:
    """A new folder, gone afterwards unless it is to be kept. What killed demos left is removed first."""
    sweep(Path(tempfile.gettempdir()))
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
            folder = Path(tempfile.mkdtemp(prefix=prefix))
        except OSError as error:
            raise EngineError(
                "no folder for the demo",
                seen=f"{error.filename or tempfile.gettempdir()}: {error.strerror}",
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
