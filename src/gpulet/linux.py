"""The system calls that Python lacks, through libc, which this module alone knows. Those about mounts: mount_api.py.

Every call raises OSError with the kernel's errno and the name of the object concerned. libc is looked up by the first
call, so a program of launch/ that needs none of these doesn't pay for it.
Numbers and names are those of the kernel's headers: linux/openat2.h, linux/fcntl.h, linux/sched.h.
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
# linux/openat2.h
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_IN_ROOT = 0x10
# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
# System calls that came after the architectures agreed on one table have one number everywhere.
SYS_openat2 = 437
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


def libc() -> _Libc:
    """libc, looked up once."""
    if not _loaded:
        _loaded.append(_Libc())
    return _loaded[0]


def syscall(number: int, *args: int | bytes | None, name: object = None) -> int:
    """A system call by number; bytes are passed as a pointer to them. name is for the error."""
    return libc().call("syscall", number, *args, *_UNUSED[len(args) :], name=name)


class Space:
    """Memory that the kernel may write to, and whose address it can be told."""

    def __init__(self, size: int) -> None:
        self._buffer: Any = (libc().simple("c") * max(size, 1))()
        self._size = size
        self.address: int = libc().address(self._buffer)

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


def crosses_mount(folder: int, name: str) -> bool:
    """Whether a name in a folder is of another mount than the folder. The kernel is asked, not /proc: in a container
    that is the image's. Before Linux 5.6 only another file system tells: False for a bind mount of the same one."""
    try:
        os.close(openat2(folder, name, os.O_PATH | os.O_NOFOLLOW, resolve=RESOLVE_NO_XDEV))
    except OSError as error:
        if error.errno not in (ENOSYS, EPERM):
            return error.errno == EXDEV
        try:
            return os.lstat(name, dir_fd=folder).st_dev != os.fstat(folder).st_dev
        except OSError:
            pass
    return False


def _lacks_openat2() -> bool:
    try:
        os.close(openat2(AT_FDCWD, "/", os.O_PATH, resolve=0))
    except OSError:
        return True
    return False


# -- namespaces


def setns(fd: int, kind: int, name: str = "") -> None:
    """setns(2): joins the namespace that fd names (a file of /proc/PID/ns, or a pidfd)."""
    libc().call("setns", fd, kind, name=name)


def unshare(kinds: int) -> None:
    """unshare(2)."""
    libc().call("unshare", kinds, name="namespaces")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    libc().call("pivot_root", os.fsencode(new), os.fsencode(old), name=new)


# -- a process's own privileges


def prctl(option: int, *values: int, name: str = "") -> int:
    """prctl(2), with the unused values as 0, which some options insist on."""
    return libc().call("prctl", option, *values, *[0] * (4 - len(values)), name=name or f"prctl {option}")


def lock(fd: int) -> bool:
    """An exclusive flock(2) on an open file or folder, without waiting: False where somebody else holds one. It lasts
    until the descriptor is closed, at the latest with this process."""
    try:
        libc().call("flock", fd, LOCK_EX | LOCK_NB, name="lock")
    except BlockingIOError:
        return False
    return True


def capset(effective: int, permitted: int, inheritable: int) -> None:
    """capset(2) for this process (linux/capability.h, version 3). Each is a mask of capabilities, 1 << CAP_*."""
    halves = [mask >> shift & 0xFFFFFFFF for shift in (0, 32) for mask in (effective, permitted, inheritable)]
    header, data = struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *halves)
    libc().call("capset", header, data, name="capabilities")


def setrlimit(resource: int, most: int) -> None:
    """setrlimit(2): the soft and the hard limit. The module of that name is a file, out of reach after chroot."""
    libc().call("setrlimit", resource, struct.pack("=QQ", most, most), name="limit")
