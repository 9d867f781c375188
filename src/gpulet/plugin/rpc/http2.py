"""The server's side of an HTTP/2 connection (RFC 9113), without its socket: bytes in, bytes out.

Frames are read by hyperframe and headers, in headers.py, by hpack, the two libraries that h2 is made of. What h2 adds,
each rule of the protocol for either side, takes longer for one call than everything else about it; the part of it that
a server for clients on the same machine needs is here: which streams are open, how much each may be sent, and when a
client has broken the rules. In the tests h2 is the client, and judges.
"""

from __future__ import annotations

import struct

from hpack.exceptions import HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from gpulet.plugin.rpc.headers import Headers, Reader

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">IBI")  # of a frame: 24 bits of length and 8 of type, flags, stream
MOST_FRAME = 1 << 14  # bytes of a frame, both ways: what everybody has to take
MOST_HEADERS = 1 << 16  # bytes of one request's headers, counted as HPACK does; beyond it the request is refused
MOST_READ = 1 << 20  # bytes of them, compressed or not, that are read so that what later ones refer to is known
MOST_STREAMS = 100  # open at the same time
MOST_WINDOW = (1 << 31) - 1  # bytes
FIRST_WINDOW = (1 << 16) - 1  # bytes

ACK = END_STREAM = 1
END_HEADERS = 4
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 0, 1, 3, 5, 6
REFUSED_STREAM, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 9, 11


class Broken(Exception):
    """The client broke the protocol, or our limits. code: HTTP/2's, for the client."""

    def __init__(self, text: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


class _Stream:
    """An open stream. window: bytes that the client lets us send; body: what is being sent, `sent` bytes of it so far;
    end: the trailers that are to follow it; asking: the client hasn't finished its request."""

    __slots__ = ("asking", "body", "end", "sent", "window")

    def __init__(self, window: int) -> None:
        self.asking = True
        self.window = window
        self.body = self.end = b""
        self.sent = 0


class Http2:
    """One connection. What a client asks comes as calls of the methods that a subclass has to have; it answers with
    begin(), send() and finish().

    window: bytes of a request's body that a client may send ahead. over: nothing more can be said; what is left in
    `outgoing` is to be sent.
    """

    def __init__(self, window: int) -> None:
        self._read = b""  # the beginning of a frame
        self._written: list[bytes] = []
        self._begun = False
        self._reader = Reader(MOST_READ)
        self._streams: dict[int, _Stream] = {}
        self._highest = 0  # stream of the client's
        self._headers: tuple[HeadersFrame, bytearray] | None = None  # whose continuation must come next
        self._window = self._first_window = FIRST_WINDOW  # what we may send
        self._half, self._taken = window // 2, 0  # bytes taken since the client's window was last made up
        self.over = False
        settings = (SettingsFrame.INITIAL_WINDOW_SIZE, window, SettingsFrame.MAX_CONCURRENT_STREAMS, MOST_STREAMS)
        self._write(SettingsFrame, 0, struct.pack(">HIHI", *settings))
        self._write(WindowUpdateFrame, 0, struct.pack(">I", window))

    # what a client does

    def request(self, stream: int, headers: dict[bytes, bytes]) -> None:
        """A request begins."""
        raise NotImplementedError

    def body(self, stream: int, data: bytes) -> None:
        """A part of its body."""
        raise NotImplementedError

    def complete(self, stream: int) -> None:
        """It has come to its end."""
        raise NotImplementedError

    def sent(self, stream: int) -> None:
        """A body that was given to send() without an end is on its way."""
        raise NotImplementedError

    def gone(self, stream: int) -> None:
        """The client doesn't want the answer any more, or is no more."""
        raise NotImplementedError

    # what we do

    @property
    def busy(self) -> bool:
        """Whether something waits until the client takes it."""
        return any(stream.body or stream.end for stream in self._streams.values())

    @property
    def silent(self) -> bool:
        """Whether the client asks for nothing now."""
        return not self._streams

    def sending(self, stream: int) -> bool:
        """Whether a body waits until the client takes it."""
        return bool(self._streams[stream].body)

    def outgoing(self) -> bytes:
        """What is to be sent now; it is forgotten here."""
        data = b"".join(self._written)
        self._written.clear()
        return data

    def begin(self, stream: int, head: bytes) -> None:
        """The first headers of an answer, as block() made them."""
        self._write_headers(stream, head)

    def send(self, stream: int, body: bytes, end: bytes = b"") -> None:
        """A body, as fast as the client takes it, then the trailers, if any, with which the stream ends."""
        one = self._streams[stream]
        one.body, one.sent, one.end = body, 0, end
        self._push(stream, one)

    def finish(self, stream: int, end: bytes) -> None:
        """The last headers, after what is being sent; a client that is still asking is told to stop."""
        one = self._streams[stream]
        one.end = end
        self._push(stream, one)

    def leave(self, code: int = NO_ERROR) -> None:
        """Tell the client that we go."""
        if not self.over:
            self._write(GoAwayFrame, 0, struct.pack(">II", self._highest, code))
            self.lose()

    def lose(self) -> None:
        """The client is no more."""
        self.over = True
        for stream in list(self._streams):
            self._forget(stream)

    def receive(self, data: bytes) -> str:
        """Bytes have come. Returns what the client did wrong, after which the connection is over, or ""."""
        data = self._read + data if self._read else data
        try:
            at = 0 if self._begun else self._preface(data)
            whole = memoryview(data)
            while self._begun and not self.over and len(data) - at >= HEAD.size:
                frame, length = Frame.parse_frame_header(whole[at : at + HEAD.size])
                if length > MOST_FRAME:
                    raise Broken(f"a frame of {length} bytes", FRAME_SIZE_ERROR)
                end = at + HEAD.size + length
                if end > len(data):
                    break
                frame.parse_body(whole[at + HEAD.size : end])
                at = end
                self._heed(frame)
            self._read = data[at:]
        except (Broken, HyperframeError) as error:
            self.leave(error.code if isinstance(error, Broken) else PROTOCOL_ERROR)
            return str(error) or type(error).__name__
        return ""

    def _write(self, kind: type[Frame], stream: int, payload: bytes, flags: int = 0) -> None:
        """A frame. Ours are plain: no padding, no priority."""
        self._written.append(HEAD.pack(len(payload) << 8 | (kind.type or 0), flags, stream) + payload)

    def _write_headers(self, stream: int, head: bytes, flags: int = 0) -> None:
        """Headers, in as many frames as they need."""
        kind: type[Frame] = HeadersFrame
        while len(head) > MOST_FRAME:
            self._write(kind, stream, head[:MOST_FRAME], flags)
            kind, head, flags = ContinuationFrame, head[MOST_FRAME:], 0
        self._write(kind, stream, head, flags | END_HEADERS)

    def _preface(self, data: bytes) -> int:
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise Broken("no HTTP/2")
        self._begun = len(data) >= len(PREFACE)
        return len(PREFACE) if self._begun else 0

    def _heed(self, frame: Frame) -> None:
        if self._headers and not isinstance(frame, ContinuationFrame):
            raise Broken("a frame between a request's headers")
        if isinstance(frame, HeadersFrame):
            self._collect(frame, bytearray(), frame)
        elif isinstance(frame, DataFrame):
            self._take(frame)
        elif isinstance(frame, WindowUpdateFrame):
            self._widen(frame.stream_id, frame.window_increment)
        elif isinstance(frame, PingFrame):
            if "ACK" not in frame.flags:
                self._write(PingFrame, 0, frame.opaque_data, ACK)
        elif isinstance(frame, SettingsFrame):
            if "ACK" not in frame.flags:
                self._adjust(frame.settings)
        elif isinstance(frame, RstStreamFrame):
            self._known(frame.stream_id)
            self._forget(frame.stream_id)
        elif isinstance(frame, ContinuationFrame):
            if not self._headers or self._headers[0].stream_id != frame.stream_id:
                raise Broken("a continuation of nothing")
            self._collect(*self._headers, frame)
        elif isinstance(frame, GoAwayFrame):
            self.lose()
        elif isinstance(frame, PushPromiseFrame):
            raise Broken("a client promises nothing")
        # PRIORITY is obsolete (RFC 9113, 5.3.2), and what isn't known has to be passed over (5.5)

    def _collect(self, first: HeadersFrame, headers: bytearray, frame: HeadersFrame | ContinuationFrame) -> None:
        """A part of a request's headers."""
        headers += frame.data
        if len(headers) > MOST_READ:
            raise Broken(f"headers of more than {MOST_READ} bytes", ENHANCE_YOUR_CALM)
        if "END_HEADERS" not in frame.flags:
            self._headers = first, headers
            return
        self._headers = None
        try:  # always: the decoder has to see what later headers refer to
            fields = self._reader.read(bytes(headers))
        except HPACKError as error:
            raise Broken(str(error), COMPRESSION_ERROR) from error
        ends = "END_STREAM" in first.flags
        if first.stream_id > self._highest:
            self._open(first.stream_id, fields)
        elif not ends:
            raise Broken("two requests on one stream")
        if ends:
            self._end(first.stream_id)

    def _open(self, number: int, headers: Headers) -> None:
        if number % 2 == 0:
            raise Broken("a client's streams have odd numbers")
        self._highest = number
        if len(self._streams) >= MOST_STREAMS:
            self._refuse_stream(number, REFUSED_STREAM)
        elif sum(len(name) + len(value) + 32 for name, value in headers) > MOST_HEADERS:  # RFC 9113, 6.5.2
            self._refuse_stream(number, ENHANCE_YOUR_CALM)  # gRPC's RESOURCE_EXHAUSTED
        else:
            self._streams[number] = _Stream(self._first_window)
            self.request(number, dict(headers))

    def _refuse_stream(self, number: int, code: int) -> None:
        self._write(RstStreamFrame, number, struct.pack(">I", code))

    def _end(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream:  # else it was ended by us
            if not stream.asking:
                raise Broken("a request that ends twice", STREAM_CLOSED)
            stream.asking = False
            self.complete(number)

    def _take(self, frame: DataFrame) -> None:
        """A part of a request's body. Windows are made up for at once, and a stream's is as large as bodies may be."""
        self._known(frame.stream_id)
        self._taken += frame.flow_controlled_length
        if self._taken > self._half:
            self._write(WindowUpdateFrame, 0, struct.pack(">I", self._taken))
            self._taken = 0
        stream = self._streams.get(frame.stream_id)
        if stream:
            if not stream.asking:
                raise Broken("data after a request's end", STREAM_CLOSED)
            self.body(frame.stream_id, frame.data)
            if "END_STREAM" in frame.flags:
                self._end(frame.stream_id)

    def _widen(self, number: int, more: int) -> None:
        """The client lets us send more."""
        self._known(number)
        stream = self._streams.get(number)
        if number == 0:
            self._window += more
            self._push_all()
        elif stream:
            stream.window += more
            self._push(number, stream)
        if max(self._window, stream.window if stream else 0) > MOST_WINDOW:
            raise Broken("a window beyond its limit", FLOW_CONTROL_ERROR)

    def _adjust(self, settings: dict[int, int]) -> None:
        """The client's settings. The others concern what we don't do: pushing, compression by table, large frames."""
        window = settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._first_window)
        if window > MOST_WINDOW:
            raise Broken("a window beyond its limit", FLOW_CONTROL_ERROR)
        for stream in self._streams.values():
            stream.window += window - self._first_window
        self._first_window = window
        self._write(SettingsFrame, 0, b"", ACK)
        self._push_all()

    def _known(self, number: int) -> None:
        if number > self._highest:
            raise Broken("a stream that wasn't opened")

    def _push_all(self) -> None:
        for number, stream in list(self._streams.items()):
            if stream.body:
                self._push(number, stream)

    def _push(self, number: int, stream: _Stream) -> None:
        """Send of a stream what the client takes."""
        body = stream.body
        while stream.sent < len(body):
            part = body[stream.sent : stream.sent + max(0, min(stream.window, self._window, MOST_FRAME))]
            if not part:
                return
            self._write(DataFrame, number, part)
            stream.sent += len(part)
            stream.window -= len(part)
            self._window -= len(part)
        stream.body, stream.sent = b"", 0
        if stream.end:
            del self._streams[number]
            self._write_headers(number, stream.end, END_STREAM)
            if stream.asking:
                self._write(RstStreamFrame, number, struct.pack(">I", NO_ERROR))
        elif body:
            self.sent(number)

    def _forget(self, number: int) -> None:
        if self._streams.pop(number, None):
            self.gone(number)
