"""A client made of h2, which knows the rules better than we do: it raises where the server breaks one."""

from __future__ import annotations

from collections import defaultdict
from urllib.parse import unquote

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from gpulet.plugin.rpc.connection import Connection

HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def prefixed(message: bytes, compressed: int = 0) -> bytes:
    return bytes([compressed]) + len(message).to_bytes(4, "big") + message


class Client:
    """window: what the server may send of each stream; piece: bytes that reach the server at once, 0 for all."""

    def __init__(self, connection: Connection, window: int = 65535, piece: int = 0) -> None:
        self.connection = connection
        self.piece = piece
        self.h2 = H2Connection(H2Configuration(client_side=True))
        self.h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.wrong = ""
        self.headers: dict[int, dict[str, str]] = defaultdict(dict)
        self.bodies: dict[int, bytearray] = defaultdict(bytearray)
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}
        self.unread: dict[int, int] = defaultdict(int)
        self.goodbye: int | None = None
        self.exchange()

    def ask(self, path: str, body: bytes | None, *, end: bool = True, **headers: str) -> int:
        stream = self.h2.get_next_available_stream_id()
        fields = {**dict(HEADERS), ":path": path, **{name.replace("_", "-"): value for name, value in headers.items()}}
        ordered = sorted(fields.items(), key=lambda field: not field[0].startswith(":"))
        self.h2.send_headers(stream, ordered, end_stream=end and body is None)
        if body is not None:
            self.push(stream, body, end=end)
        return stream

    def push(self, stream: int, body: bytes, *, end: bool) -> None:
        """Send a body within the server's windows."""
        while True:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            part, body = body[:room], body[room:]
            self.h2.send_data(stream, part, end_stream=end and not body)
            if not body:
                return
            self.exchange()

    def call(self, path: str, message: bytes) -> bytes:
        """The answer's message of a call that succeeds."""
        stream = self.ask(path, prefixed(message))
        self.exchange()
        assert self.status(stream) == ("0", ""), self.headers[stream]
        (message,) = self.messages(stream)
        return message

    def take(self, stream: int) -> None:
        """Read what has come: the server may send as much again."""
        self.h2.acknowledge_received_data(self.unread.pop(stream, 0), stream)
        self.exchange()

    def exchange(self) -> None:
        """Until neither has anything more to say."""
        while True:
            said = self.h2.data_to_send()
            step = self.piece or max(1, len(said))
            for at in range(0, len(said), step):
                self.wrong = self.wrong or self.connection.receive(said[at : at + step])
            answer = self.connection.outgoing()
            if not said and not answer:
                return
            for event in self.h2.receive_data(answer):
                self._note(event)

    def _note(self, event: object) -> None:
        if isinstance(event, (ResponseReceived, TrailersReceived)):
            self.headers[event.stream_id].update(
                (name.decode(), value.decode()) if isinstance(name, bytes) else (name, value)
                for name, value in event.headers
            )
        elif isinstance(event, DataReceived):
            self.bodies[event.stream_id] += event.data
            self.unread[event.stream_id] += event.flow_controlled_length
        elif isinstance(event, StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, StreamReset):
            self.reset[event.stream_id] = int(event.error_code)
        elif isinstance(event, ConnectionTerminated):
            self.goodbye = int(event.error_code)

    def status(self, stream: int) -> tuple[str, str]:
        headers = self.headers[stream]
        return headers.get("grpc-status", ""), unquote(headers.get("grpc-message", ""))

    def messages(self, stream: int) -> list[bytes]:
        body, found = bytes(self.bodies[stream]), []
        while body:
            size = int.from_bytes(body[1:5], "big")
            assert body[0] == 0 and len(body) >= 5 + size
            found.append(body[5 : 5 + size])
            body = body[5 + size :]
        return found
