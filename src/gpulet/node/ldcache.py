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
    from collections.abc import Iterable

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


def _extensions(data: bytes, offset: int) -> tuple[tuple[str, ...], str]:
    """(hwcaps names, generator) out of the extension area at `offset`, 0 meaning that there is none."""
    hwcaps: tuple[str, ...] = ()
    generator = ""
    if not offset or len(data) < offset + 8:
        return hwcaps, generator
    magic, count = struct.unpack_from("<II", data, offset)
    if magic != _EXTENSION_MAGIC or len(data) < offset + 8 + 16 * count:
        raise _bad(f"extension magic {magic:#x}, {count} sections", f"{_EXTENSION_MAGIC:#x} within the file")
    for tag, _flags, start, size in struct.iter_unpack("<IIII", data[offset + 8 : offset + 8 + 16 * count]):
        if start + size > len(data):
            raise _bad(f"extension section up to {start + size}", f"at most {len(data)}")
        if tag == _TAG_GENERATOR:
            generator = data[start : start + size].decode("utf-8", "replace")
        elif tag == _TAG_HWCAPS and size % 4 == 0 and size <= MOST_STRING:
            hwcaps = tuple(_string(data, at) for (at,) in struct.iter_unpack("<I", data[start : start + size]))
    return hwcaps, generator


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
    return Cache(entries, *_extensions(data, offset))


def name_key(name: str) -> tuple[tuple[int, int], ...]:
    """A sort key that orders names as the loader does: a run of digits counts as one number and is above every other
    byte. (The loader takes bytes as signed on x86; sonames beyond ASCII, where that would matter, don't occur.)
    """
    data = name.encode("utf-8", "surrogateescape")[:256]  # no file has a longer name, and long numbers take for ever
    out: list[tuple[int, int]] = []
    number = -1
    for byte in data:
        if 48 <= byte <= 57:
            number = max(number, 0) * 10 + byte - 48
            continue
        if number >= 0:
            out.append((1, number))
            number = -1
        out.append((0, byte))
    if number >= 0:
        out.append((1, number))
    return tuple(out)


def _order(entry: Entry) -> tuple[object, ...]:
    """Sort key of the file, largest first: name, flags, glibc-hwcaps entries before plain ones, hwcap."""
    return name_key(entry.name), entry.flags, entry.hwcap & _HWCAP_EXTENSION, entry.hwcap


def write(cache: Cache) -> bytes:
    """The cache as a file in today's format, entries put in the loader's order; equal ones keep theirs."""
    entries = sorted(cache.entries, key=_order, reverse=True)  # stable: equal ones keep their order
    base = _HEADER.size + len(entries) * _ENTRY.size
    strings = bytearray()
    offsets: dict[str, int] = {}

    def offset(text: str) -> int:
        if text not in offsets:
            offsets[text] = base + len(strings)
            strings.extend(text.encode("utf-8", "surrogateescape") + b"\0")
        return offsets[text]

    table = b"".join(_ENTRY.pack(e.flags, offset(e.name), offset(e.path), e.osversion, e.hwcap) for e in entries)
    hwcaps = struct.pack(f"<{len(cache.hwcaps)}I", *(offset(name) for name in cache.hwcaps))
    strings.extend(b"\0" * (-len(strings) % 4))
    body = base + len(strings)
    sections = [(_TAG_GENERATOR, cache.generator.encode("utf-8", "replace"))]
    if cache.hwcaps:
        sections.append((_TAG_HWCAPS, hwcaps))
    at = body + 8 + 16 * len(sections)
    directory, content = bytearray(struct.pack("<II", _EXTENSION_MAGIC, len(sections))), bytearray()
    for tag, data in sections:
        directory += struct.pack("<IIII", tag, 0, at + len(content), len(data))
        content += data + b"\0" * (-len(data) % 4)  # the numbers of the next section must lie aligned
    header = _HEADER.pack(MAGIC, len(entries), len(strings), _LITTLE_ENDIAN, body)
    return header + table + bytes(strings) + bytes(directory) + bytes(content)


def merge(data: bytes | None, entries: Iterable[Entry]) -> bytes:
    """A cache with `entries` before others of their name; None stands for a cache that isn't there.

    An entry that is in the cache already isn't doubled, so merging twice gives the same bytes.
    """
    old = parse(data) if data else Cache(generator="gpulet")
    new = tuple(dict.fromkeys(entries))
    known = set(new)
    return write(old.replace(entries=new + tuple(entry for entry in old.entries if entry not in known)))
