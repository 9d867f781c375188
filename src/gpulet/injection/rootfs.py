"""The work inside a container's root file system: links, the loader's cache, forward compatibility, the profile file.

Done before the container's first process exists, beneath the root by descriptor (beneath.py), so nothing of the image
is executed and nothing outside the root is touched. Doing it twice changes nothing more.
"""

from __future__ import annotations

import os
import stat

from gpulet.injection import loader
from gpulet.injection.beneath import Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpulet.injection.model import Mount, RootfsWork

PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"


def prepare(root: str, work: RootfsWork, mounts: Sequence[Mount] = ()) -> tuple[str, ...]:
    """Carries out the work beneath the folder `root` and answers what was changed, in words.

    mounts: the injection's mounts; those of the kinds library and library32 enter the loader's cache by their soname,
    which is read from the host's file, as they are not yet mounted. Without any, what is mounted in work.folders
    already is taken, else everything that lies there.
    Freezing the driver's device nodes needs a mount and is left to frozen.py and the caller.
    Raises StepFailed, and then nothing is changed.
    """
    libraries = loader.libraries_of(mounts)
    with Root(root) as held:
        carry_out(held, work, libraries)
        return tuple(held.done)


def carry_out(
    root: Root,
    work: RootfsWork,
    libraries: Sequence[loader.Library] = (),
    ldconfig: Callable[[Sequence[str]], bool] | None = None,
) -> None:
    """The same on a root that is open already, with the libraries that were read from the host's files.

    ldconfig: writes the loader's cache with the folders given first, in place of our merging, unless it answers False.
    """
    for link in work.links:
        root.symlink(link.target, link.path)
    weighed = bool(work.host_driver or work.host_cuda)
    if weighed:
        first = loader.compat_folder(root, work)
    else:  # where each step is a hook of its own, an earlier one has decided
        first = (root.read(loader.COMPAT) or b"").decode("utf-8", "surrogateescape").strip()
    if work.folders or (weighed and (first or root.exists(loader.COMPAT))):
        loader.update(root, work, first, libraries, ldconfig)
    if work.profile_minors:
        write_profile(root, work.profile_minors)


# -- the driver's own files


def write_profile(root: Root, minors: Iterable[int]) -> None:
    """Restricts EGL to the container's GPUs (NVIDIA driver README, "application profiles")."""
    root.write(PROFILE, profile(minors), 0o444)


def profile(minors: Iterable[int]) -> bytes:
    """The application profile for GPU minors; the driver's mask has room for 64."""
    mask = 0
    for minor in minors:
        mask |= 1 << minor if 0 <= minor < 64 else 0
    settings = f'"settings": ["EGLVisibleDGPUDevices", {mask:#x}]'
    rule = '{"pattern": [], "profile": "_container_"}'
    return f'{{"profiles": [{{"name": "_container_", {settings}}}], "rules": [{rule}]}}'.encode()


def visible_minors(root: Root) -> tuple[int, ...]:
    """The minors of the GPU nodes that lie in the root's /dev."""
    found = []
    for name in root.names("/dev"):
        minor = name.removeprefix("nvidia")
        if minor != name and minor.isascii() and minor.isdigit():
            fd = root.open(f"/dev/{name}", os.O_PATH)
            try:
                if stat.S_ISCHR(os.fstat(fd).st_mode):
                    found.append(int(minor))
            finally:
                os.close(fd)
    return tuple(sorted(found))
