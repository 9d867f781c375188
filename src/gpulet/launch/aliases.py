"""Where a mount's destination really is: an image's links may lead /lib to /usr/lib, and so what is mounted there
covers what was written by the other name. Loaded by the programs in launch/ where a container has a mount that may.
"""

from __future__ import annotations

import os

from gpulet import linux
from gpulet.launch.plan import with_above

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def first_within(root: str, destinations: Iterable[str], places: Iterable[str]) -> str:
    """The first of the destinations that, with all links of the root file system followed, is one of the places or a
    folder above one; "" where none is, or the root can't be opened."""
    try:
        held = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # told by who is to write there
        return ""
    try:
        folders = {place.rpartition("/")[0] for place in places}
        led = {folder: real(held, folder) for folder in folders}
        ends = with_above(
            f"{led[folder].rstrip('/')}/{name}" for folder, _, name in (p.rpartition("/") for p in places)
        )
        return next((destination for destination in destinations if real(held, destination) in ends), "")
    finally:
        os.close(held)


def real(root: int, path: str) -> str:
    """A path beneath the root (a descriptor) without links; what isn't there yet is named as it will be made."""
    at, rest = path, ""
    while at:
        try:
            found = linux.open_in_root(root, at, os.O_PATH)
        except OSError:
            at, _, name = at.rpartition("/")
            rest = f"/{name}{rest}"
            continue
        try:
            top, end = os.readlink(f"/proc/self/fd/{root}"), os.readlink(f"/proc/self/fd/{found}")
        finally:
            os.close(found)
        if end != top and not end.startswith(f"{top.rstrip('/')}/"):
            break  # renamed away while we look
        return end.removeprefix(top.rstrip("/")) + rest or "/"
    return path
