"""A folder in which the runtime's very work is gone through and nothing is changed: each step fails as it would there,
with the kernel's answer, as far as that can be known without trying (a full disk can't).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from gpulet import codec, linux
from gpulet.injection.beneath import Root
from gpulet.injection.held import failed
from gpulet.launch.plan import Bundle, Plan
from gpulet.request.bundle import not_written

_NAMES_NOTHING = "/proc/self/fdinfo"  # stands for a folder that would be made: what is in it has numbers for names
_CAP_CHOWN = 1 << 0  # linux/capability.h


class LookedAt(Root):
    """A root in which everything is looked up as by the runtime. What would be made isn't, and isn't found later."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._new: set[int] = set()  # descriptors of folders that would be made

    def _lock(self) -> bool:
        return True  # whoever is at work beneath it needn't be waited for

    def record(self, what: str, inverse: Callable[[], None]) -> None:
        """Notes a change that is none, which hence must not be taken back."""
        self.done += [what] if what else []

    def _refuse(self, parent: int, name: str) -> None:
        if parent not in self._new:
            refuse_new(parent, name, ours=self._ours)

    def _make_folder(self, parent: int, name: str) -> int:
        self._refuse(parent, name)
        fd = os.open(_NAMES_NOTHING, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._new.add(fd)
        return fd

    def _make_link(self, parent: int, name: str, target: str) -> None:
        try:
            os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            self._refuse(parent, name)
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _swap_in(self, parent: int, name: str, path: str, make: Callable[[str], None]) -> None:
        try:
            self._refuse(parent, name)
        except OSError as error:
            raise failed("write", path, error) from error


def refuse_new(folder: int, name: str, *, ours: bool) -> None:
    """Raises the OSError with which nothing new can take a name in a folder (a descriptor) by this user's hand; the
    causes in the order in which the kernel looks. ours: whether it is to be this user's, else it is given away."""
    number = 0
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        number = errno.EROFS
    elif not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
        number = errno.EACCES
    elif not ours and not _may_chown():
        number = errno.EPERM
    elif linux.crosses_mount(folder, name):
        number = errno.EBUSY  # rename(2)
    if number:
        raise OSError(number, os.strerror(number))


def _may_chown() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        held = next((line.split()[1] for line in file if line.startswith("CapEff:")), "0")
    return bool(int(held, 16) & _CAP_CHOWN)


def refuse_config(bundle: Bundle, plan: Plan) -> None:
    """Raises the BundleError with which the runtime can't put a plan's config.json in the place of the bundle's."""
    if plan.config == bundle.config:
        return
    folder, name = os.path.split(bundle.path)
    try:
        codec.dumps(plan.config)
        own = os.stat(bundle.path)
        held = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            refuse_new(held, name, ours=(own.st_uid, own.st_gid) == (os.geteuid(), os.getegid()))
        finally:
            os.close(held)
    except (OSError, ValueError) as error:
        raise not_written(bundle.path, error) from None
