"""One real container by runc, from a root file system and a few edits of its config.json; nothing is left behind."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpulet.engines.launchers import write_launchers
from gpulet.sim import rootfs
from gpulet.sim.cgroups import remove_tree

_PRIVATE = "mount --make-rprivate / && "
_V1 = _PRIVATE + "umount -l /sys/fs/cgroup/unified && "
_V2 = _PRIVATE + "umount -R -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && "
SEEN: dict[str, list[str]] = {
    "": [],
    "v1": ["unshare", "-m", "sh", "-c", _V1 + 'exec "$@"', "sh"],
    "v2": ["unshare", "-m", "sh", "-c", _V2 + 'exec "$@"', "sh"],
}
NAMESPACES = ("pid", "ipc", "uts", "mount", "network")


def started_by_others(program: Path) -> str:
    """The path of a program of ours for a hook in a user namespace. Skips where its Python, or the checkout, may lie in
    a folder of root's own."""
    called = subprocess.run([program, "--help"], user=100000, group=100000, extra_groups=(), capture_output=True)
    if called.returncode:
        pytest.skip("other users can't start our programs from where they lie")
    return str(program)


def config(arguments: list[str], **parts: Any) -> dict[str, Any]:
    """A config.json for a container that may use no device but the basic ones."""
    mounts = [
        ("/proc", "proc", []),
        ("/dev", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        ("/sys", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
    ]
    capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_MKNOD", "CAP_KILL"]
    sets = ("bounding", "effective", "permitted")
    made: dict[str, Any] = {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs", "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": arguments,
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(sets, capabilities),
        },
        "mounts": [{"destination": d, "type": t, "source": t, "options": o} for d, t, o in mounts],
        "linux": {
            "namespaces": [{"type": name} for name in NAMESPACES],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        },
    }
    for name, value in parts.items():
        made[name] = {**made[name], **value} if isinstance(made.get(name), dict) else value
    return made


class Bundle:
    """A bundle in a folder, with gpulet's programs beside it."""

    def __init__(self, folder: Path, libc: str = "glibc") -> None:
        if not shutil.which("runc"):
            pytest.skip("runc is not installed")
        self.folder = folder
        self.bundle = folder / "bundle"
        self.root = rootfs.create(self.bundle / "rootfs", libc)
        self.programs = write_launchers(folder / "bin")
        self.id = f"gpulet-test-{secrets.token_hex(4)}"

    def hook(self, name: str, script: str) -> dict[str, Any]:
        """A hook that is a shell script; $PID is the container's process, standard input its state."""
        path = self.folder / name
        head = '#!/bin/sh\nSTATE=$(cat)\nPID=$(echo "$STATE" | sed -n \'s/.*"pid": *\\([0-9]*\\).*/\\1/p\')\n'
        path.write_text(head + script)
        path.chmod(0o755)
        return {"path": str(path), "args": [name], "env": ["PATH=/usr/bin:/bin:/usr/sbin:/sbin"]}

    def run(self, made: dict[str, Any], runtime: str = "runc", hierarchy: str = "") -> subprocess.CompletedProcess[str]:
        """Runs the container to its end. hierarchy: "v1" or "v2", for a machine that seems to have that one alone."""
        if not shutil.which(runtime):
            pytest.skip(f"{runtime} is not installed")
        made["linux"]["cgroupsPath"] = f"/{self.id}"
        (self.bundle / "config.json").write_text(json.dumps(made))
        base = [
            runtime,
            "--root",
            str(self.folder / "state"),
            *(["--cgroup-manager=cgroupfs"] if runtime == "crun" else []),
        ]
        try:
            command = [*SEEN[hierarchy], *base, "run", "--bundle", str(self.bundle), self.id]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        finally:
            subprocess.run([*base, "delete", "--force", self.id], capture_output=True)
            remove_tree(self.id)
