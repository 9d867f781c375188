"""Write small ELF shared objects: real enough for the loader, ldconfig and readelf, with nothing in them.

A driver tree needs dozens of libraries of which only the name, the DT_SONAME and the class (32 or 64 bits) matter.
Writing them takes microseconds and no compiler, and gives 32-bit ones where the compiler makes none. Layout after the
System V ABI, "Object Files" and "Dynamic Linking".
"""

from __future__ import annotations

import platform
import struct

PT_LOAD, PT_DYNAMIC, PT_NOTE, PT_GNU_STACK = 1, 2, 4, 0x6474E551
SHT_PROGBITS, SHT_STRTAB, SHT_HASH, SHT_DYNAMIC, SHT_NOTE, SHT_DYNSYM = 1, 3, 5, 6, 7, 11
DT_NULL, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_SONAME = 0, 4, 5, 6, 10, 11, 14
EM_386, EM_ARM, EM_X86_64, EM_AARCH64 = 3, 40, 62, 183
PAGE = 0x10000  # the largest page size of the machines we know; a segment's file offset must agree with it

# NT_GNU_ABI_TAG: Linux, and the oldest kernel it runs on; libnvidia-tls is told apart by 2.3.99
ABI_TAG = (0, 2, 3, 99)


def shared_object(
    soname: str, *, bits: int = 64, machine: int = 0, abi_tag: tuple[int, int, int, int] | None = None
) -> bytes:
    """A shared object without code whose DT_SONAME is `soname` ("" for none).

    machine: an EM_* number, by default this machine's (or its 32-bit companion's). abi_tag: the words of a GNU
    ABI-tag note: system (0 is Linux) and the kernel version's three parts.
    """
    machine = machine or native_machine(bits)
    wide = bits == 64
    header_size, program_size, section_size = (64, 56, 64) if wide else (52, 32, 40)
    word = "Q" if wide else "I"
    names = b"\0" + soname.encode() + b"\0"
    symbols = bytes(24 if wide else 16)  # the one entry that must be there: the undefined symbol
    hash_table = struct.pack("<4I", 1, 1, 0, 0)  # one bucket, one symbol, nothing to find
    note = b"" if abi_tag is None else struct.pack("<3I4s4I", 4, 16, 1, b"GNU\0", *abi_tag)
    section_names = b"\0.hash\0.dynsym\0.dynstr\0.dynamic\0.note.ABI-tag\0.shstrtab\0"

    segments = 4 if note else 3
    at = header_size + segments * program_size
    places: dict[str, int] = {}
    body = b""
    for name, part in ((".note.ABI-tag", note), (".hash", hash_table), (".dynsym", symbols), (".dynstr", names)):
        body += bytes(-(at + len(body)) % 8)
        places[name] = at + len(body)
        body += part
    body += bytes(-(at + len(body)) % 8)
    places[".dynamic"] = at + len(body)
    tags = [
        (DT_HASH, places[".hash"]),
        (DT_STRTAB, places[".dynstr"]),
        (DT_SYMTAB, places[".dynsym"]),
        (DT_STRSZ, len(names)),
        (DT_SYMENT, len(symbols)),
        *([(DT_SONAME, 1)] if soname else []),
        (DT_NULL, 0),
    ]
    dynamic = b"".join(struct.pack(f"<2{word}", *tag) for tag in tags)
    body += dynamic
    loaded = at + len(body)
    places[".shstrtab"] = loaded
    body += section_names
    body += bytes(-(at + len(body)) % 8)
    sections_at = at + len(body)

    def segment(kind: int, flags: int, offset: int, size: int, align: int) -> bytes:
        if wide:
            return struct.pack("<2I6Q", kind, flags, offset, offset, offset, size, size, align)
        return struct.pack("<8I", kind, offset, offset, offset, size, size, flags, align)

    def section(name: str, kind: int, flags: int, size: int, link: int, info: int, entry: int) -> bytes:
        where = places[name]
        address = where if flags else 0
        start = section_names.index(b"\0" + name.encode() + b"\0") + 1
        return struct.pack(f"<2I4{word}2I2{word}", start, kind, flags, address, where, size, link, info, 8, entry)

    programs = segment(PT_LOAD, 6, 0, loaded, PAGE) + segment(PT_DYNAMIC, 6, places[".dynamic"], len(dynamic), 8)
    # without it the loader takes the stack to be executable, which glibc from 2.41 on refuses for what is loaded later
    programs += segment(PT_GNU_STACK, 6, 0, 0, 16)
    sections = bytes(section_size)
    sections += section(".hash", SHT_HASH, 2, len(hash_table), 2, 0, 4)
    sections += section(".dynsym", SHT_DYNSYM, 2, len(symbols), 3, 1, len(symbols))
    sections += section(".dynstr", SHT_STRTAB, 2, len(names), 0, 0, 0)
    sections += section(".dynamic", SHT_DYNAMIC, 3, len(dynamic), 3, 0, struct.calcsize(f"<2{word}"))
    count = 5
    if note:
        programs += segment(PT_NOTE, 4, places[".note.ABI-tag"], len(note), 4)
        sections += section(".note.ABI-tag", SHT_NOTE, 2, len(note), 0, 0, 0)
        count += 1
    sections += section(".shstrtab", SHT_STRTAB, 0, len(section_names), 0, 0, 0)
    count += 1
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    header = ident + struct.pack(
        f"<2HI3{word}I6H",
        *(3, machine, 1, 0, header_size, sections_at, 0),
        *(header_size, program_size, segments, section_size, count, count - 1),
    )
    return header + programs + body + sections


def native_machine(bits: int = 64) -> int:
    """The EM_* number of this machine, or of the 32-bit machine that its 64-bit one can also be."""
    arm = platform.machine() in ("aarch64", "arm64")
    return (EM_AARCH64 if arm else EM_X86_64) if bits == 64 else (EM_ARM if arm else EM_386)
