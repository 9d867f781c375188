"""Namespaces of the demo's own, so that neither a mount nor a process can outlive it, however it ends; and the view of
the control groups that the low-level runtime needs. What can't be had is told, not forced.

The process that a person started becomes a keeper: it waits, and hands signals on. The demo itself is the first
process of a PID namespace: when that ends, the kernel ends every container and the device plugin with it
(pid_namespaces(7)).
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

from gpulet import linux, mount_api
from gpulet.sim.cgroups import hierarchies

UNIFIED = Path("/sys/fs/cgroup/unified")
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# linux/capability.h: what making device nodes, and runc for an ordinary container, can't do without
NEEDED = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_ADMIN": 21,
    "CAP_MKNOD": 27,
}


def enter(low_level: str) -> str:
    """Goes on in namespaces of our own. Gives "" where containers can be started, else why not.

    Where it gives "", it returns in a new process; the one that called waits, and ends with the other's exit code. Call
    it before any thread is started and before anything is made that must be taken away again.
    """
    if os.geteuid() != 0:
        return "device nodes, mounts and namespaces are root's: run it as root (sudo)"
    missing = lacking(Path("/proc/self/status").read_text(), Path("/proc/self/uid_map").read_text())
    if missing:
        return missing
    if shutil.which(low_level) is None:
        return f"no {low_level} in PATH: apt-get install {os.path.basename(low_level)}"
    try:
        # a try in a process of its own: a mount namespace can't be left again where the rest then fails
        _probe()
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
    except OSError as error:
        return f"this machine allows no namespaces and mounts ({error.strerror}): run it outside a restricted container"
    child = os.fork()
    if child:
        _keep(child)
    _become_first()
    if os.path.basename(low_level) == "crun":
        _pure_cgroups()
    return ""


def lacking(status: str, uid_map: str) -> str:
    """What root lacks here for containers with device nodes, "" for nothing. Formats: proc_pid_status(5),
    user_namespaces(7)."""
    if uid_map.split() != ["0", "0", "4294967295"]:
        return "root of a user namespace may make no device nodes: run it as the machine's root"
    held = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    names = [name for name, number in NEEDED.items() if not held >> number & 1]
    return f"root lacks {', '.join(names)}: run it outside a restricted container" if names else ""


def _probe() -> None:
    """Raises OSError where the namespaces and their mounts can't be had. Changes nothing here."""
    child = os.fork()
    if child == 0:
        code = 0
        try:
            linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
            mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
            inner = os.fork()
            if inner == 0:
                mount_api.mount("proc", "/proc", "proc", mount_api.MS_NOSUID | mount_api.MS_NODEV | mount_api.MS_NOEXEC)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
        except OSError as error:
            code = error.errno or 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise OSError(code, os.strerror(code) if code > 0 else "a first try was ended")


def _keep(child: int) -> None:
    """Waits for the demo, hands signals on to it, and ends as it ended."""

    def hand_on(number: int, _frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in HANDED_ON:
        signal.signal(number, hand_on)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _become_first() -> None:
    linux.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the keeper alone, which hands it on once
    mount_api.mount("proc", "/proc", "proc", mount_api.MS_NOSUID | mount_api.MS_NODEV | mount_api.MS_NOEXEC)


def _pure_cgroups() -> None:
    """crun refuses a machine with both cgroup versions (hybrid): in our own view we take the second away."""
    kinds = {kind for mount, kind in hierarchies() if mount.is_relative_to("/sys/fs/cgroup")}
    if kinds == {"cgroup", "cgroup2"} and UNIFIED.is_mount():
        mount_api.umount2(str(UNIFIED), mount_api.MNT_DETACH)
