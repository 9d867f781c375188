"""NVML in a process of its own that has given up its privileges: the driver's library needs none to answer.

As NVIDIA's container CLI has it: by default the nobody of the kernel's, else who `--user` names.
"""

from __future__ import annotations

import os

from gpulet import linux
from gpulet.errors import GpuletError, NodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpulet.node.gpu import NodeFacts

    User = tuple[int, int]

PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS, SECBIT_NO_SETUID_FIXUP = 28, 38, 4  # linux/prctl.h, linux/securebits.h
CAP_DAC_READ_SEARCH = 2  # linux/capability.h


def parse_user(text: str) -> User:
    """UID[:GID] by number or name, "" for this process's own; without a group, the user's in the user table.

    Raises KeyError where there is no such user or group.
    """
    if not text:
        return os.geteuid(), os.getegid()
    user, _, group = text.partition(":")
    if user.isdigit() and group.isdigit():
        return int(user), int(group)
    import grp
    import pwd

    uid = int(user) if user.isdigit() and group else -1
    entry = None if uid >= 0 else pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    uid = uid if entry is None else entry.pw_uid
    if group:
        return uid, int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    assert entry is not None
    return uid, entry.pw_gid


def default_user() -> User:
    """Who NVML runs as where nobody is named: without root's rights we can be nobody but ourselves."""
    if os.geteuid():
        return os.geteuid(), os.getegid()
    return _overflow("uid"), _overflow("gid")


def _overflow(kind: str) -> int:
    try:
        with open(f"/proc/sys/kernel/overflow{kind}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534  # DEFAULT_OVERFLOWUID, linux/highuid.h


def facts(root: str, user: User, search: Sequence[str] = ()) -> NodeFacts:
    """The node's facts through NVML, asked by a child that became `user`; search: more folders to look for NVML in.
    Raises NodeError."""
    import pickle

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = _answer(root, user, search)
            with open(writing, "wb") as pipe:
                pipe.write(pickle.dumps(answer))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not data:
        raise NodeError("the process that asks NVML ended", seen=f"exit code {code}", remedy="see dmesg")
    found: NodeFacts | GpuletError = pickle.loads(data)
    if isinstance(found, GpuletError):
        raise found
    return found


def _answer(root: str, user: User, search: Sequence[str]) -> NodeFacts | GpuletError:
    from gpulet.node import nvml  # while its files may be read

    try:
        become(user, 0 if root in ("", "/") else 1 << CAP_DAC_READ_SEARCH)
        return nvml.facts(root, links=False, search=search)
    except GpuletError as error:
        return error
    except OSError as error:
        wanted = f"user {user[0]}, group {user[1]}"
        return NodeError("can't ask NVML as another user", seen=error.strerror, wanted=wanted, remedy="correct --user")
    except Exception as error:  # a fault of ours: its text must not be lost with the process
        return NodeError("asking NVML failed", seen=f"{type(error).__name__}: {error}", remedy="report this")


def become(user: User, keep: int = 0) -> None:
    """Becomes a user for good, without capabilities but those of the mask `keep`. Raises OSError.

    Where the driver's root isn't "/", the way to it may be closed to the user, though what lies there is open.
    """
    uid, gid = user
    if gid != os.getegid():
        os.setgroups([])
    if os.geteuid():
        keep = 0
    elif keep:
        linux.prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP)  # without, access(2) ignores what is kept
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    linux.capset(keep, keep, 0)
    linux.prctl(PR_SET_NO_NEW_PRIVS, 1)
