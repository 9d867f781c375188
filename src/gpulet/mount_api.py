"""The system calls about mounts that Python lacks: mount(2), umount2(2), and those by descriptor (Linux 5.2 and 5.12).
They raise OSError as linux.py's do. Numbers and names are those of linux/mount.h and linux/fcntl.h.
"""

from __future__ import annotations

import os
import struct

from gpulet import linux

AT_RECURSIVE = 0x8000
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8
OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_EMPTY_PATH = 0x40
FSOPEN_CLOEXEC = 0x1
FSCONFIG_SET_STRING = 1
FSCONFIG_CMD_CREATE = 6
FSMOUNT_CLOEXEC = 0x1
MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
# See linux.py on system calls' numbers.
SYS_open_tree = 428
SYS_move_mount = 429
SYS_fsopen = 430
SYS_fsconfig = 431
SYS_fsmount = 432
SYS_mount_setattr = 442


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    text = os.fsencode(data) if data else None
    linux.libc().call("mount", os.fsencode(source), os.fsencode(target), os.fsencode(kind), flags, text, name=target)


def umount2(target: str, flags: int = MNT_DETACH | UMOUNT_NOFOLLOW) -> None:
    """umount2(2)."""
    linux.libc().call("umount2", os.fsencode(target), flags, name=target)


def detach(mounted: int, descriptors: int) -> None:
    """Unmounts, lazily, the mount that a descriptor is the top of.

    descriptors: /proc/self/fd, opened by this very process: after it joined another mount namespace, there may be
    no /proc of ours to name the descriptor by.
    """
    here = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        os.fchdir(descriptors)
        umount2(str(mounted), MNT_DETACH)
    finally:
        os.fchdir(here)
        os.close(here)


def open_tree(path: str, flags: int = OPEN_TREE_CLONE, dirfd: int = linux.AT_FDCWD) -> int:
    """open_tree(2): with OPEN_TREE_CLONE a detached bind mount of path, to be placed by move_mount."""
    return linux.syscall(SYS_open_tree, dirfd, os.fsencode(path), flags | OPEN_TREE_CLOEXEC, name=path)


def move_mount(tree: int, target: int, name: str = "") -> None:
    """move_mount(2) by two descriptors: the detached mount, and the file or folder that it shall cover."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    linux.syscall(SYS_move_mount, tree, b"", target, b"", flags, name=name)


def mount_setattr(tree: int, attr_set: int, attr_clr: int = 0, propagation: int = 0, flags: int = 0) -> None:
    """mount_setattr(2) on a mount's descriptor: MOUNT_ATTR_* to set and to clear, and MS_PRIVATE, MS_SLAVE or 0."""
    attributes = struct.pack("=QQQQ", attr_set, attr_clr, propagation, 0)  # struct mount_attr
    size = len(attributes)
    linux.syscall(SYS_mount_setattr, tree, b"", flags | linux.AT_EMPTY_PATH, attributes, size, name="mount attributes")


def new_file_system(kind: str, options: tuple[tuple[str, str], ...], attributes: int) -> int:
    """A detached mount of a new file system (fsopen, fsconfig, fsmount)."""
    context = linux.syscall(SYS_fsopen, kind.encode(), FSOPEN_CLOEXEC, name=kind)
    try:
        for key, value in options:
            text = f"{kind} {key}={value}"
            linux.syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, key.encode(), value.encode(), 0, name=text)
        linux.syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, None, None, 0, name=kind)
        return linux.syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes, name=kind)
    finally:
        os.close(context)
