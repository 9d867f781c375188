"""The socket and its thread, asked by gRPC's own library."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from gpulet.plugin.rpc.connection import Service
from gpulet.plugin.rpc.http2 import PREFACE
from gpulet.plugin.rpc.listener import MOST_CLIENTS, Listener

OWN = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


@contextmanager
def served(news: bytes = b"first") -> Iterator[tuple[str, Service, Listener]]:
    service = Service({b"/x.X/Echo": lambda message: message}, b"/x.X/Feed", news, 8)
    with tempfile.TemporaryDirectory(prefix="gp") as folder:
        path = f"{folder}/s"
        listener = Listener(path, service)
        listener.start()
        try:
            yield path, service, listener
        finally:
            listener.stop(0.5)


@contextmanager
def channel(path: str) -> Iterator[tuple[grpc.UnaryUnaryMultiCallable, grpc.UnaryStreamMultiCallable]]:
    with grpc.insecure_channel(f"unix:{path}", options=OWN) as made:
        yield made.unary_unary("/x.X/Echo"), made.unary_stream("/x.X/Feed")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_many_at_once():
    with (
        served() as (path, _, _),
        channel(path) as (echo, _),
        channel(path) as (other, _),
        ThreadPoolExecutor(8) as pool,
    ):
        messages = [bytes([number % 256]) * (number * 37 % 5000) for number in range(400)]
        answers = pool.map(lambda pair: (echo, other)[pair[0] % 2](pair[1], timeout=20), enumerate(messages))
        assert list(answers) == messages


@pytest.mark.parametrize("size", [0, 65_536, 3 << 20])
def test_messages_of_any_size_with_a_feed_open(size: int):
    with served(bytes(size)) as (path, service, listener), channel(path) as (echo, feed):
        stream = feed(b"")
        assert next(stream) == bytes(size)
        assert echo(bytes(size), timeout=20) == bytes(size)
        service.tell(b"x" * size + b"!")
        listener.wake()
        assert next(stream) == b"x" * size + b"!"


def test_too_large_a_message_is_refused():
    with served() as (path, _, _), channel(path) as (echo, _):
        with pytest.raises(grpc.RpcError) as failed:
            echo(bytes(5 << 20), timeout=20)
        assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert echo(b"after it", timeout=20) == b"after it"


def test_stopping_ends_the_feeds_well():
    with served() as (path, service, listener), channel(path) as (_, feed):
        stream = feed(b"")
        assert next(stream) == b"first" and service.open == 1
        began = time.monotonic()
        listener.stop(5)
        assert time.monotonic() - began < 2
        assert list(stream) == [] and stream.code() == grpc.StatusCode.OK and service.open == 0
        listener.wake()  # too late, and no harm


def deaf(path: str, service: Service) -> socket.socket:
    """A client with a feed, a window without end, and no wish to read."""
    asked = Encoder().encode([(":path", "/x.X/Feed"), ("content-type", "application/grpc")])
    frames = (
        SettingsFrame(0, {4: 1 << 30}),
        WindowUpdateFrame(0, 1 << 30),
        HeadersFrame(1, asked, flags=["END_HEADERS"]),
        DataFrame(1, bytes(5), flags=["END_STREAM"]),
    )
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    made.sendall(PREFACE + b"".join(frame.serialize() for frame in frames))
    until(lambda: service.open)
    return made


def until(ready: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_stopping_waits_no_longer_than_told_for_who_reads_nothing():
    with served(bytes(8 << 20)) as (path, service, listener), deaf(path, service):
        with channel(path) as (echo, _):
            assert echo(b"others are served", timeout=5) == b"others are served"
        began = time.monotonic()
        listener.stop(0.3)
        assert 0.25 < time.monotonic() - began < 2 and service.open == 0


def test_who_reads_nothing_has_one_piece_of_news_waiting_and_gets_the_newest():
    size = 1 << 20
    with served(b"0" * size) as (path, service, listener), deaf(path, service) as reader, channel(path) as (echo, _):
        for number in b"123456":
            service.tell(bytes([number]) * size)
            listener.wake()
            echo(b"", timeout=5)  # after it in the thread
        client = next(iter(listener._clients.values()))  # the first
        assert size / 2 < len(client.rest) < size * 1.1
        reader.settimeout(5)
        heard = bytearray()
        while heard[-1:] != b"6" or heard.count(b"6") < size:
            heard += reader.recv(1 << 20)
        assert heard.count(b"0") == size and not heard.count(b"5")
        until(lambda: not client.rest)


def test_clients_that_vanish_leave_nothing(caplog):
    with served() as (path, service, _):
        with channel(path) as (echo, _):
            echo(b"", timeout=5)  # gRPC's own threads and descriptors are there
            threads, files = threading.active_count(), descriptors()
            for hello in (b"", b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100)) * 25:
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
                    client.sendall(hello)
                    while len(hello) > 16 and client.recv(4096):
                        pass  # until we are told that this is no HTTP/2
            assert echo(b"", timeout=5) == b""  # after them in the queue
            until = time.monotonic() + 5
            while descriptors() > files and time.monotonic() < until:
                time.sleep(0.01)
            assert descriptors() <= files and threading.active_count() <= threads
        assert "broke HTTP/2" in caplog.text and "given up" not in caplog.text and service.open == 0


def connected(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(path)
    return made


def test_silent_connections_make_room(caplog):
    with served() as (path, service, listener), ExitStack() as stack:
        reading = stack.enter_context(deaf(path, service))
        silent = [stack.enter_context(connected(path)) for _ in range(3 * MOST_CLIENTS)]
        with channel(path) as (echo, feed):
            assert echo(b"the newest", timeout=5) == b"the newest"
            assert next(feed(b"")) == b"first"
            assert len(listener._clients) == MOST_CLIENTS
        silent[0].settimeout(5)
        while silent[0].recv(100):
            pass  # the greeting, then the end
        silent[-1].settimeout(5)
        assert silent[-1].recv(100) and reading.recv(100)
        until(lambda: service.open == 1)
    assert caplog.text.count("connections are open") == 1


def test_where_none_is_silent_the_newest_is_refused():
    with served() as (path, _, listener), ExitStack() as stack:
        half = HeadersFrame(1, Encoder().encode([("content-type", "application/grpc")]), flags=["END_HEADERS"])
        for _ in range(MOST_CLIENTS):
            stack.enter_context(connected(path)).sendall(PREFACE + half.serialize())
        until(lambda: sum(not client.connection.silent for client in list(listener._clients.values())) == MOST_CLIENTS)
        refused = stack.enter_context(connected(path))
        refused.settimeout(5)
        assert refused.recv(100) == b"" and len(listener._clients) == MOST_CLIENTS


def test_no_descriptors_is_said_once_until_there_are_some(caplog):
    class Exhausted:
        tries = 0

        def __init__(self, real: socket.socket) -> None:
            self.fileno, self.close, self._accept = real.fileno, real.close, real.accept

        def accept(self) -> object:
            self.tries += 1
            if self.tries % 4:
                raise OSError(errno.EMFILE, "Too many open files")
            return self._accept()

    with served() as (path, _, listener):
        listener._socket = Exhausted(listener._socket)
        for _ in range(2):
            with connected(path) as client:
                client.settimeout(5)
                assert client.recv(100)
    assert caplog.text.count("Too many open files") == 2


def test_a_path_that_can_not_be_bound():
    files = descriptors()
    with pytest.raises(OSError):
        Listener("/nowhere/s", Service({}, b"", b"", 1)).start()
    assert descriptors() == files
