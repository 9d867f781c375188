"""Small ELF files put together by hand: a soname, and a note section as CUDA's forward-compatibility libraries have."""

from __future__ import annotations

import json
import struct
from typing import Any

X86_64, I386 = 62, 3


def library(soname: str = "", *, machine: int = X86_64, note: dict[str, Any] | bytes | None = None) -> bytes:
    """A shared object of nothing but headers, a dynamic table, a string table and, where given, the note."""
    wide = machine != I386
    strings = b"\0" + soname.encode() + b"\0"
    names = b"\0.note.cuda.fwd_compatibility\0.shstrtab\0"
    content = b"" if note is None else note if isinstance(note, bytes) else _note(json.dumps(note).encode())
    head, program, section = (64, 56, 64) if wide else (52, 32, 40)
    entry = "<qQ" if wide else "<iI"
    dynamic_at = head + 2 * program
    entries = [(5, 0), (14, 1)] if soname else [(5, 0)]
    size = (len(entries) + 1) * struct.calcsize(entry)
    strings_at = dynamic_at + size
    entries[0] = (5, 0x1000 + strings_at)  # DT_STRTAB is an address; the one segment is loaded at 0x1000
    dynamic = b"".join(struct.pack(entry, *pair) for pair in [*entries, (0, 0)])
    note_at = -(-(strings_at + len(strings)) // 4) * 4
    names_at = note_at + len(content)
    sections_at = -(-(names_at + len(names)) // 8) * 8
    body = bytearray(sections_at)
    body[dynamic_at:strings_at] = dynamic
    body[strings_at : strings_at + len(strings)] = strings
    body[note_at : note_at + len(content)] = content
    body[names_at : names_at + len(names)] = names
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    layout = "<HHIQQQIHHHHHH" if wide else "<HHIIIIIHHHHHH"
    fields = (3, machine, 1, 0, head, sections_at, 0, head, program, 2, section, 3, 2)
    body[:head] = ident + struct.pack(layout, *fields)
    for place, (kind, offset, length) in enumerate([(1, 0, sections_at), (2, dynamic_at, size)]):
        at = head + place * program
        if wide:
            packed = struct.pack("<IIQQQQQQ", kind, 4, offset, 0x1000 + offset, 0, length, length, 8)
        else:
            packed = struct.pack("<IIIIIIII", kind, offset, 0x1000 + offset, 0, length, length, 4, 8)
        body[at : at + program] = packed
    one = "<IIQQQQIIQQ" if wide else "<IIIIIIIIII"
    named = 1 if content else 0
    rows = [
        (0,) * 10,
        (named, 7, 0, 0, note_at, len(content), 0, 0, 4, 0),
        (30, 3, 0, 0, names_at, len(names), 0, 0, 1, 0),
    ]
    return bytes(body) + b"".join(struct.pack(one, *row) for row in rows)


def _note(text: bytes) -> bytes:
    owner = b"NVIDIA Corporation\0"
    padded = owner + bytes(-len(owner) % 4)
    return struct.pack("<III", len(owner), len(text), 1) + padded + text + bytes(-len(text) % 4)
