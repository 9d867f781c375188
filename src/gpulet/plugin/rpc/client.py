"""One call to a gRPC service on a unix socket."""

from __future__ import annotations

import asyncio
import socket
import struct

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
from h2.exceptions import ProtocolError

from gpulet.plugin.rpc.framing import CONTENT_TYPE, CallFailed, failure, framed, single

AT_ONCE = 1 << 16  # bytes
WINDOW = 1 << 20  # bytes that the service may send ahead
MOST_ANSWERED = 16 << 20  # bytes; the kubelet gives its clients as much for the list of Pods
CONFIG = H2Configuration(client_side=True, header_encoding=None)


def other_end(sock: socket.socket) -> int:
    """The process at a unix socket's other end: which connected, or which listens. 0 where it is in a PID namespace
    that we don't see."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


async def call(path: str, method: str, message: bytes, timeout: float) -> bytes:
    """The answer to one unary call. path: the socket's; method: "/package.Service/Method"; timeout: seconds, for all.

    Raises CallFailed: UNAVAILABLE where nobody is there, DEADLINE_EXCEEDED, or the service's own.
    """
    answer, _ = await call_of(path, method, message, timeout)
    return answer


async def call_of(path: str, method: str, message: bytes, timeout: float) -> tuple[bytes, int]:
    """The same, and the process that listens at the socket, as other_end() tells it.

    Raises CallFailed: UNAVAILABLE where nobody is there, DEADLINE_EXCEEDED, or the service's own.
    """
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                process = other_end(writer.get_extra_info("socket"))
                return await _ask(reader, writer, method, message), process
            finally:
                writer.close()
    except TimeoutError:
        raise CallFailed("DEADLINE_EXCEEDED", f"no answer within {timeout:g} s") from None
    except (OSError, ProtocolError) as error:
        raise CallFailed("UNAVAILABLE", str(error)) from error


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, message: bytes) -> bytes:
    http = H2Connection(CONFIG)
    http.initiate_connection()
    http.increment_flow_control_window(WINDOW)
    stream = http.get_next_available_stream_id()
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", method.encode()), (b":authority", b"localhost")]
    http.send_headers(stream, [*headers, CONTENT_TYPE, (b"te", b"trailers")])
    http.increment_flow_control_window(WINDOW, stream)
    http.send_data(stream, framed(message), end_stream=True)  # raises beyond 16 KiB; a question is far from that
    body = bytearray()
    end: dict[bytes, bytes] = {}
    while True:
        writer.write(http.data_to_send())
        await writer.drain()
        data = await reader.read(AT_ONCE)
        if not data:
            raise CallFailed("UNAVAILABLE", "the connection was closed without an answer")
        for event in http.receive_data(data):
            if isinstance(event, DataReceived):
                body += event.data
                if len(body) > MOST_ANSWERED:
                    raise CallFailed("RESOURCE_EXHAUSTED", f"an answer of more than {MOST_ANSWERED} bytes")
                http.acknowledge_received_data(event.flow_controlled_length, stream)
            elif isinstance(event, (ResponseReceived, TrailersReceived)):
                end.update(dict(event.headers))
            elif isinstance(event, StreamEnded):
                return _answer(end, bytes(body))
            elif isinstance(event, (StreamReset, ConnectionTerminated)):
                raise CallFailed("UNAVAILABLE", f"the call was given up by the service: {event}")


def _answer(headers: dict[bytes, bytes], body: bytes) -> bytes:
    if headers.get(b":status") != b"200" and b"grpc-status" not in headers:
        raise CallFailed("UNAVAILABLE", f"HTTP status {headers.get(b':status', b'').decode()}")
    failed = failure(headers)
    if failed:
        raise failed
    return single(body)
