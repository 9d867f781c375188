"""How a CDI specification calls for the work in a container's root file system: by one hook of ours, or by NVIDIA's.

`prepare`, which does everything in one process, is known to our program alone. NVIDIA's pass over a hook that they
don't know with a warning, and the container starts without the driver's links and loader cache.
"""

from __future__ import annotations

import os

from gpulet.injection.cdi_hooks import OURS, hook_args, less
from gpulet.injection.model import RootfsWork
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

# An engine gives a hook the container's environment where the hook has none of its own, and that is the image's.
_ENV = ("GPULET_HOOK=1",)
_LINKS = 40  # as many as the kernel follows


def _name(path: str) -> str:
    """A program's base name; wrappers call the program that they stand before NAME.real."""
    return os.path.basename(path).removesuffix(".real")


def as_ours(path: str) -> str:
    """The hook program's path under our name, where it is a link to ours on this machine; else `path` itself.

    A spec then names the program that it was made for, whatever the link leads to later.
    """
    at = path
    for _ in range(_LINKS):
        if _name(at) == OURS:
            return at
        try:
            at = os.path.join(os.path.realpath(os.path.dirname(at)), os.readlink(at))
        except OSError:  # no link, or not on this machine
            break
    return path


class HookCalls(Value):
    """path: the hook program on the host, whose base name says what it knows; without: NVIDIA's names of hooks whose
    work is not to be done, or "all"; ldconfig: the host's, where NVIDIA's program shall take another than its default.
    """

    path: str = f"/usr/local/bin/{OURS}"  # where `gpulet install` puts it unless told
    without: tuple[str, ...] = ()
    ldconfig: str = ""

    def in_one(self) -> bool:
        """Whether the program does everything in one process. Its file may be out of sight here: its name decides."""
        return _name(self.path) == OURS

    def record(self, *words: str) -> dict[str, Any]:
        """One entry of hooks: a hook's name and its flags. nvidia-ctk has its hooks below a command of its own."""
        program = [os.path.basename(self.path), *(["hook"] if _name(self.path) == "nvidia-ctk" else [])]
        return {"hookName": "createContainer", "path": self.path, "args": [*program, *words], "env": list(_ENV)}

    def records(self, work: RootfsWork, *, profile: bool = False) -> list[dict[str, Any]]:
        """The hooks that do the work. profile: and the application profile, by the GPUs in the container's /dev."""
        work = less(work.replace(profile_minors=()), self.without)
        profile = profile and not {"all", "update-application-profile"} & {*self.without}
        if not self.in_one():
            return [self.record(*words) for words in _single(work, profile, self.ldconfig)]
        return [self.record(*hook_args("", work, profile=profile)[1:])] if profile or not work.empty() else []


def _repeated(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


def _single(work: RootfsWork, profile: bool, ldconfig: str) -> list[list[str]]:
    """The same as hooks of NVIDIA's programs, each with its flags, in the order and spelling of nvidia-ctk."""
    versions = {
        "--host-driver-version": work.host_driver,
        "--host-cuda-version": work.host_cuda,
        "--cuda-compat-container-root": work.compat_folder if work.compat_folder != RootfsWork.compat_folder else "",
    }
    hooks: list[list[str]] = []
    if work.links:
        hooks.append(["create-symlinks", *_repeated("--link", (f"{link.target}::{link.path}" for link in work.links))])
    if work.host_driver or work.host_cuda:
        hooks.append(["enable-cuda-compat", *(f"{flag}={value}" for flag, value in versions.items() if value)])
    if work.folders:
        where = ["--ldconfig-path", ldconfig] if ldconfig else []
        hooks.append(["update-ldcache", *where, *_repeated("--folder", work.folders)])
    if work.freeze_device_nodes:
        hooks.append(["disable-device-node-modification"])
    if profile:
        hooks.append(["update-application-profile"])
    return hooks
