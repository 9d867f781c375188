"""The dynamic loader's cache, /etc/ld.so.cache: read it, merge entries into it.

The format is glibc's (sysdeps/generic/dl-cache.h): an optional old table, then a header, entries of 24 bytes, strings
and extensions. The loader searches by halves, so the order of the entries is part of the format: descending by a
comparison in which runs of digits count as numbers (elf/dl-cache.c, _dl_cache_libcmp). Loaded by the programs in
launch/.
"""

from __future__ import annotations

import struct

from gpulet.errors import NodeError
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

OLD_MAGIC = b"ld.so-1.7.0\0"
MAGIC = b"glibc-ld.so.cache1.1"
_HEADER = struct.Struct("<20sIIB3xI12x")  # magic, entries, bytes of strings, flags, offset of the extensions
_ENTRY = struct.Struct("<iIIIQ")  # flags, name, path, OS version, hardware capabilities
_OLD_ENTRY = struct.Struct("<iII")
_LITTLE_ENDIAN = 2
_EXTENSION_MAGIC = 0xEAA42174  # -358342284 as uint32, dl-cache.h cache_extension_magic
_TAG_GENERATOR, _TAG_HWCAPS = 0, 1
_HWCAP_EXTENSION = 1 << 62
# A container's cache is its image's, and entries may share strings: without bounds some MiB of it become TiB here.
MOST_ENTRIES = 1 << 16
MOST_STRING = 4096  # bytes: PATH_MAX
MOST_TEXT = 32 << 20  # characters of all strings together

# flags: the low byte says "ELF, glibc 2", the next one the architecture (dl-cache.h)
FLAGS = {
    ("x86_64", 64): 0x0303,
    ("x86_64", 32): 0x0003,
    ("aarch64", 64): 0x0A03,
    ("aarch64", 32): 0x0903,
    ("ppc64le", 64): 0x0503,
}


class Entry(Value):
    """One library. name: the soname that programs ask for; path: where it is; the rest as in the file."""

    name: str
    path: str
    flags: int = 0x0303
    osversion: int = 0
    hwcap: int = 0


class Cache(Value):
    """A whole cache. hwcaps: the names of glibc-hwcaps folders that entries' hwcap fields count into."""

    entries: tuple[Entry, ...] = ()
    hwcaps: tuple[str, ...] = ()
    generator: str = ""

    def find(self, name: str, flags: int = 0x0303) -> str:
        """The path that the loader takes for a soname on a machine without special capabilities, "" for none."""
        return next((e.path for e in self.entries if e.name == name and e.flags == flags and not e.hwcap), "")


def _bad(seen: object, wanted: str) -> NodeError:
    return NodeError("loader cache is damaged", seen=seen, wanted=wanted, remedy="run ldconfig to write it anew")


def _string(data: bytes, start: int) -> str:
    end = data.find(b"\0", start, start + MOST_STRING)
    if not 0 <= start < len(data) or end < 0:
        raise _bad(f"string at {start}", f"an ended string below {len(data)}")
    return data[start:end].decode("utf-8", "surrogateescape")


def _entries(data: bytes, rows: Iterable[tuple[int, ...]], base: int) -> tuple[Entry, ...]:
    """The entries of rows (flags, name, path, ...), whose strings stand at offsets from `base`."""
    found: list[Entry] = []
    left = MOST_TEXT
    for flags, name, path, *rest in rows:
        entry = Entry(_string(data, base + name), _string(data, base + path), flags, *rest)
        left -= len(entry.name) + len(entry.path)
        if left < 0 or len(found) == MOST_ENTRIES:
            raise _bad("more", f"{MOST_ENTRIES} entries at most, with {MOST_TEXT} bytes of text")
        found.append(entry)
    return tuple(found)


def _new_part(data: bytes) -> int:
    """Where the part in today's format starts, -1 where the file has the old one alone."""
    if not data.startswith(OLD_MAGIC):
        return 0
    if len(data) < 16:
        raise _bad(f"{len(data)} bytes", "a count after the magic")
    (count,) = struct.unpack_from("<I", data, 12)
    start = (16 + count * _OLD_ENTRY.size + 7) & ~7  # aligned as the header's strictest field
    return start if data[start : start + len(MAGIC)] == MAGIC else -1


def _parse_old(data: bytes) -> Cache:
    (count,) = struct.unpack_from("<I", data, 12)
    strings = 16 + count * _OLD_ENTRY.size
    if strings > len(data):
        raise _bad(f"{count} entries", f"at most {(len(data) - 16) // _OLD_ENTRY.size}")
    return Cache(_entries(data, _OLD_ENTRY.iter_unpack(data[16:strings]), strings))


def _sections(data: bytes, offset: int) -> dict[int, bytes]:
    """The sections of the extension area at `offset`, 0 meaning that there is none: tag -> content."""
    if not offset or len(data) < offset + 8:
        return {}
    magic, count = struct.unpack_from("<II", data, offset)
    if magic != _EXTENSION_MAGIC or len(data) < offset + 8 + 16 * count:
        raise _bad(f"extension magic {magic:#x}, {count} sections", f"{_EXTENSION_MAGIC:#x} within the file")
    found = {}
    for tag, _flags, start, size in struct.iter_unpack("<IIII", data[offset + 8 : offset + 8 + 16 * count]):
        if start + size > len(data):
            raise _bad(f"extension section up to {start + size}", f"at most {len(data)}")
        if tag == _TAG_GENERATOR or (tag == _TAG_HWCAPS and size % 4 == 0 and size <= MOST_STRING):
            found[tag] = data[start : start + size]
    return found


def _offsets(sections: dict[int, bytes]) -> list[int]:
    """Where the names of the glibc-hwcaps folders stand."""
    return [at for (at,) in struct.iter_unpack("<I", sections.get(_TAG_HWCAPS, b""))]


def parse(data: bytes) -> Cache:
    """Read a cache file. Raises NodeError where it is no cache or ends too early."""
    start = _new_part(data)
    if start < 0:
        return _parse_old(data)
    data = data[start:] if start else data
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise _bad(data[:20], f"the magic {MAGIC.decode()}")
    _magic, count, _length, flags, offset = _HEADER.unpack_from(data)
    if flags & 3 not in (0, _LITTLE_ENDIAN):
        raise _bad(f"byte order {flags & 3}", "little endian (2) or unset (0)")
    strings = _HEADER.size + count * _ENTRY.size
    if strings > len(data):
        raise _bad(f"{count} entries", f"at most {(len(data) - _HEADER.size) // _ENTRY.size}")
    entries = _entries(data, _ENTRY.iter_unpack(data[_HEADER.size : strings]), 0)
    sections = _sections(data, offset)
    hwcaps = tuple(_string(data, at) for at in _offsets(sections))
    return Cache(entries, hwcaps, sections.get(_TAG_GENERATOR, b"").decode("utf-8", "replace"))


def name_key(name: str) -> tuple[int, ...]:
    """A sort key that orders names as the loader does: a run of digits counts as one number and is above every other
    byte. (The loader takes bytes as signed on x86; sonames beyond ASCII, where that would matter, don't occur.)
    """
    data = name.encode("utf-8", "surrogateescape")[:256]  # no file has a longer name, and long numbers take for ever
    out: list[int] = []
    number = -1
    for byte in data:
        if 48 <= byte <= 57:
            number = max(number, 0) * 10 + byte - 48
            continue
        if number >= 0:
            out.append(256 + number)
            number = -1
        out.append(byte)
    if number >= 0:
        out.append(256 + number)
    return tuple(out)


def _order(entry: Entry) -> tuple[object, ...]:
    """Sort key of the file, largest first: name, flags, glibc-hwcaps entries before plain ones, hwcap."""
    return name_key(entry.name), entry.flags, entry.hwcap & _HWCAP_EXTENSION, entry.hwcap


class _Strings:
    """The strings of a file, which begin at `base` with those that are there already."""

    def __init__(self, base: int, there: bytes = b"") -> None:
        self.base = base
        self.data = bytearray(there)
        self._known: dict[str, int] = {}

    def at(self, text: str) -> int:
        """Where a string stands in the file; it is put there if need be."""
        if text not in self._known:
            self._known[text] = self.base + len(self.data)
            self.data += text.encode("utf-8", "surrogateescape") + b"\0"
        return self._known[text]


def _file(rows: bytes, strings: _Strings, generator: bytes, hwcaps: Sequence[int]) -> bytes:
    """A file of its parts. hwcaps: where the names of the glibc-hwcaps folders stand."""
    text = strings.data
    text += b"\0" * (-len(text) % 4)
    body = strings.base + len(text)
    sections = [(_TAG_GENERATOR, generator)]
    if hwcaps:
        sections.append((_TAG_HWCAPS, struct.pack(f"<{len(hwcaps)}I", *hwcaps)))
    at = body + 8 + 16 * len(sections)
    directory, content = bytearray(struct.pack("<II", _EXTENSION_MAGIC, len(sections))), bytearray()
    for tag, data in sections:
        directory += struct.pack("<IIII", tag, 0, at + len(content), len(data))
        content += data + b"\0" * (-len(data) % 4)  # the numbers of the next section must lie aligned
    header = _HEADER.pack(MAGIC, len(rows) // _ENTRY.size, len(text), _LITTLE_ENDIAN, body)
    return b"".join((header, rows, text, directory, content))


def write(cache: Cache) -> bytes:
    """The cache as a file in today's format, entries put in the loader's order; equal ones keep theirs."""
    entries = sorted(cache.entries, key=_order, reverse=True)  # stable: equal ones keep their order
    strings = _Strings(_HEADER.size + len(entries) * _ENTRY.size)
    rows = [_ENTRY.pack(e.flags, strings.at(e.name), strings.at(e.path), e.osversion, e.hwcap) for e in entries]
    hwcaps = [strings.at(name) for name in cache.hwcaps]
    return _file(b"".join(rows), strings, cache.generator.encode("utf-8", "replace"), hwcaps)


def merge(data: bytes | None, entries: Iterable[Entry]) -> bytes:
    """A cache with `entries` before others of their name; None stands for a cache that isn't there.

    An entry that is in the cache already isn't doubled, so merging twice gives the same bytes. Raises NodeError.
    """
    new = tuple(dict.fromkeys(entries))
    if not data:
        return write(Cache(new, generator="gpulet"))
    start = max(_new_part(data), 0)
    return _merge_rows(data[start:] if start else data, new) or merge_anew(data, new)


def merge_anew(data: bytes, new: Sequence[Entry]) -> bytes:
    """The same by taking the cache apart and putting all in order, whatever order it had. Raises NodeError."""
    old, known = parse(data), set(new)
    return write(old.replace(entries=(*new, *(entry for entry in old.entries if entry not in known))))


class _Table:
    """The rows of a file as the numbers that they are, six to a row, and their sort keys as they are asked for."""

    def __init__(self, data: bytes, count: int) -> None:
        self.count = count
        self.numbers = struct.unpack_from(f"<{6 * count}I", data, _HEADER.size)
        self._data = data
        self._keys: dict[int, tuple[object, ...]] = {}

    def entry(self, row: int) -> Entry:
        (found,) = _entries(self._data, [_ENTRY.unpack_from(self._data, _HEADER.size + row * _ENTRY.size)], 0)
        return found

    def key(self, row: int) -> tuple[object, ...]:
        if row not in self._keys:
            self._keys[row] = _order(self.entry(row))
        return self._keys[row]

    def look_up(self, entry: Entry, wanted: Any) -> tuple[int, list[int]]:
        """The row before which an entry belongs, and the rows that say the same. wanted: its sort key."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self.key(middle) > wanted:
                low = middle + 1
            else:
                high = middle
        same, row = [], low
        while row < self.count and self.key(row) == wanted:
            if self.entry(row) == entry:
                same.append(row)
            row += 1
        return low, same


def _merge_rows(data: bytes, new: Sequence[Entry]) -> bytes:
    """The same for a cache as ldconfig writes it, b"" for another. Raises NodeError.

    Its hundreds of entries are in the loader's order already. So they stay numbers, moved by the room that the new ones
    take, and each new one looks its place up by halves, as the loader will: a fifth of the time.
    """
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        return b""
    _magic, count, length, flags, extension = _HEADER.unpack_from(data)
    base = _HEADER.size + count * _ENTRY.size
    end = base + length
    usual = flags & 3 in (0, _LITTLE_ENDIAN) and count <= MOST_ENTRIES
    if not usual or not base < end <= len(data) or data[end - 1]:
        return b""
    table, sections = _Table(data, count), _sections(data, extension)
    names, paths, hwcaps = table.numbers[1::6], table.numbers[2::6], _offsets(sections)
    strings_at = (*names, *paths, *hwcaps)
    if strings_at and not (base <= min(strings_at) and max(strings_at) < end):
        return b""
    places: dict[int, list[Entry | int]] = {}  # row -> what goes before it: new entries, or rows that say the same
    moved: set[int] = set()
    for wanted, entry in sorted(((_order(entry), entry) for entry in new), key=lambda pair: pair[0], reverse=True):
        place, same = table.look_up(entry, wanted)
        places.setdefault(place, []).append(same[0] if same else entry)
        moved.update(same)
    more = _ENTRY.size * (sum(map(len, places.values())) - len(moved))  # bytes by which everything behind moves
    old = list(table.numbers)
    old[1::6], old[2::6] = [at + more for at in names], [at + more for at in paths]
    strings = _Strings(base + more, data[base:end])
    rows = _with_places(old, places, moved, strings)
    generator = sections.get(_TAG_GENERATOR, b"")
    return _file(struct.pack(f"<{len(rows)}I", *rows), strings, generator, [at + more for at in hwcaps])


def _with_places(old: list[int], places: dict[int, list[Entry | int]], moved: set[int], strings: _Strings) -> list[int]:
    """The numbers of all rows: the old ones without those that moved, and before them what belongs there."""
    rows: list[int] = []
    last = 0
    for place in sorted({*places, *moved}):
        rows += old[6 * last : 6 * place]
        for one in places.get(place, ()):
            if isinstance(one, int):
                rows += old[6 * one : 6 * one + 6]
            else:
                rows += (one.flags & 0xFFFFFFFF, strings.at(one.name), strings.at(one.path), one.osversion)
                rows += (one.hwcap & 0xFFFFFFFF, one.hwcap >> 32)
        last = place + (place in moved)
    return rows + old[6 * last :]
