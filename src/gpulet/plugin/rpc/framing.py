"""Messages and statuses as "gRPC over HTTP2" writes them (PROTOCOL-HTTP2.md of the gRPC project)."""

from __future__ import annotations

import struct
from urllib.parse import unquote

from gpulet.errors import GpuletError
from gpulet.plugin.rpc.headers import Headers

MOST_BYTES = 4 << 20  # of one message; what gRPC's own libraries take unless told otherwise
MOST_DETAILS = 4096  # bytes of an encoded status message: it travels as a header, and clients take 8 to 16 KiB of those
CONTENT_TYPE = (b"content-type", b"application/grpc")

# The codes by number, doc/statuscodes.md of the gRPC project.
CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
NUMBERS = {code: number for number, code in enumerate(CODES)}


class CallFailed(GpuletError):
    """A call ended with another status than OK. code: its name; details: what the other side said."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


def framed(message: bytes) -> bytes:
    """A message with its prefix: not compressed, and its length."""
    return struct.pack(">BI", 0, len(message)) + message


def single(body: bytes) -> bytes:
    """The one message of a body that should have exactly one. Raises CallFailed."""
    if len(body) >= 5:
        compressed, length = struct.unpack_from(">BI", body)
        if compressed:
            raise CallFailed("UNIMPLEMENTED", "compressed messages are not understood")
        if len(body) == 5 + length:
            return body[5:]
    raise CallFailed("UNIMPLEMENTED" if not body else "INTERNAL", f"one message is wanted, and {len(body)} bytes came")


def status(code: str = "OK", details: str = "") -> Headers:
    """A status as headers. Details are percent-encoded, which in gRPC leaves spaces and most signs as they are."""
    headers = [(b"grpc-status", b"%d" % NUMBERS[code])]
    if details:
        headers.append((b"grpc-message", _encoded(details)))
    return headers


def _encoded(details: str) -> bytes:
    """As many whole characters as there is room for: one may take twelve bytes."""
    encoded = bytearray()
    for character in details:
        more = b"".join(map(_percent, character.encode("utf-8", "replace")))
        if len(encoded) + len(more) > MOST_DETAILS:
            break
        encoded += more
    return bytes(encoded)


def _percent(byte: int) -> bytes:
    return b"%c" % byte if 32 <= byte < 127 and byte != ord("%") else b"%%%02X" % byte


def failure(headers: dict[bytes, bytes]) -> CallFailed | None:
    """What the headers that ended a call say; None for OK."""
    number = headers.get(b"grpc-status", b"").decode("ascii", "replace")
    if number == "0":
        return None
    known = number.isdecimal() and int(number) < len(CODES)
    code = CODES[int(number)] if known else "UNKNOWN"
    details = unquote(headers.get(b"grpc-message", b"").decode("ascii", "replace"))
    return CallFailed(code, details or ("" if known else f"no status that is known: {number!r}"))
