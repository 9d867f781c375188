"""JSON in and out without importing `json`, which costs a starting container about 9 ms; and things kept as JSON.

CPython's own C scanner and encoder live in `_json`; `json` wraps them. This module wraps them too, thinner, and turns
to `json` itself on any trouble: `_json` is private to CPython, so it may change or be absent, and on 3.11 bad input
makes it raise SystemError unless `json.decoder` is loaded. tests/test_codec.py holds both ways equal.
"""

from __future__ import annotations

import os

try:
    import _json
except ImportError:  # another interpreter
    _json = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_SPACE = " \t\r\n"  # RFC 8259, section 2
_FRESH = 2_000_000_000  # ns: a younger file may change once more within one tick of its clock, so it isn't kept


class _Context:
    """What `_json.make_scanner` asks of a JSONDecoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


def loads(text: bytes | str, *, first: bool = False) -> Any:
    """The value that a JSON text holds. Raises ValueError where it isn't JSON.

    first: take the first value and ignore whatever follows it, as Go's stream decoder does (a container's state on
    standard input is read so).
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8").removeprefix("\ufeff")
    start = len(text) - len(text.lstrip(_SPACE))
    if _json is not None:
        try:
            value, end = _json.make_scanner(_Context())(text, start)  # type: ignore[arg-type]
        except (StopIteration, SystemError, ValueError, TypeError, RecursionError):
            pass  # say it in json's words
        else:
            if first or not text[end:].strip(_SPACE):
                return value
    return _slow_loads(text, start, first)


def _slow_loads(text: str, start: int, first: bool) -> Any:
    import json

    try:
        return json.JSONDecoder().raw_decode(text, start)[0] if first else json.loads(text)
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def dumps(value: Any) -> bytes:
    """A value as compact JSON in ASCII. Raises TypeError or ValueError for what JSON can't hold (NaN included)."""
    if _json is not None:
        try:
            encode = _json.make_encoder({}, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, False)
            return "".join(encode(value, 0)).encode("ascii")
        except (SystemError, TypeError, ValueError, RecursionError):
            pass
    import json

    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
    except RecursionError:
        raise ValueError("nested too deeply for JSON") from None


def is_sound(text: str) -> bool:
    """Whether system calls take a text: JSON can hold NUL and halves of surrogate pairs, a path or argument can't."""
    if "\0" in text:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _refuse(value: object) -> object:
    raise TypeError(f"JSON can't hold a {type(value).__name__}")


def kept(source: str, at: str, make: Callable[[], Any], stamp: str = "") -> Any:
    """What `make()` makes of the file `source`, kept as JSON in the file `at` and taken from there the next time.

    Reading TOML or YAML costs a starting container tens of milliseconds, this costs one. What is kept counts for this
    very file (inode, size, times of modification and of change: the latter can't be set) and `stamp` alone, and only
    where root or ourselves wrote it. Where it can't be kept (a folder that can't be written, a value that JSON would
    change), nothing is said. Raises what `make` raises.
    """
    import time

    try:
        state = os.stat(source)
    except OSError:
        return make()
    began = time.time_ns()
    key = [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns, stamp]
    try:
        content = read_own(at)
        if content["key"] == key:
            return content["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = make()
    if began - state.st_ctime_ns > _FRESH:
        write_own(at, {"key": key, "value": value})
    return value


def read_own(path: str) -> Any:
    """The JSON in a file that root or ourselves wrote and nobody else can write. Raises OSError for none such,
    ValueError for no JSON."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe makes nobody wait
    try:
        info = os.fstat(descriptor)
        if info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise PermissionError(1, "another's file", path)  # EPERM
        return loads(read_all(descriptor, info.st_size))
    finally:
        os.close(descriptor)


def read_file(path: str) -> bytes:
    """What a file holds. Raises OSError, also for what isn't one: a pipe would make us wait, a device may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        info = os.fstat(descriptor)
        if info.st_mode & 0o170000 != 0o100000:  # S_IFMT, S_IFREG: inode(7)
            raise OSError(22, "not a regular file", path)  # EINVAL
        return read_all(descriptor, info.st_size)
    finally:
        os.close(descriptor)


def read_all(descriptor: int, expected: int = 4096, most: int = 1 << 62) -> bytes:
    """What a descriptor gives until its end, or `most` bytes of it: `open` and its file object make nine system calls
    of two. expected: bytes, as fstat tells them. Raises OSError."""
    parts = []
    left = most
    while left > 0:
        part = os.read(descriptor, min(left, max(expected, 4096) + 1))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_standard_input(most: int = -1) -> bytes:
    """What standard input gives until its end, or `most` bytes of it. Raises OSError, also where it was closed: Python
    has none then."""
    import sys

    if sys.stdin is None:
        raise OSError(9, "it is closed")  # EBADF
    return sys.stdin.buffer.read(most)


def write_own(at: str, content: dict[str, Any]) -> None:
    """Puts JSON at a path, aside and renamed. What can't be kept, or what JSON would change, isn't, without a word."""
    try:
        text = dumps(content)
        if loads(text) == content:
            make_folder(os.path.dirname(at) or ".")
            put(at, text)
    except (OSError, TypeError, ValueError):
        pass


def put(at: str, data: bytes, changed: int = 0) -> None:
    """Puts a file at a path, aside and renamed; a failure leaves nothing. changed: its time of modification, ns; 0 for
    now. Raises OSError."""
    aside = f"{at}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # of no one else's making, be it a link
    try:
        with open(os.open(aside, flags, 0o644), "wb") as file:
            file.write(data)
        if changed:
            os.utime(aside, ns=(changed, changed))
        os.rename(aside, at)
    except OSError:
        try:
            os.unlink(aside)
        except OSError:
            pass
        raise


def make_folder(path: str) -> None:
    """Makes a folder and those above it, where missing, so that nobody else can write there and everybody can read,
    whatever the umask with which an engine starts us; makedirs gives its mode to the last one alone. Raises OSError."""
    if not os.path.isdir(path):
        above = os.path.dirname(path.rstrip("/"))
        if above:
            make_folder(above)
        try:
            os.mkdir(path, 0o755)
            os.chmod(path, 0o755)
        except FileExistsError:  # another container's was first, or something else is there: writing tells
            pass
