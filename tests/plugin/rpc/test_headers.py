"""Headers that are remembered mean what HPACK's decoder says, whatever came between."""

from __future__ import annotations

from typing import Any

import pytest
from hpack import Decoder, Encoder, HPACKError, NeverIndexedHeaderTuple
from hypothesis import given
from hypothesis import strategies as st

from gpulet.plugin.rpc.headers import MOST_BYTES, MOST_KNOWN, Reader

NAMES = st.sampled_from([b":method", b":path", b"te", b"grpc-timeout", b"user-agent", b"x"])
VALUES = st.sampled_from([b"POST", b"/v1beta1.DevicePlugin/Allocate", b"trailers", b"1S", b"2S", b""])
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)


@given(st.lists(st.tuples(FIELDS, st.sampled_from(["indexed", "never", "small", "large"])), max_size=12))
def test_every_block_reads_as_without_a_memory(requests: list[tuple[list[tuple[bytes, bytes]], str]]) -> None:
    encoder, plain, reader = Encoder(), Decoder(), Reader(1 << 16)
    for fields, how in requests:
        if how in ("small", "large"):
            encoder.header_table_size = 64 if how == "small" else 4096
        sent: Any = [NeverIndexedHeaderTuple(*field) for field in fields] if how == "never" else fields
        data = encoder.encode(sent)
        assert list(reader.read(data)) == list(plain.decode(data, raw=True)) == fields


def test_the_same_bytes_mean_something_else_once_the_table_has_changed() -> None:
    encoder, reader = Encoder(), Reader(1 << 16)
    first = [(b"x", b"one")]
    encoder.encode(first)
    reader.read(Encoder().encode(first))
    again = encoder.encode(first)
    assert len(again) == 1 and reader.read(again) == first == reader.read(again)
    other = [(b"y", b"two")]
    assert reader.read(encoder.encode(other)) == other
    assert reader.read(again) == other, "the newest header has the index that the older one had"


def test_what_is_remembered_is_bounded() -> None:
    reader = Reader(1 << 16)
    for number in range(3 * MOST_KNOWN):
        reader.read(bytes([0x82 + number % 8] * (1 + number // 8)))
    reader.read(b"\x82" * (MOST_BYTES + 1))
    assert len(reader._known) == MOST_KNOWN


@pytest.mark.parametrize("data", [b"\xfe", b"\x80", b"\xff\xff\xff\xff\x7f"])
def test_what_cannot_be_read_is_not_remembered(data: bytes) -> None:
    reader = Reader(1 << 16)
    for _ in range(2):
        with pytest.raises(HPACKError):
            reader.read(data)
