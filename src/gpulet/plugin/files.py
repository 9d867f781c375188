"""Reading files that somebody else puts somewhere: a pipe, a device or a file without an end holds nobody up."""

from __future__ import annotations

import os
import stat

MOST = 4 << 20  # bytes; the largest file that we read, the checkpoint of a kubelet with thousands of devices, has less


def read(path: str, most: int = MOST) -> str:
    """The text of a regular file. Raises OSError, with a `strerror` that says what is there instead, or ValueError
    where it is no UTF-8."""
    # a pipe is opened without waiting for who writes to it
    held = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(held).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, "is a folder, not a file", path)  # EISDIR
        if not stat.S_ISREG(mode):
            raise OSError(22, "is a pipe or a device, not a file", path)  # EINVAL
        with open(held, "rb", closefd=False) as stream:
            data = stream.read(most + 1)
    finally:
        os.close(held)
    if len(data) > most:
        raise OSError(27, f"has more than {most >> 20} MiB", path)  # EFBIG
    return data.decode()
