"""Device rules of cgroup v2: eBPF programs of type CGROUP_DEVICE, read, extended and replaced.

The kernel runs every program attached to a cgroup and all of them must say yes, so our rules go in front of each.
A program is exchanged in one step of the kernel (BPF_F_REPLACE, or the same attach again where only one may be
there, or an update of its link): there is never a moment without a filter. A cgroup without a program allows
everything already and stays as it is. Structures and numbers: linux/bpf.h.
"""

from __future__ import annotations

import os
import struct

from gpulet import linux
from gpulet.errors import StepFailed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BPF_PROG_LOAD, BPF_PROG_ATTACH, BPF_PROG_DETACH = 5, 8, 9
BPF_PROG_GET_FD_BY_ID, BPF_OBJ_GET_INFO_BY_FD, BPF_PROG_QUERY = 13, 15, 16
BPF_LINK_UPDATE, BPF_LINK_GET_FD_BY_ID, BPF_LINK_GET_NEXT_ID = 29, 30, 31
BPF_PROG_TYPE_CGROUP_DEVICE = 15
BPF_CGROUP_DEVICE = 6
BPF_F_ALLOW_MULTI, BPF_F_REPLACE = 2, 4
BPF_F_QUERY_EFFECTIVE = 1
BPF_LINK_TYPE_CGROUP = 3
MOST_PROGRAMS = 64  # BPF_CGROUP_MAX_PROGS
ENOENT = 2

# Instructions (linux/bpf_common.h, linux/bpf.h): class | size or operation | source
LDX_W = 0x61  # BPF_LDX | BPF_MEM | BPF_W
MOV_K, MOV_X = 0xB7, 0xBF  # BPF_ALU64 | BPF_MOV | BPF_K or BPF_X
AND_K, RSH_K = 0x54, 0x74  # BPF_ALU | BPF_AND or BPF_RSH | BPF_K
JNE_K, JNE_X = 0x55, 0x5D  # BPF_JMP | BPF_JNE | BPF_K or BPF_X
EXIT, CALL = 0x95, 0x85  # BPF_JMP | BPF_EXIT or BPF_CALL
AUXILIARY = 11  # BPF_REG_AX (linux/filter.h): the kernel's own, which no program may name
ZEROES = {0xAF: MOV_K, 0xAC: 0xB4}  # BPF_XOR | BPF_X of a register with itself -> BPF_MOV | BPF_K of 0, 64 bits and 32
CHARACTER, READ_WRITE = 2, 6  # BPF_DEVCG_DEV_CHAR; BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE
HEAD, EACH, SIZE = 10, 4, 8  # instructions before the rules and for each; bytes of one
MOST_RULES = 0x1FF0  # jumps are 16 bits wide

Rules = tuple[tuple[int, int], ...]


def instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    """One struct bpf_insn: 8-bit code, 4-bit registers, 16-bit jump offset, 32-bit immediate."""
    little = struct.pack("=H", 1) == b"\1\0"
    registers = target | source << 4 if little else target << 4 | source
    return struct.pack("=BBhi", code, registers, offset, value)


def _head(count: int) -> bytes:
    """Loads the question and leaps over `count` rules unless it is about reading and writing a character device.

    struct bpf_cgroup_dev_ctx, at register 1, which stays as it is: u32 access << 16 | type, u32 major, u32 minor.
    """
    over = count * EACH
    return b"".join(
        (
            instruction(LDX_W, 2, 1, 0),
            instruction(MOV_X, 3, 2),
            instruction(AND_K, 2, value=0xFFFF),
            instruction(RSH_K, 3, value=16),
            instruction(LDX_W, 4, 1, 4),
            instruction(LDX_W, 5, 1, 8),
            instruction(JNE_K, 2, offset=over + 3, value=CHARACTER),
            instruction(MOV_X, 6, 3),
            instruction(AND_K, 6, value=READ_WRITE),
            instruction(JNE_X, 6, 3, offset=over),
        )
    )


def _rule(major: int, minor: int) -> bytes:
    return b"".join(
        (
            instruction(JNE_K, 4, offset=3, value=major),
            instruction(JNE_K, 5, offset=2, value=minor),
            instruction(MOV_K, 0, value=1),
            instruction(EXIT),
        )
    )


def extend(program: bytes, rules: Sequence[tuple[int, int]]) -> bytes:
    """A program that lets the rules' character devices be read and written, and for the rest is `program`.

    Where `program` begins with such rules already, the new ones join them: it doesn't grow without end.
    """
    before, rest = split(program)
    every = tuple(dict.fromkeys((*before, *rules)))
    if len(every) > MOST_RULES:
        raise StepFailed("build device filter", f"of {len(every)} rules", reason=f"more than {MOST_RULES}")
    return _head(len(every)) + b"".join(_rule(*rule) for rule in every) + rest


def loadable(program: bytes) -> bytes:
    """A program as it can be loaded again, where the kernel hardened it.

    With net.core.bpf_jit_harden constants are hidden (kernel/bpf/core.c, bpf_jit_blind_insn): one comes into a register
    of the kernel's own in two steps and is used from there, and 0 is what a register gives with itself. A register that
    the program doesn't use does as well, and 0 can be said. Raises StepFailed where no register is free.
    """
    rows = list(struct.iter_unpack("=BB6s", program))
    used = {register for _, pair, _ in rows for register in (pair & 15, pair >> 4)}
    lowest = 6 if any(code == CALL for code, *_ in rows) else 2  # a call takes its arguments from the others
    free = next((register for register in range(9, lowest - 1, -1) if register not in used), -1)
    if AUXILIARY in used and free < 0:
        reason = "the kernel hardened it, and no register is free"
        remedy = "set net.core.bpf_jit_harden to 0 or 1 and start the container anew, or use cgroup version 1"
        raise StepFailed("extend device filter", "", reason=reason, remedy=remedy)
    made = []
    for code, pair, rest in rows:
        one, other = (free if register == AUXILIARY else register for register in (pair & 15, pair >> 4))
        if code in ZEROES and one == other:
            made.append(instruction(ZEROES[code], one))
        else:
            made.append(struct.pack("=BB6s", code, one | other << 4, rest))
    return b"".join(made)


def split(program: bytes) -> tuple[Rules, bytes]:
    """Our rules at the front of a program, and the rest; no rules where it doesn't begin as ours do."""
    if len(program) < (HEAD + 1) * SIZE:
        return (), program
    (over,) = struct.unpack_from("=h", program, (HEAD - 1) * SIZE + 2)
    count = over // EACH
    end = (HEAD + over) * SIZE
    if over < 0 or over % EACH or end >= len(program) or not program.startswith(_head(count)):
        return (), program
    rules = []
    for at in range(HEAD * SIZE, end, EACH * SIZE):
        rule = (*struct.unpack_from("=i", program, at + 4), *struct.unpack_from("=i", program, at + SIZE + 4))
        if program[at : at + EACH * SIZE] != _rule(*rule):
            return (), program
        rules.append(rule)
    return tuple(rules), program[end:]


def allow(folder: str, rules: Sequence[tuple[int, int]]) -> tuple[Callable[[], None], list[int]]:
    """Puts the rules in front of every program attached to the cgroup folder. Answers what takes it back, and the
    descriptors that this needs. Raises StepFailed, and then nothing is changed."""
    held: list[int] = []
    exchanged: list[tuple[int, int, int]] = []  # attach flags, descriptors of the programs before and after

    def undo() -> None:
        while exchanged:
            flags, old, new = exchanged.pop()
            _exchange(held[0], flags, new, old)

    try:
        held.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        flags, numbers = attached(held[0])
        for number in numbers:
            held.append(old := _bpf(BPF_PROG_GET_FD_BY_ID, "=III", number, 0, 0))
            held.append(new := load(extend(loadable(instructions(old)), rules)))
            _exchange(held[0], flags, old, new)
            exchanged.append((flags, old, new))
    except OSError as error:
        try:
            undo()
        except OSError:
            pass
        for fd in held:
            os.close(fd)
        raise StepFailed("allow devices in cgroup", folder, error.errno or 0, error.strerror or "") from error
    return undo, held


def effective(cgroup: int) -> tuple[int, ...]:
    """The numbers of all programs that are asked about the cgroup's processes: its own, and of the cgroups above it."""
    return attached(cgroup, BPF_F_QUERY_EFFECTIVE)[1]


def program(number: int) -> bytes:
    """The instructions of the loaded program with this number. Raises OSError."""
    held = _bpf(BPF_PROG_GET_FD_BY_ID, "=III", number, 0, 0)
    try:
        return instructions(held)
    finally:
        os.close(held)


def attached(cgroup: int, how: int = 0) -> tuple[int, tuple[int, ...]]:
    """How programs are attached to a cgroup (BPF_F_ALLOW_*) and the attached ones' numbers. how: BPF_F_QUERY_*."""
    numbers = linux.Space(MOST_PROGRAMS * 4)
    query = struct.pack("=IIIIQII", cgroup, BPF_CGROUP_DEVICE, how, 0, numbers.address, MOST_PROGRAMS, 0)
    _, query = linux.bpf(BPF_PROG_QUERY, query, "programs of the cgroup")
    _, _, _, flags, _, count, _ = struct.unpack("=IIIIQII", query)
    return flags, struct.unpack(f"={count}I", numbers.bytes()[: count * 4])


def instructions(program: int) -> bytes:
    """A loaded program's verified instructions; for this type the kernel translates nothing in them."""

    def ask(size: int, address: int) -> int:
        # struct bpf_prog_info: type, id, tag[8], jited_prog_len, xlated_prog_len, jited_prog_insns, xlated_prog_insns
        info = linux.Space.of(struct.pack("=II8sIIQQ", 0, 0, b"", 0, size, 0, address))
        _bpf(BPF_OBJ_GET_INFO_BY_FD, "=IIQ", program, 40, info.address)
        (answer,) = struct.unpack_from("=I", info.bytes(), 20)
        return int(answer)

    size = ask(0, 0)
    space = linux.Space(size)
    ask(size, space.address)
    code = space.bytes()
    if not code.strip(b"\0"):
        raise PermissionError(
            1, "the kernel doesn't show the attached program: kernel.kptr_restrict or lockdown forbids"
        )
    return code


def load(code: bytes) -> int:
    """Loads a device filter; the descriptor of it."""
    space, licence = linux.Space.of(code), linux.Space.of(b"Apache-2.0\0")
    length = len(code) // SIZE
    _raise_memory_limit()
    return _bpf(BPF_PROG_LOAD, "=IIQQ", BPF_PROG_TYPE_CGROUP_DEVICE, length, space.address, licence.address)


def _exchange(cgroup: int, flags: int, old: int, new: int) -> None:
    """Puts the program `new` where `old` is attached, in one step."""
    if flags & BPF_F_ALLOW_MULTI:
        try:
            _bpf(BPF_PROG_ATTACH, "=IIIII", cgroup, new, BPF_CGROUP_DEVICE, flags | BPF_F_REPLACE, old)
        except OSError as error:
            link = _link_of(cgroup, old) if error.errno == ENOENT else -1
            if link < 0:
                raise
            try:
                _bpf(BPF_LINK_UPDATE, "=IIII", link, new, BPF_F_REPLACE, old)
            finally:
                os.close(link)
    else:  # one program at most: attaching the same way again takes its place
        _bpf(BPF_PROG_ATTACH, "=IIII", cgroup, new, BPF_CGROUP_DEVICE, flags)


def _link_of(cgroup: int, program: int) -> int:
    """A descriptor of the link that attaches the program to the cgroup, -1 where none does."""
    wanted = (_number(program), os.fstat(cgroup).st_ino)  # a cgroup's number is its folder's inode
    at = 0
    while True:
        try:
            _, answer = linux.bpf(BPF_LINK_GET_NEXT_ID, struct.pack("=III", at, 0, 0))
        except OSError as error:
            if error.errno == ENOENT:
                return -1
            raise
        (at,) = struct.unpack_from("=I", answer, 4)
        try:
            link = _bpf(BPF_LINK_GET_FD_BY_ID, "=III", at, 0, 0)
        except OSError:
            continue  # gone meanwhile
        # struct bpf_link_info: type, id, prog_id, 4 bytes, then for cgroups cgroup_id, attach_type
        info = linux.Space(32)
        _bpf(BPF_OBJ_GET_INFO_BY_FD, "=IIQ", link, 32, info.address)
        kind, _, number, _, inode, _, _ = struct.unpack("=IIIIQII", info.bytes())
        if kind == BPF_LINK_TYPE_CGROUP and (number, inode) == wanted:
            return link
        os.close(link)


def _number(program: int) -> int:
    info = linux.Space(40)
    _bpf(BPF_OBJ_GET_INFO_BY_FD, "=IIQ", program, 40, info.address)
    (number,) = struct.unpack_from("=I", info.bytes(), 4)
    return int(number)


def _raise_memory_limit() -> None:
    """Before Linux 5.11 programs counted against RLIMIT_MEMLOCK."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (ValueError, OSError):
        pass


def _bpf(command: int, fields: str, *values: int) -> int:
    return linux.bpf(command, struct.pack(fields, *values), "eBPF program")[0]
