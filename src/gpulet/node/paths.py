"""Paths beneath a root that isn't "/": symbolic links in it are followed as if one had changed root to it.

Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

_MOST_LINKS = 40  # as many as the kernel follows, path_resolution(7)


def below(root: str, path: str) -> str:
    """`path`, which begins with a slash, beneath `root` as a host path."""
    return path if root in ("", "/") else root.rstrip("/") + path


def resolve(root: str, path: str) -> str:
    """`path` with all symbolic links followed beneath `root`, as a path below the root.

    Neither an absolute link nor ".." leads out of the root. What doesn't exist is kept as it is written. Raises
    OSError (ELOOP) where links go in circles.
    """
    pending = [part for part in reversed(path.split("/")) if part not in ("", ".")]
    done: list[str] = []
    links = 0
    while pending:
        part = pending.pop()
        if part == "..":
            if done:
                done.pop()
            continue
        here = "/" + "/".join([*done, part])
        try:
            text = os.readlink(below(root, here))
        except OSError:  # not a link, or nothing there
            done.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(40, "too many symbolic links", below(root, path))  # errno.ELOOP
        if text.startswith("/"):
            done.clear()
        pending.extend(piece for piece in reversed(text.split("/")) if piece not in ("", "."))
    return "/" + "/".join(done)
