"""What we need of an ELF file: its word size, its shared object name, its machine, and one note section.

Some of these files belong to an image, so every offset and size is held against the file before use and nothing is
read without a bound. Facts: System V ABI, chapters "Object Files" and "Dynamic Linking" (elf.h has the names).
Loaded by the programs in launch/; pyelftools would cost tens of milliseconds.
"""

from __future__ import annotations

import os
from struct import Struct, unpack_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NULL, DT_STRTAB, DT_SONAME = 0, 5, 14
SHT_NOTE = 7
EM_386, EM_PPC64, EM_ARM, EM_X86_64, EM_AARCH64 = 3, 21, 40, 62, 183
# The loader's cache: FLAG_ELF_LIBC6 (3) and the architecture's bits (glibc, sysdeps/generic/ldconfig.h).
CACHE_FLAGS = {EM_386: 0x0003, EM_X86_64: 0x0303, EM_PPC64: 0x0503, EM_ARM: 0x0903, EM_AARCH64: 0x0A03}
MOST_HEADERS = 512
MOST_BYTES = 1 << 20
MOST_DYNAMIC = 1 << 14  # bytes: a thousand entries, of which libraries have some dozens


class Malformed(ValueError):
    """Not an ELF file that we understand."""


class Elf:
    """A shared object, read through a descriptor that the caller keeps open."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        ident = os.pread(fd, 16, 0)
        if len(ident) < 16 or ident[:4] != b"\x7fELF" or ident[4] not in (1, 2) or ident[5] not in (1, 2):
            raise Malformed("not an ELF file")
        self.wide = ident[4] == 2
        self.order = "<" if ident[5] == 1 else ">"
        fields = self._struct("HHIQQQIHHHHHH" if self.wide else "HHIIIIIHHHHHH")
        header = fields.unpack(self._read(16, fields.size))
        self.machine: int = header[1]
        self._programs = (header[4], header[8], header[9])  # offset, entry size, count
        self._sections = (header[5], header[10], header[11])
        self._names: int = header[12]

    @property
    def cache_flags(self) -> int:
        """The flags of its entry in the loader's cache; 0 where we know none."""
        return CACHE_FLAGS.get(self.machine, 0)

    def soname(self) -> str:
        """DT_SONAME, "" where it has none."""
        loads: list[tuple[int, int, int]] = []
        dynamic = (0, 0)
        for kind, offset, address, size in self._program_headers():
            if kind == PT_LOAD:
                loads.append((address, offset, size))
            elif kind == PT_DYNAMIC:
                dynamic = (offset, size)
        table = dict(self._dynamic(*dynamic))
        if DT_SONAME not in table or DT_STRTAB not in table:
            return ""
        for address, offset, size in loads:
            if address <= table[DT_STRTAB] < address + size:
                return self._text(offset + table[DT_STRTAB] - address + table[DT_SONAME])
        return ""

    def note(self, name: str) -> tuple[str, bytes] | None:
        """Owner and content of the first note in the section of that name, None where there is no such section."""
        offset, size, count = self._sections
        one = self._struct("IIQQQQIIQQ" if self.wide else "IIIIIIIIII")
        if size != one.size or count > MOST_HEADERS or self._names >= count:
            return None
        rows = list(one.iter_unpack(self._read(offset, size * count)))
        names = rows[self._names][4]
        for row in rows:
            if row[1] == SHT_NOTE and self._text(names + row[0]) == name:
                return self._first_note(self._read(row[4], min(row[5], MOST_BYTES)), max(row[8], 1))
        return None

    def _first_note(self, data: bytes, align: int) -> tuple[str, bytes]:
        if len(data) < 12 or align > 64:
            raise Malformed("a note section is too short")
        name_size, content_size, _ = unpack_from(self.order + "III", data)
        start = 12 + -(-name_size // align) * align
        if start + content_size > len(data):
            raise Malformed("a note leaves its section")
        return _decode(data[12 : 12 + name_size].rstrip(b"\0")), data[start : start + content_size]

    def _program_headers(self) -> Iterator[tuple[int, int, int, int]]:
        offset, size, count = self._programs
        one = self._struct("IIQQQQQQ" if self.wide else "IIIIIIII")
        if count and (size != one.size or count > MOST_HEADERS):
            raise Malformed("odd program headers")
        for row in one.iter_unpack(self._read(offset, one.size * count)):
            yield (row[0], row[2], row[3], row[5]) if self.wide else (row[0], row[1], row[2], row[4])

    def _dynamic(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        one = self._struct("qQ" if self.wide else "iI")
        size = min(size, MOST_DYNAMIC)
        for tag, value in one.iter_unpack(self._read(offset, size - size % one.size)):
            if tag == DT_NULL:
                return
            yield tag, value

    def _struct(self, fields: str) -> Struct:
        return Struct(self.order + fields)

    def _read(self, offset: int, size: int) -> bytes:
        if offset >= 1 << 62:
            raise Malformed("an offset leaves the file")
        data = os.pread(self.fd, size, offset)
        if len(data) < size:
            raise Malformed("a table leaves the file")
        return data

    def _text(self, offset: int) -> str:
        if offset >= 1 << 62:
            raise Malformed("an offset leaves the file")
        return _decode(os.pread(self.fd, 256, offset).partition(b"\0")[0])


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def soname(path: str) -> str:
    """The file's DT_SONAME, "" where it has none, can't be read or is no ELF file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return Elf(fd).soname()
    except (OSError, Malformed):
        return ""
    finally:
        os.close(fd)


def bits(path: str) -> int:
    """32 or 64, the file's ELF class; 0 where it can't be read or is no ELF file."""
    try:
        with open(path, "rb") as file:
            head = file.read(5)
    except OSError:
        return 0
    return {b"\x7fELF\x01": 32, b"\x7fELF\x02": 64}.get(head, 0)
