"""A process in a mount namespace of its own with a root file system mounted at its folder: what a container is
when prestart hooks run. And the device cgroups, and little things that tests of the live way share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpulet import linux, mount_api


@contextmanager
def namespaced(
    root: Path, *, user: bool = False, proc: Path | None = None, over: Mapping[str, Path] | None = None
) -> Iterator[int]:
    """The pid of such a process. user: in a user namespace too, identities shifted by 100000; proc: a folder to be
    mounted at the root's /proc; over: what else is mounted there, by its place below the root."""
    ready, tell = os.pipe()
    mapped, go_on = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(ready)
            os.close(go_on)
            if user:
                linux.unshare(linux.CLONE_NEWUSER)
                os.write(tell, b"u")
                os.read(mapped, 1)
                os.setresgid(0, 0, 0)
                os.setresuid(0, 0, 0)
            linux.unshare(linux.CLONE_NEWNS)
            mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
            mount_api.mount(str(root), str(root), "", mount_api.MS_BIND | mount_api.MS_REC)
            if proc is not None:
                mount_api.mount(str(proc), f"{root}/proc", "", mount_api.MS_BIND)
            for place, source in (over or {}).items():
                mount_api.mount(str(source), f"{root}/{place}", "", mount_api.MS_BIND)
            os.write(tell, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    try:
        if user:
            assert os.read(ready, 1) == b"u"
            Path(f"/proc/{pid}/uid_map").write_text("0 100000 65536\n")
            Path(f"/proc/{pid}/gid_map").write_text("0 100000 65536\n")
            os.write(go_on, b".")
        assert os.read(ready, 1) == b".", "the process could not make its namespaces"
        yield pid
    finally:
        os.close(ready)
        os.close(mapped)
        os.close(go_on)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def mounts(pid: int | str = "self") -> dict[str, set[str]]:
    """Mount point -> options of the topmost mount there, as the process sees them."""
    found = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        found[fields[4]] = set(fields[5].split(","))
    return found


def tree(root: Path) -> dict[str, object]:
    """Everything beneath a folder: path -> link text, or content and mode; to compare before with after."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            info = path.lstat()
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif path.is_file():
                found[key] = (oct(info.st_mode), path.read_bytes())
            else:
                found[key] = oct(info.st_mode)
    return found
