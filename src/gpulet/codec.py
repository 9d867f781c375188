"""JSON in and out without importing `json`, which costs a starting container about 9 ms.

CPython's own C scanner and encoder live in `_json`; `json` wraps them. This module wraps them too, thinner, and turns
to `json` itself on any trouble: `_json` is private to CPython, so it may change or be absent, and on 3.11 bad input
makes it raise SystemError unless `json.decoder` is loaded. tests/test_codec.py holds both ways equal.
"""

from __future__ import annotations

try:
    import _json
except ImportError:  # another interpreter
    _json = None  # type: ignore[assignment]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SPACE = " \t\r\n"  # RFC 8259, section 2


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

    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _refuse(value: object) -> object:
    raise TypeError(f"JSON can't hold a {type(value).__name__}")
