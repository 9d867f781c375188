"""The system calls that Python lacks, through libc. The only module that knows it.

Every call raises OSError with the kernel's errno and the name of the object concerned. libc is looked up by the first
call, so a program of launch/ that needs none of these doesn't pay for it.
Numbers and names are those of the kernel's headers: linux/openat2.h, linux/mount.h, linux/fcntl.h, linux/sched.h.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# linux/fcntl.h
AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
# linux/openat2.h
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
# linux/mount.h
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
# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
# System calls that came after the architectures agreed on one table have one number everywhere.
SYS_open_tree = 428
SYS_move_mount = 429
SYS_fsopen = 430
SYS_fsconfig = 431
SYS_fsmount = 432
SYS_openat2 = 437
SYS_mount_setattr = 442
SYS_bpf = {"x86_64": 321, "aarch64": 280, "ppc64le": 361, "riscv64": 280, "s390x": 351}

ELOOP, ENOSYS, EPERM, ENOTDIR, EXDEV, EAGAIN, EINVAL = 40, 38, 1, 20, 18, 11, 22
LOCK_EX, LOCK_NB = 2, 4
MAX_LINKS = 40  # as many as the kernel follows in one look-up


class _Libc:
    """libc's functions, called with ints (as long), bytes (as pointer) and None; syscall answers a long, others an int.

    `ctypes` itself takes 4 ms to import, most of it for what isn't needed here, so this uses the C module beneath it;
    the names used of `_ctypes` are those that ctypes/__init__.py uses, unchanged since Python 2.5.
    """

    def __init__(self) -> None:
        import _ctypes

        class Word(_ctypes._SimpleCData):  # type: ignore[type-arg]
            _type_ = "P"  # a pointer takes ints, bytes and None; without a type an int would pass as 32 bits

        class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
            _type_ = "l"

        class Function(_ctypes.CFuncPtr):
            _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
            _restype_ = Long

        self._simple: Any = _ctypes._SimpleCData
        self._handle = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # None is this program itself
        self._symbol = _ctypes.dlsym
        self._word, self._function = Word, Function
        self.errno = _ctypes.get_errno
        self.address = _ctypes.addressof
        self._known: dict[str, Any] = {}

    def simple(self, code: str) -> Any:
        """The C type of a letter, as in `array`. Made when it is asked for: openat2 needs none."""
        return type(self._simple)(code, (self._simple,), {"_type_": code})

    def call(self, function: str, *args: int | bytes | None, name: object = None) -> int:
        """Calls a function, which always takes as many arguments. Raises OSError, with `name`, where it answers less
        than 0."""
        if function not in self._known:
            found: Any = self._function(self._symbol(self._handle, function))
            found.argtypes = (self._word,) * len(args)
            if function != "syscall":
                found.restype = self.simple("i")
            self._known[function] = found
        result: int = self._known[function](*args)
        if result < 0:
            number = self.errno()
            raise OSError(number, os.strerror(number), name)
        return result


_loaded: list[_Libc] = []
_UNUSED = (0,) * 6  # as many arguments as a system call has


def _libc() -> _Libc:
    if not _loaded:
        _loaded.append(_Libc())
    return _loaded[0]


def syscall(number: int, *args: int | bytes | None, name: object = None) -> int:
    """A system call by number; bytes are passed as a pointer to them. name is for the error."""
    return _libc().call("syscall", number, *args, *_UNUSED[len(args) :], name=name)


class Space:
    """Memory that the kernel may write to, and whose address it can be told."""

    def __init__(self, size: int) -> None:
        libc = _libc()
        self._buffer: Any = (libc.simple("c") * max(size, 1))()
        self._size = size
        self.address: int = libc.address(self._buffer)

    @classmethod
    def of(cls, data: bytes) -> Space:
        """Memory that holds data."""
        space = cls(len(data))
        space._buffer.raw = data or b"\0"
        return space

    def bytes(self) -> bytes:
        """What is in it."""
        data: bytes = self._buffer.raw[: self._size]
        return data


def bpf(command: int, attributes: bytes, name: object = None) -> tuple[int, bytes]:
    """bpf(2) with its attributes packed: the result, and the attributes as the kernel left them."""
    machine = os.uname().machine
    if machine not in SYS_bpf:
        raise OSError(ENOSYS, f"bpf's number is not known for {machine}", name)
    space = Space.of(attributes)
    result = syscall(SYS_bpf[machine], command, space.address, len(attributes), name=name)
    return result, space.bytes()


# -- opening beneath a root


def openat2(
    dirfd: int, path: str, flags: int, mode: int = 0, resolve: int = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
) -> int:
    """openat2(2): a descriptor, close-on-exec. With RESOLVE_IN_ROOT, dirfd is the root of every link and ".."."""
    flags |= os.O_CLOEXEC
    if not flags & os.O_CREAT:
        mode = 0  # the kernel refuses a mode without O_CREAT
    how = struct.pack("=QQQ", flags, mode, resolve)  # struct open_how
    for _ in range(64):
        try:
            return syscall(SYS_openat2, dirfd, os.fsencode(path), how, len(how), name=path)
        except BlockingIOError:  # EAGAIN: something was renamed while "..", in root, was resolved
            continue
    raise OSError(EAGAIN, "the path is being changed all the time", path)


def _parts(path: str) -> list[str]:
    """A path's names, last first. A slash at the end counts as ".": what is before it is followed."""
    return [part for part in reversed((f"{path}." if path.endswith("/") else path).split("/")) if part]


def walk(root: int, path: str, flags: int, mode: int = 0) -> int:
    """What openat2 with RESOLVE_IN_ROOT does, for kernels before 5.6: one component at a time, by descriptor.

    ".." goes back to a descriptor that was held, never to the kernel's parent, so a folder that is moved
    away meanwhile leads nowhere. Links are read and resolved here, so magic links are only text.
    """
    held = [os.dup(root)]
    todo = _parts(path)
    links = 0
    try:
        while todo:
            name = todo.pop()
            if name == ".":
                continue
            if name == "..":
                if len(held) > 1:
                    os.close(held.pop())
                continue
            last = not todo
            try:
                text = os.readlink(name, dir_fd=held[-1])
            except OSError as error:
                if error.errno != EINVAL and not (last and error.errno == 2):  # not a link; or to be created
                    raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
                text = None
            if text is None or (last and flags & os.O_NOFOLLOW):
                if last:
                    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=held[-1])
                held.append(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=held[-1]))
                continue
            links += 1
            if links > MAX_LINKS:
                raise OSError(ELOOP, os.strerror(ELOOP), path)
            if text.startswith("/"):
                while len(held) > 1:
                    os.close(held.pop())
            todo += _parts(text)
        return os.open(".", flags | os.O_CLOEXEC, mode, dir_fd=held[-1])
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        for fd in held:
            os.close(fd)


_have_openat2 = True


def open_in_root(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens path as a process would whose root is the folder `root` (a descriptor); nothing outside is ever reached."""
    global _have_openat2
    if _have_openat2:
        try:
            return openat2(root, path, flags, mode)
        except OSError as error:
            # Old kernels say ENOSYS; old seccomp filters of container engines say EPERM.
            if error.errno not in (ENOSYS, EPERM) or not _lacks_openat2():
                raise
            _have_openat2 = False
    return walk(root, path, flags, mode)


def _lacks_openat2() -> bool:
    try:
        os.close(openat2(AT_FDCWD, "/", os.O_PATH, resolve=0))
    except OSError:
        return True
    return False


# -- mounts


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    text = os.fsencode(data) if data else None
    _libc().call("mount", os.fsencode(source), os.fsencode(target), os.fsencode(kind), flags, text, name=target)


def umount2(target: str, flags: int = MNT_DETACH | UMOUNT_NOFOLLOW) -> None:
    """umount2(2)."""
    _libc().call("umount2", os.fsencode(target), flags, name=target)


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


def open_tree(path: str, flags: int = OPEN_TREE_CLONE, dirfd: int = AT_FDCWD) -> int:
    """open_tree(2): with OPEN_TREE_CLONE a detached bind mount of path, to be placed by move_mount."""
    return syscall(SYS_open_tree, dirfd, os.fsencode(path), flags | OPEN_TREE_CLOEXEC, name=path)


def move_mount(tree: int, target: int, name: str = "") -> None:
    """move_mount(2) by two descriptors: the detached mount, and the file or folder that it shall cover."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    syscall(SYS_move_mount, tree, b"", target, b"", flags, name=name)


def mount_setattr(tree: int, attr_set: int, attr_clr: int = 0, propagation: int = 0, flags: int = 0) -> None:
    """mount_setattr(2) on a mount's descriptor: MOUNT_ATTR_* to set and to clear, and MS_PRIVATE, MS_SLAVE or 0."""
    attributes = struct.pack("=QQQQ", attr_set, attr_clr, propagation, 0)  # struct mount_attr
    size = len(attributes)
    syscall(SYS_mount_setattr, tree, b"", flags | AT_EMPTY_PATH, attributes, size, name="mount attributes")


def new_file_system(kind: str, options: tuple[tuple[str, str], ...], attributes: int) -> int:
    """A detached mount of a new file system (fsopen, fsconfig, fsmount)."""
    context = syscall(SYS_fsopen, kind.encode(), FSOPEN_CLOEXEC, name=kind)
    try:
        for key, value in options:
            text = f"{kind} {key}={value}"
            syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, key.encode(), value.encode(), 0, name=text)
        syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, None, None, 0, name=kind)
        return syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes, name=kind)
    finally:
        os.close(context)


# -- namespaces


def setns(fd: int, kind: int, name: str = "") -> None:
    """setns(2): joins the namespace that fd names (a file of /proc/PID/ns, or a pidfd)."""
    _libc().call("setns", fd, kind, name=name)


def unshare(kinds: int) -> None:
    """unshare(2)."""
    _libc().call("unshare", kinds, name="namespaces")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _libc().call("pivot_root", os.fsencode(new), os.fsencode(old), name=new)


# -- a process's own privileges


def prctl(option: int, *values: int, name: str = "") -> int:
    """prctl(2), with the unused values as 0, which some options insist on."""
    return _libc().call("prctl", option, *values, *[0] * (4 - len(values)), name=name or f"prctl {option}")


def lock(fd: int) -> bool:
    """An exclusive flock(2) on an open file or folder, without waiting: False where somebody else holds one. It lasts
    until the descriptor is closed, at the latest with this process."""
    try:
        _libc().call("flock", fd, LOCK_EX | LOCK_NB, name="lock")
    except BlockingIOError:
        return False
    return True


def capset(effective: int, permitted: int, inheritable: int) -> None:
    """capset(2) for this process (linux/capability.h, version 3). Each is a mask of capabilities, 1 << CAP_*."""
    halves = [mask >> shift & 0xFFFFFFFF for shift in (0, 32) for mask in (effective, permitted, inheritable)]
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *halves)
    _libc().call("capset", header, data, name="capabilities")


def setrlimit(resource: int, most: int) -> None:
    """setrlimit(2): the soft and the hard limit. The module of that name is a file, out of reach after chroot."""
    _libc().call("setrlimit", resource, struct.pack("=QQ", most, most), name="limit")
