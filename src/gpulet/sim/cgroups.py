"""The control groups that simulated Pods leave behind, and a view of them that a low-level runtime can use."""

from __future__ import annotations

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def hierarchies(mountinfo: str | None = None) -> list[tuple[Path, str]]:
    """Every mounted cgroup hierarchy: (mount point, "cgroup" or "cgroup2"). Format: proc_pid_mountinfo(5)."""
    found = []
    for line in (MOUNTS.read_text() if mountinfo is None else mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        kind = after.split()[0]
        if kind in ("cgroup", "cgroup2"):
            found.append((Path(before.split()[4]), kind))
    return found


def remove_tree(name: str) -> None:
    """Removes the folder `name` and those below it from every hierarchy. A group that is in use stays."""
    if not name or "/" in name:
        raise ValueError(f"one folder's name was wanted, not {name!r}: this removes folders")
    for mount, _kind in hierarchies():
        for folder, _folders, _files in os.walk(mount / name, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue
