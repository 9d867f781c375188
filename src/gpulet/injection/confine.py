"""Running one program in a container's root file system with next to no rights.

For an ldconfig that somebody insists on: what it reads belongs to an image, and the program itself may too. It gets
process, IPC and mount namespaces of its own, the container's root as its root, nothing of /sys and /dev, the container
owner's identity, no capability but the one to write there, no new privileges, few resources, and only the system calls
that ordinary work on files takes.
"""

from __future__ import annotations

import os
import struct

from gpulet import linux, mount_api
from gpulet.errors import StepFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# linux/prctl.h, linux/securebits.h, linux/capability.h
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 15, 22, 24
PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 28, 38, 47
PR_CAP_AMBIENT_RAISE, SECCOMP_MODE_FILTER, SECBIT_NO_SETUID_FIXUP, SIGKILL = 2, 2, 4, 9
CAP_DAC_OVERRIDE, CAP_SETPCAP, MOST_CAPABILITIES = 1, 8, 64
EPERM, ENOENT, EINVAL = 1, 2, 22
# RLIMIT_CPU in seconds, RLIMIT_AS in bytes, RLIMIT_NOFILE, RLIMIT_FSIZE in bytes (asm-generic/resource.h). Large images
# have caches beyond the 1 MiB that NVIDIA's program allows.
LIMITS = ((0, 10), (9, 2 << 30), (7, 64), (1, 16 << 20))
MOST_OUTPUT = 64 << 10
HIDING = mount_api.MS_NOSUID | mount_api.MS_NODEV | mount_api.MS_NOEXEC

# Work on files, memory and the process itself. name: number on x86_64, on aarch64; -1 where there is no such call.
_CALLS = {
    "access": (21, -1), "arch_prctl": (158, -1), "brk": (12, 214), "chdir": (80, 49), "chmod": (90, -1),
    "clock_gettime": (228, 113), "close": (3, 57), "execve": (59, 221), "execveat": (322, 281), "exit": (60, 93),
    "exit_group": (231, 94), "faccessat": (269, 48), "fchmod": (91, 52), "fchmodat": (268, 53), "fcntl": (72, 25),
    "fdatasync": (75, 83), "fstat": (5, 80), "fsync": (74, 82), "ftruncate": (77, 46), "getcwd": (79, 17),
    "getdents": (78, -1), "getdents64": (217, 61), "getegid": (108, 177), "geteuid": (107, 175),
    "getgid": (104, 176), "getpgrp": (111, -1), "getpid": (39, 172), "gettid": (186, 178), "gettimeofday": (96, 169),
    "getuid": (102, 174), "lseek": (8, 62), "lstat": (6, -1), "mkdir": (83, -1), "mkdirat": (258, 34),
    "mmap": (9, 222), "mprotect": (10, 226), "mremap": (25, 216), "munmap": (11, 215), "newfstatat": (262, 79),
    "open": (2, -1), "openat": (257, 56), "pread64": (17, 67), "read": (0, 63), "readlink": (89, -1),
    "readlinkat": (267, 78), "readv": (19, 65), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "stat": (4, -1),
    "statx": (332, 291), "symlink": (88, -1), "symlinkat": (266, 36), "tgkill": (234, 131), "time": (201, -1),
    "uname": (63, 160), "unlink": (87, -1), "unlinkat": (263, 35), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above; AUDIT_ARCH_* (linux/audit.h)


class Program:
    """What to run: a host's program by descriptor, or (fd -1) the container's at `path` ("": its usual one)."""

    def __init__(self, path: str, fd: int = -1) -> None:
        self.path = path
        self.fd = fd


def open_host_program(path: str) -> Program:
    """A host's program, as a sealed copy where the kernel can: the container can't reach the original through it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy = os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return Program(path, fd)
    import fcntl

    while os.sendfile(copy, fd, None, 1 << 24):  # None: from where the descriptor stands
        pass
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
    os.close(fd)
    return Program(path, copy)


def run(root: int, program: Program, arguments: Sequence[str], owner: tuple[int, int], *, pivot: bool = True) -> bytes:
    """Runs the program in the folder `root` (a descriptor in this process's mount namespace); what it wrote.

    owner: user and group to run as; pivot: leave the old root behind by pivot_root, which an initial ramfs can't.
    Raises StepFailed: with errno ENOENT where the program, or its interpreter, isn't there; else for a set-up that
    failed, an exit code or a signal.
    """
    output, told = os.pipe()
    trouble, tell = os.pipe()
    middle = os.fork()
    if not middle:
        code = 126
        try:
            code = _supervise(root, program, arguments, owner, pivot, told, tell)
        finally:
            os._exit(code)
    os.close(told)
    os.close(tell)
    with open(output, "rb") as file:
        said = file.read(MOST_OUTPUT)
        while file.read(MOST_OUTPUT):  # drained, so that it needn't wait for us
            pass
    with open(trouble, "rb") as file:
        failure = file.read().decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1])
    if failure:
        number, _, reason = failure.partition(" ")
        raise StepFailed("confine", program.path, int(number), reason)
    if code:
        how = f"terminated with signal {code - 128}" if code > 128 else f"failed with error code {code}"
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise StepFailed("process", program.path, reason=f"{how}{f' ({last})' if last else ''}")
    return said


def _supervise(
    root: int, program: Program, arguments: Sequence[str], owner: tuple[int, int], pivot: bool, told: int, tell: int
) -> int:
    """In a child: makes the namespaces and waits for the program, which is the first process of one of them."""
    step = "make namespaces"
    try:
        os.fchdir(root)  # the copy of the mount namespace takes the working folder along, but no descriptor
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC)
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return code if code >= 0 else 128 - code
        linux.prctl(PR_SET_PDEATHSIG, SIGKILL)
        step = "change root"
        quiet = os.open(os.devnull, os.O_RDONLY)
        _enter(pivot)
        step = "hide the machine"
        _hide(shows_proc=program.fd >= 0)
        step = "limit"
        for fd, place in ((quiet, 0), (told, 1), (told, 2)):
            os.dup2(fd, place)
        _limit()
        step = "drop privileges"
        _drop(owner, keep=1 << CAP_DAC_OVERRIDE if program.fd >= 0 else 0)
        step = "execute"
        if program.fd >= 0:
            os.set_inheritable(program.fd, True)  # a script's interpreter opens it by number
        _filter()
        argv = [program.path, *arguments]
        os.execve(program.fd if program.fd >= 0 else program.path, argv, {})
    except Exception as error:  # a fault of ours too: its text must not be lost with the process
        text = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        os.write(tell, f"{getattr(error, 'errno', 0)} {step}: {text}".encode())
    return 127


def _enter(pivot: bool) -> None:
    """Makes the working folder the root, with no way back to the one before."""
    mount_api.mount("", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
    tree = mount_api.open_tree(".", mount_api.OPEN_TREE_CLONE | mount_api.AT_RECURSIVE)
    here = os.open(".", os.O_PATH)
    mount_api.move_mount(tree, here, "root")
    os.fchdir(tree)
    if pivot:
        linux.pivot_root(".", ".")
        mount_api.umount2(".", mount_api.MNT_DETACH)
    else:
        mount_api.mount(".", "/", "", mount_api.MS_MOVE)
    os.chroot(".")
    os.chdir("/")


def _hide(shows_proc: bool) -> None:
    """Covers what isn't the image's. A program given by descriptor may be a script, which needs /dev/fd."""
    if shows_proc:
        try:
            mount_api.mount("proc", "/proc", "proc", mount_api.MS_RDONLY | HIDING)
        except OSError as error:
            # In a user namespace that doesn't see the whole of /proc no other may be mounted: then none is shown.
            shows_proc = False
            if error.errno not in (EPERM, ENOENT):
                raise
    for folder in ("/sys", "/dev") if shows_proc else ("/proc", "/sys", "/dev"):
        try:
            mount_api.mount("tmpfs", folder, "tmpfs", HIDING, "size=16k,mode=0755")
        except FileNotFoundError:
            continue  # the image has no such folder
        if folder == "/dev" and shows_proc:
            os.symlink("/proc/self/fd", "/dev/fd")
        mount_api.mount("", folder, "", mount_api.MS_REMOUNT | mount_api.MS_BIND | mount_api.MS_RDONLY | HIDING)


def _limit() -> None:
    for resource, most in LIMITS:
        try:
            linux.setrlimit(resource, most)
        except PermissionError:
            pass  # it is lower already


def _drop(owner: tuple[int, int], keep: int) -> None:
    """Becomes the owner, for good. keep: the capabilities that the program shall have."""
    uid, gid = owner
    try:
        os.setgroups([])
    except PermissionError:
        pass  # a user namespace that forbids it; the groups then are the caller's own
    linux.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)  # else setresuid takes what is still needed
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    needed = keep | 1 << CAP_SETPCAP
    linux.capset(needed, needed, keep)  # beyond an empty bounding set nothing could become inheritable
    for number in range(MOST_CAPABILITIES):
        try:
            linux.prctl(PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno != EINVAL:
                raise
            break  # the kernel knows no more
    linux.capset(keep, keep, keep)
    if uid and keep:  # root gets what it may inherit, others only what is ambient
        linux.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE)
    linux.prctl(PR_SET_NO_NEW_PRIVS, 1)


def _filter() -> None:
    """Lets the system calls of the table through and answers EPERM to all others."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(linux.ENOSYS, f"no system call numbers for {machine}")
    code = filter_program(machine)
    held = linux.Space.of(code)
    what = linux.Space.of(struct.pack("=H6xQ", len(code) // 8, held.address))  # struct sock_fprog
    linux.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, what.address, name="seccomp filter")


def filter_program(machine: str) -> bytes:
    """The filter as classic BPF (linux/filter.h) over struct seccomp_data: nr at 0, arch at 4."""
    column, arch = _MACHINES[machine]
    numbers = sorted(row[column] for row in _CALLS.values() if row[column] >= 0)
    load, equal, answer = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    kill, refuse, allow = 0x80000000, 0x00050000 | EPERM, 0x7FFF0000  # SECCOMP_RET_* (linux/seccomp.h)
    rows = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, kill), (load, 0, 0, 0)]
    rows += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    rows += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *row) for row in rows)
