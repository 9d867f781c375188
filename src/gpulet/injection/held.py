"""A container's root file system held by descriptor, to look at: no path of it is resolved by the host's rules.

Every link in it may lead anywhere, so a path is opened by one openat2 with the root as its root; devices and pipes of
an image stay unopened.
"""

from __future__ import annotations

import os
import stat

from gpulet import codec, linux
from gpulet.errors import StepFailed

LIMIT = 16 << 20  # bytes; nothing that we read whole from an image has a reason to be larger
ENOENT, ENOTDIR, EROFS, ELOOP = 2, 20, 30, 40
_REMEDY = {
    EROFS: "the root file system is read-only: prepare it before it becomes so, or mount what is missing",
    linux.ENOSYS: "mounting into a live container needs Linux 5.12; the runtime's mode cdi or jit-cdi doesn't",
}


def failed(step: str, target: str, error: OSError) -> StepFailed:
    """The error of a step, from the kernel's answer."""
    number = error.errno or 0
    return StepFailed(step, target, number, error.strerror or str(error), _REMEDY.get(number, ""))


class Held:
    """A root file system. fd: its folder's descriptor, which whoever made this closes."""

    def __init__(self, path: str, fd: int = -1) -> None:
        """path: the root's folder; fd: a descriptor of it where the caller has one, which is taken over."""
        try:
            self.fd = fd if fd >= 0 else os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise failed("open root file system", path, error) from error

    def open(self, path: str, flags: int) -> int:
        """A descriptor for path in root. Raises OSError."""
        return linux.open_in_root(self.fd, path, flags | os.O_CLOEXEC)

    def exists(self, path: str) -> bool:
        """Whether path leads to something."""
        try:
            os.close(self.open(path, os.O_PATH))
        except OSError:
            return False
        return True

    def open_file(self, path: str, follow: bool = True) -> int | None:
        """A descriptor to read a regular file, None where there is none: an image's devices and pipes stay unopened."""
        extra = 0 if follow else os.O_NOFOLLOW
        try:
            seen = self.open(path, os.O_PATH | extra)
            kind = os.fstat(seen).st_mode
            os.close(seen)
            if not stat.S_ISREG(kind):
                return None
            fd = self.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | extra)
        except OSError as error:
            if error.errno in (ENOENT, ENOTDIR, ELOOP):
                return None
            raise failed("read", path, error) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # swapped in between
            os.close(fd)
            return None
        return fd

    def read(self, path: str) -> bytes | None:
        """The content of a regular file, None where there is none."""
        fd = self.open_file(path)
        if fd is None:
            return None
        data = content_of(fd)
        if len(data) > LIMIT:
            raise StepFailed("read", path, reason=f"more than {LIMIT} bytes")
        return data

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none where it isn't there."""
        try:
            fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in (ENOENT, ENOTDIR, ELOOP):
                return []
            raise failed("list", path, error) from error
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)


def link_text(parent: int, name: str) -> str | None:
    """The text of a link, None where there is none."""
    try:
        return os.readlink(name, dir_fd=parent)
    except OSError:
        return None


def content_of(fd: int) -> bytes:
    """What an open file holds, one byte more than LIMIT at most; closes it."""
    try:
        return codec.read_all(fd, min(os.fstat(fd).st_size, LIMIT), LIMIT + 1)
    finally:
        os.close(fd)
