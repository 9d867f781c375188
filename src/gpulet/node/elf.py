"""The little of an ELF file that placing a library needs: its class and its soname (System V ABI, chapters 4 and 5).

Loaded by the programs in launch/; pyelftools would cost tens of milliseconds.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SONAME = 5, 14
_MOST = 1 << 20  # bytes of a header table or dynamic section; anything larger is no library of ours


def _read(descriptor: int, offset: int, size: int) -> bytes:
    if not 0 <= size <= _MOST or offset < 0:
        raise ValueError("size out of range")
    return os.pread(descriptor, size, offset)


def _segments(descriptor: int) -> tuple[int, list[tuple[Any, ...]]]:
    """(class, program headers as (type, offset, address, size in the file))."""
    head = _read(descriptor, 0, 64)
    if head[:4] != b"\x7fELF" or head[5] != 1:  # little endian, as every machine with these drivers
        raise ValueError("not an ELF file")
    bits = {1: 32, 2: 64}[head[4]]
    if bits == 64:
        (table,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        layout, fields = struct.Struct("<IIQQQQ"), (0, 2, 3, 5)
    else:
        (table,) = struct.unpack_from("<I", head, 28)
        size, count = struct.unpack_from("<HH", head, 42)
        layout, fields = struct.Struct("<IIIIII"), (0, 1, 2, 4)
    data = _read(descriptor, table, size * count)
    rows = (layout.unpack_from(data, at) for at in range(0, size * count, size)) if size else iter(())
    return bits, [tuple(row[field] for field in fields) for row in rows]


def _soname(descriptor: int) -> str:
    bits, segments = _segments(descriptor)
    found: dict[int, int] = {}
    for kind, offset, _address, size in segments:
        if kind == _PT_DYNAMIC:
            entry = struct.Struct("<qQ" if bits == 64 else "<iI")
            data = _read(descriptor, offset, size)
            for tag, value in entry.iter_unpack(data[: len(data) // entry.size * entry.size]):
                if tag == 0:
                    break
                found.setdefault(tag, value)
    if _DT_SONAME not in found or _DT_STRTAB not in found:
        return ""
    for kind, offset, address, size in segments:  # the string table's address, as an offset in the file
        if kind == _PT_LOAD and address <= found[_DT_STRTAB] < address + size:
            start = offset + found[_DT_STRTAB] - address + found[_DT_SONAME]
            return _read(descriptor, start, 256).partition(b"\0")[0].decode("utf-8", "replace")
    return ""


def soname(path: str) -> str:
    """The file's DT_SONAME, "" where it has none, can't be read or isn't a little-endian ELF file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _soname(descriptor)
    except (OSError, ValueError, KeyError, IndexError, struct.error):
        return ""
    finally:
        os.close(descriptor)


def bits(path: str) -> int:
    """32 or 64, the file's ELF class; 0 where it can't be read or is no ELF file."""
    try:
        with open(path, "rb") as file:
            head = file.read(5)
    except OSError:
        return 0
    return {b"\x7fELF\x01": 32, b"\x7fELF\x02": 64}.get(head, 0)
