"""Headers as HPACK (RFC 7541) compresses them, by the library of that name.

A client that calls the same again sends the same few bytes: each stands for a header that went before. What such bytes
mean is remembered, for as long as nothing changes that they refer to: taking them apart anew is half of a call's cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpack import Decoder, Encoder, NeverIndexedHeaderTuple

Headers = Sequence[tuple[bytes, bytes]]

INDEXED, LONGER = 0x80, 0xFF  # RFC 7541, 6.1: a byte from 0x80 on is one whole header; 0xFF alone goes on behind it
MOST_KNOWN, MOST_BYTES = 16, 64  # blocks that are remembered, and bytes of one; a client has few kinds of calls


def block(headers: Headers) -> bytes:
    """Headers, compressed so that they are right in every connection: without the table of what went before, which is
    given up in the first byte (RFC 7541, 4.2)."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return encoder.encode([NeverIndexedHeaderTuple(*header) for header in headers])


class Reader:
    """The headers of one connection's requests. most: bytes of one request's, taken apart."""

    def __init__(self, most: int) -> None:
        self._decoder = Decoder(max_header_list_size=most)
        self._known: dict[bytes, Headers] = {}

    def read(self, data: bytes) -> Headers:
        """Every block has to come here, in order: later ones refer to what went before. Raises hpack's HPACKError."""
        known = self._known.get(data)
        if known is not None:
            return known
        fields = list(self._decoder.decode(data, raw=True))
        if not data or min(data) < INDEXED or max(data) == LONGER:
            self._known.clear()  # it may have put something into the table
        elif len(data) <= MOST_BYTES and len(self._known) < MOST_KNOWN:
            self._known[data] = fields
        return fields
