"""The driver's parameters as a container sees them: with the making of device nodes switched off, so that nothing
inside makes nodes of GPUs that the container wasn't given.
"""

from __future__ import annotations

import os

from gpulet.injection.beneath import Root
from gpulet.injection.held import failed

PARAMS = "/proc/driver/nvidia/params"
MODIFY, FROZEN = "ModifyDeviceFiles: 1", "ModifyDeviceFiles: 0"


def params(proc: str = "/proc") -> bytes | None:
    """The driver's parameters with the making of device nodes switched off; None where there is nothing to switch."""
    try:
        with open(f"{proc}{PARAMS.removeprefix('/proc')}", encoding="utf-8") as file:
            lines = file.read().split("\n")
    except OSError:
        return None
    if MODIFY not in lines:
        return None
    lines[lines.index(MODIFY)] = FROZEN
    return "\n".join(lines).encode()


def cover(root: Root, data: bytes) -> None:
    """Covers the container's /proc/driver/nvidia/params, in this process's mount namespace, by a read-only file.

    The file lies on a file system of its own that nothing else shows, so neither the root nor the host gains a file.
    """
    from gpulet import mount_api  # the runtime only asks for `params`

    hidden = mount_api.MOUNT_ATTR_NOSUID | mount_api.MOUNT_ATTR_NODEV | mount_api.MOUNT_ATTR_NOEXEC
    target = folder = descriptors = tree = cover = -1
    try:
        try:
            target = root.open(PARAMS, os.O_PATH)
            folder = root.open(PARAMS.rpartition("/")[0], os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            return  # the container's /proc doesn't show the driver
        descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        tree = mount_api.new_file_system("tmpfs", (("mode", "0555"), ("size", "64k")), hidden)
        place(tree, "params", data)
        # Until Linux 6.15 only what is mounted can be cloned: so it is, for a moment, over the driver's folder.
        mount_api.move_mount(tree, folder, PARAMS)
        try:
            cover = mount_api.open_tree("params", dirfd=tree)
        finally:
            mount_api.detach(tree, descriptors)
        mount_api.mount_setattr(cover, hidden | mount_api.MOUNT_ATTR_RDONLY, propagation=mount_api.MS_PRIVATE)
        mount_api.move_mount(cover, target, PARAMS)
    except OSError as error:
        raise failed("mount", PARAMS, error) from error
    finally:
        for fd in (target, folder, descriptors, tree, cover):
            if fd >= 0:
                os.close(fd)
    root.record(f"freeze {PARAMS}", lambda: None)


def place(folder: int, name: str, data: bytes, mode: int = 0o444) -> None:
    """Makes a file in a folder of our own making. Raises OSError."""
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with open(fd, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
