"""Images without a registry: a small root file system, and the environment that a name stands for."""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path

import yaml

from gpulet.sim import rootfs

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def image_env(name: str) -> list[str]:
    """The environment that an image of this name carries, as "NAME=value" in order."""
    for row in yaml.safe_load(files("gpulet.sim").joinpath("images.yaml").read_text()):
        if fnmatchcase(name, row["pattern"]):
            return [PATH, *(f"{key}={value}" for key, value in row["env"].items())]
    return [PATH]


class ImageStore:
    """Root file systems for containers: one per libc is made, each container gets a copy of its own, as containerd's
    `native` snapshotter does. A copy needs no mount, so nothing can be left mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def snapshot(self, target: Path, libc: str = "glibc") -> Path:
        """Copies the image's root file system to `target`, which must not exist."""
        if libc not in self._made:
            self._made[libc] = rootfs.create(self._folder / libc, libc=libc)
        shutil.copytree(self._made[libc], target, symlinks=True)
        return target
