"""What a client may not do in HTTP/2, and what it may and seldom does; as frames (RFC 9113)."""

from __future__ import annotations

import struct

import pytest
from hpack import Decoder, Encoder
from hyperframe.frame import (
    AltSvcFrame,
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulet.plugin.rpc.headers import block
from gpulet.plugin.rpc.http2 import MOST_STREAMS, PREFACE, Http2

ASKED = [(":method", "POST"), (":path", "/x"), ("content-type", "application/grpc")]
HELLO = PREFACE + SettingsFrame(0).serialize()
END = ["END_HEADERS", "END_STREAM"]


class Notes(Http2):
    """Writes down what it is asked; answers nothing by itself."""

    def __init__(self) -> None:
        super().__init__(window=1000)
        self.seen: list[tuple[object, ...]] = []

    def request(self, stream: int, headers: dict[bytes, bytes]) -> None:
        self.seen.append(("request", stream, headers.get(b":path")))

    def body(self, stream: int, data: bytes) -> None:
        self.seen.append(("body", stream, data))

    def complete(self, stream: int) -> None:
        self.seen.append(("complete", stream))

    def sent(self, stream: int) -> None:
        self.seen.append(("sent", stream))

    def gone(self, stream: int) -> None:
        self.seen.append(("gone", stream))


def asked(stream: int = 1, flags: list[str] | None = None) -> HeadersFrame:
    """A request, without what earlier ones have put into the table."""
    encoder = Encoder()
    encoder.header_table_size = 0
    return HeadersFrame(stream, encoder.encode(ASKED), flags=flags or ["END_HEADERS"])


def written(*frames: Frame | bytes) -> bytes:
    return b"".join(frame if isinstance(frame, bytes) else frame.serialize() for frame in frames)


def heard(*frames: Frame | bytes) -> tuple[Notes, str]:
    """What the server makes of it, and what was wrong with it."""
    notes = Notes()
    notes.receive(HELLO)
    notes.outgoing()
    return notes, notes.receive(written(*frames))


def said(notes: Notes) -> list[Frame]:
    data, found = memoryview(notes.outgoing()), []
    while data:
        frame, length = Frame.parse_frame_header(data[:9])
        frame.parse_body(data[9 : 9 + length])
        found.append(frame)
        data = data[9 + length :]
    return found


def raw(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


WRONG = {
    "even stream": ([asked(2)], 1),
    "stream 0": ([raw(1, 4, 0, b"")], 1),
    "body of a stream that isn't open": ([DataFrame(1, b"x")], 1),
    "reset of a stream that isn't open": ([RstStreamFrame(1)], 1),
    "window of a stream that isn't open": ([WindowUpdateFrame(1, 5)], 1),
    "body after the end": ([asked(flags=END), DataFrame(1, b"x")], 5),
    "second end": ([asked(flags=END), asked(flags=END)], 5),
    "second request on a stream": ([asked(), asked()], 1),
    "frame between headers": ([asked(flags=["END_STREAM"]), PingFrame(0, bytes(8))], 1),
    "other stream between headers": ([asked(flags=["END_STREAM"]), ContinuationFrame(3, b"")], 1),
    "continuation of nothing": ([ContinuationFrame(1, b"")], 1),
    "promise": ([PushPromiseFrame(1, 2, b"")], 1),
    "headers that can't be decoded": ([HeadersFrame(1, b"\xff\xff\xff", flags=END)], 9),
    "endless headers": ([HeadersFrame(1, bytes(16000)), *[ContinuationFrame(1, bytes(16000))] * 70], 11),
    "bomb of headers": ([HeadersFrame(1, block([(b"a", b"x" * 4000)]) + b"\x40\x01b\x7f\x81\x1e" + b"y" * 4000
                                      + b"\xbe" * 3000, flags=END)], 9),
    "frame too large": ([raw(0, 0, 1, bytes(16385))], 6),
    "padding longer than the frame": ([asked(), raw(0, 8, 1, b"\x09abc")], 1),
    "ping of another length": ([raw(6, 0, 0, b"123")], 1),
    "settings of another length": ([raw(4, 0, 0, b"12345")], 1),
    "window made up by nothing": ([raw(8, 0, 0, bytes(4))], 1),
    "window of the connection too large": ([WindowUpdateFrame(0, (1 << 31) - 1)], 3),
    "window of a stream too large": ([asked(), WindowUpdateFrame(1, (1 << 31) - 1)], 3),
    "first window too large": ([raw(4, 0, 0, struct.pack(">HI", 4, 1 << 31))], 3),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str):
    frames, code = WRONG[case]
    notes, wrong = heard(*frames, asked(99))
    assert wrong and notes.over and ("request", 99, b"/x") not in notes.seen
    last = said(notes)[-1]
    assert isinstance(last, GoAwayFrame) and last.error_code == code


def test_no_http2():
    for hello in (b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01"):
        notes = Notes()
        assert notes.receive(hello) == "no HTTP/2" and notes.over


def test_seldom_and_right():
    block = asked().data
    notes, wrong = heard(
        HeadersFrame(1, block[:3]), ContinuationFrame(1, block[3:10]), ContinuationFrame(1, b""),
        ContinuationFrame(1, block[10:], flags=["END_HEADERS"]),
        HeadersFrame(3, block, flags=["END_HEADERS", "PRIORITY", "PADDED"], depends_on=1, pad_length=9),
        DataFrame(3, b"padded", flags=["PADDED"], pad_length=7),
        PriorityFrame(3, depends_on=1),
        raw(0xFE, 255, 3, b"what's this"), AltSvcFrame(0, b"o", b"f"),
        PingFrame(0, b"12345678"), PingFrame(0, b"12345678", flags=["ACK"]),
        SettingsFrame(0, {1: 0, 3: 7, 5: 1 << 20, 0xAAAA: 9}), SettingsFrame(0, flags=["ACK"]),
        DataFrame(1, b""), DataFrame(1, b"abc", flags=["END_STREAM"]),
        HeadersFrame(3, Encoder().encode([("a", "trailer")]), flags=END),
    )  # fmt: skip
    assert not wrong
    assert notes.seen == [
        ("request", 1, b"/x"), ("request", 3, b"/x"), ("body", 3, b"padded"), ("body", 1, b""), ("body", 1, b"abc"),
        ("complete", 1), ("complete", 3),
    ]  # fmt: skip
    answers = said(notes)
    assert [type(answer) for answer in answers] == [PingFrame, SettingsFrame]
    assert answers[0].opaque_data == b"12345678" and all("ACK" in answer.flags for answer in answers)


def test_what_comes_for_a_stream_that_we_ended_is_passed_over():
    notes, _ = heard(asked())
    notes.finish(1, block([(b":status", b"415")]))
    late = DataFrame(1, b"late"), WindowUpdateFrame(1, 9), asked(flags=END), RstStreamFrame(1)
    wrong = notes.receive(written(*late, asked(3)))
    assert not wrong and notes.seen == [("request", 1, b"/x"), ("request", 3, b"/x")]
    answers = said(notes)
    assert "END_STREAM" in answers[0].flags and isinstance(answers[1], RstStreamFrame) and not answers[1].error_code


def test_windows_are_made_up_for():
    notes, wrong = heard(asked(), *[DataFrame(1, bytes(100), flags=["PADDED"], pad_length=99)] * 20)
    assert not wrong
    assert sum(frame.window_increment for frame in said(notes) if isinstance(frame, WindowUpdateFrame)) > 20 * 200 - 500


def test_more_streams_than_there_may_be():
    numbers = [2 * number + 1 for number in range(MOST_STREAMS + 1)]
    notes, wrong = heard(*map(asked, numbers), DataFrame(numbers[-1], b"late", flags=["END_STREAM"]))
    assert not wrong and len(notes.seen) == MOST_STREAMS
    (refusal,) = said(notes)
    assert isinstance(refusal, RstStreamFrame) and (refusal.stream_id, refusal.error_code) == (numbers[-1], 7)
    notes.receive(written(RstStreamFrame(1), asked(numbers[-1] + 2)))
    assert notes.seen[-2:] == [("gone", 1), ("request", numbers[-1] + 2, b"/x")]


def test_large_headers_are_as_many_frames_as_they_need():
    notes, _ = heard(asked(flags=END))
    text = b"~" * 30_000
    notes.begin(1, block([(b":status", b"200")]))
    notes.finish(1, block([(b"grpc-message", text)]))
    first, *trailers = said(notes)
    assert first.flags == {"END_HEADERS"} and len(trailers) == 3
    assert [type(frame) for frame in trailers] == [HeadersFrame, ContinuationFrame, ContinuationFrame]
    assert [set(frame.flags) for frame in trailers] == [{"END_STREAM"}, set(), {"END_HEADERS"}]
    assert all(len(frame.data) <= 1 << 14 for frame in trailers)
    assert Decoder().decode(b"".join(frame.data for frame in trailers), raw=True) == [(b"grpc-message", text)]


def test_headers_stand_alone():
    made = block([(b":status", b"200"), (b"grpc-message", b"a b%25")])
    for size in (0, 4096):
        decoder = Decoder()
        decoder.max_allowed_table_size = size
        for _ in range(2):
            assert decoder.decode(made, raw=True) == [(b":status", b"200"), (b"grpc-message", b"a b%25")]


@settings(max_examples=300, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    cut=st.integers(1, 400),
)
def test_spoilt_bytes_end_at_worst_the_connection(places: list[tuple[int, int]], cut: int):
    frames = [asked(), DataFrame(1, b"abc", flags=["END_STREAM"]), PingFrame(0, bytes(8)), asked(3, END),
              SettingsFrame(0, {4: 70_000}), WindowUpdateFrame(0, 5), RstStreamFrame(3), asked(5, END)]  # fmt: skip
    data = bytearray(HELLO + written(*frames))
    for place, value in places:
        data[place % len(data)] = value
    notes = Notes()
    wrong = notes.receive(bytes(data[:cut]))
    if not notes.over:
        wrong = notes.receive(bytes(data[cut:]))
    assert notes.over or not wrong
    if not places:
        assert not wrong and ("request", 5, b"/x") in notes.seen
