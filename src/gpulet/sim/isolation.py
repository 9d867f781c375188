"""A mount namespace of our own for the demo, so that no mount can outlive it, and the view of the control groups that
the low-level runtime needs. What can't be had is told, not forced.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpulet import linux
from gpulet.sim.cgroups import hierarchies

UNIFIED = Path("/sys/fs/cgroup/unified")


def enter(low_level: str) -> str:
    """Moves this process into a mount namespace of its own. Gives "" where containers can be started, else why not.

    Call it before any thread is started: a mount namespace belongs to the thread that asks for it.
    """
    if os.geteuid() != 0:
        return "device nodes, mounts and namespaces are root's: run it as root (sudo)"
    if shutil.which(low_level) is None:
        return f"no {low_level} in PATH: apt-get install {os.path.basename(low_level)}"
    try:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    except OSError as error:
        return f"this machine allows no mount namespace ({error.strerror}): run it outside a restricted container"
    if os.path.basename(low_level) == "crun":
        _pure_cgroups()
    return ""


def _pure_cgroups() -> None:
    """crun refuses a machine with both cgroup versions (hybrid): in our own view we take the second away."""
    kinds = {kind for mount, kind in hierarchies() if mount.is_relative_to("/sys/fs/cgroup")}
    if kinds == {"cgroup", "cgroup2"} and UNIFIED.is_mount():
        linux.umount2(str(UNIFIED), linux.MNT_DETACH)
