"""Keeps the folders of what is laid in the state folder (see beside.py) small, without a running container's noticing.

What nobody has asked for since a day goes. A file may: where it is mounted it lives on without its name. A folder of
links is emptied, so it stays where a mount leads to it. What was asked for lately may stand in a config.json whose
container hasn't been started yet. Loaded by the programs in launch/, seldom.
"""

from __future__ import annotations

import os
import time

MANY = 64  # things between two looks: looking costs milliseconds where there are many containers
AGE = 86400.0  # seconds


def sweep_sometimes(folder: str) -> None:
    """The same as `sweep`, once in MANY times. To be called after something new was laid there; never raises."""
    try:
        if len(os.listdir(folder)) % MANY == 0:
            sweep(folder, time.time() - AGE)
    except OSError:
        pass


def sweep(folder: str, before: float) -> None:
    """Takes away what nobody has asked for since a time (as time.time() gives it), and what killed runs left half made.
    What isn't of our making, or another sweep has just taken, hinders nothing. Raises OSError for no folder."""
    links: list[str] = []
    for name in os.listdir(folder):
        try:
            info = os.lstat(f"{folder}/{name}")
            if info.st_mtime >= before:
                continue
            if info.st_mode & 0o170000 == 0o040000:
                links.append(name)
            else:
                os.unlink(f"{folder}/{name}")
        except OSError:
            pass
    mounted = _mount_tables() if links else ""
    for name in links:
        if name.partition(".")[0] not in mounted:
            try:
                _remove(f"{folder}/{name}")
            except OSError:
                pass


def _remove(path: str) -> None:
    """Under another name, so that who lays the same anew meanwhile finds all of it or nothing. A folder that holds more
    than links is none of ours, and left as it is. Raises OSError."""
    with os.scandir(path) as entries:
        if not all(entry.is_symlink() for entry in entries):
            return
    gone = path if "." in path.rpartition("/")[2] else f"{path}.{os.getpid()}"
    os.rename(path, gone)
    for name in os.listdir(gone):
        os.unlink(f"{gone}/{name}")
    os.rmdir(gone)


def _mount_tables() -> str:
    """The text of every mount namespace's table. A process that we may not look into runs in no container of ours:
    such have no more rights than the runtime that made them."""
    tables: dict[str, str] = {}
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            space = os.readlink(f"/proc/{pid}/ns/mnt")
            if space not in tables:
                with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                    tables[space] = file.read()
        except OSError:  # or it has ended
            continue
    return "".join(tables.values())
