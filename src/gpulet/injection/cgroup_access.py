"""Whether a cgroup lets its processes use a device: read from its rules, changing nothing.

Version 1 tells its rules in devices.list. Version 2 has programs, which are run here, instruction by instruction, on
the question that the kernel would put to them: whatever wrote them, the answer is theirs. What can't be known is None.
Facts: kernel documentation, admin-guide/cgroup-v1/devices.rst; linux/bpf.h, linux/bpf_common.h; RFC 9669.
"""

from __future__ import annotations

import operator
import os
import struct

from gpulet.errors import GpuletError
from gpulet.injection import cgroup_bpf
from gpulet.injection.cgroup import Cgroup, Rule, lets, plain
from gpulet.injection.cgroup_bpf import CHARACTER, READ_WRITE, SIZE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

LDX, ALU, JMP, JMP32, ALU64 = 1, 4, 5, 6, 7  # classes: the lowest three bits of an instruction's code
MEMORY = 0x60  # BPF_MEM, the mode of a load
WIDTHS = {0x00: "=I", 0x08: "=H", 0x10: "=B"}  # BPF_W, BPF_H, BPF_B
BY_REGISTER = 0x08  # BPF_X
MOVE, XOR, ALWAYS, END = 0xB0, 0xA0, 0x00, 0x90  # BPF_MOV, BPF_XOR, BPF_JA, BPF_EXIT
ARITHMETIC = {
    0x00: operator.add,
    0x10: operator.sub,
    0x40: operator.or_,
    0x50: operator.and_,
    0x60: operator.lshift,
    0x70: operator.rshift,
    XOR: operator.xor,
}
COMPARISON = {
    0x10: operator.eq,
    0x20: operator.gt,
    0x30: operator.ge,
    0x40: operator.and_,  # BPF_JSET
    0x50: operator.ne,
    0xA0: operator.lt,
    0xB0: operator.le,
}


class _Unknown(Exception):
    """The program does what no device filter needs."""


def may_use(cgroup: Cgroup, rule: Rule) -> bool | None:
    """Whether processes of the cgroup may read and write the character device; None where that can't be told."""
    try:
        if cgroup.version == 1:
            with open(f"{cgroup.folder}/devices.list", encoding="ascii") as file:
                return lets(file, rule)
        return _all_agree(cgroup.folder, rule)
    except (OSError, ValueError, GpuletError, _Unknown):
        return None


def hierarchies(proc: str = "/proc") -> Iterator[Cgroup]:
    """The tops of the mounted hierarchies that may hold device rules. Where version 1 has the devices controller it is
    that alone. Raises OSError."""
    with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [line.rstrip("\n").split(" ") for line in file]
    found = [(plain(fields[4]), *fields[fields.index("-") + 1 :: 2]) for fields in mounts]  # point, kind, options
    tops = [Cgroup(1, point) for point, kind, options in found if kind == "cgroup" and "devices" in options.split(",")]
    return iter(tops or [Cgroup(2, point) for point, kind, _ in found if kind == "cgroup2"])


def _all_agree(folder: str, rule: Rule) -> bool:
    """The programs of the cgroup and of those above it: the kernel asks each, and each must say yes."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return all(decides(cgroup_bpf.program(number), rule) for number in cgroup_bpf.effective(held))
    finally:
        os.close(held)


def decides(program: bytes, rule: Rule) -> bool:
    """What a device filter says of reading and writing a character device. Raises _Unknown."""
    machine = _Machine(struct.pack("=III", READ_WRITE << 16 | CHARACTER, *rule))  # struct bpf_cgroup_dev_ctx
    little = struct.pack("=H", 1) == b"\1\0"
    at = 0
    while at * SIZE < len(program):
        code, pair, offset, value = struct.unpack_from("=BBhi", program, at * SIZE)
        target, source = (pair & 15, pair >> 4) if little else (pair >> 4, pair & 15)
        at += 1
        if code == JMP | END:
            return bool(machine.read(0) & 1)
        if code & 7 == LDX:
            machine.load(code, target, source, offset)
        elif code & 7 in (ALU, ALU64):
            machine.compute(code, target, source, value)
        elif code == JMP | ALWAYS or machine.compare(code, target, source, value):
            if offset < 0:
                raise _Unknown  # a loop
            at += offset
    raise _Unknown


class _Machine:
    """The registers of a program that was asked a question."""

    def __init__(self, question: bytes) -> None:
        self._question = question
        self._values: dict[int, int] = {}
        self._asks = {1}  # the registers that point to the question

    def read(self, register: int, bits: int = 64) -> int:
        if register not in self._values:
            raise _Unknown
        return self._values[register] & (1 << bits) - 1

    def _write(self, register: int, value: int) -> None:
        self._values[register] = value
        self._asks.discard(register)

    def load(self, code: int, target: int, source: int, offset: int) -> None:
        form = WIDTHS.get(code & 0x18, "")
        end = offset + struct.calcsize(form)
        inside = form and 0 <= offset < end <= len(self._question)
        if source not in self._asks or code & 0xE0 != MEMORY or not inside:
            raise _Unknown
        self._write(target, struct.unpack_from(form, self._question, offset)[0])

    def compute(self, code: int, target: int, source: int, value: int) -> None:
        operation, bits = code & 0xF0, 64 if code & 7 == ALU64 else 32
        if operation == MOVE and code & BY_REGISTER and source in self._asks and bits == 64:
            self._asks.add(target)
            return
        if operation == XOR and code & BY_REGISTER and source == target:
            self._write(target, 0)  # whatever is in it: so the kernel writes 0 where it hides constants
            return
        other = self._operand(code, source, value, bits)
        if operation == MOVE:
            self._write(target, other)
            return
        if operation not in ARITHMETIC:
            raise _Unknown
        if operation in (0x60, 0x70):
            other &= bits - 1
        self._write(target, ARITHMETIC[operation](self.read(target, bits), other) & (1 << bits) - 1)

    def compare(self, code: int, target: int, source: int, value: int) -> bool:
        if code & 7 not in (JMP, JMP32) or code & 0xF0 not in COMPARISON:
            raise _Unknown
        bits = 64 if code & 7 == JMP else 32
        other = self._operand(code, source, value, bits)
        return bool(COMPARISON[code & 0xF0](self.read(target, bits), other))

    def _operand(self, code: int, source: int, value: int, bits: int) -> int:
        return self.read(source, bits) if code & BY_REGISTER else value & (1 << bits) - 1
