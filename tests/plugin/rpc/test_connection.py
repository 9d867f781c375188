"""gRPC on one connection, asked by h2."""

from __future__ import annotations

import contextlib

import pytest
from h2.exceptions import StreamClosedError
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulet.plugin.rpc.connection import Connection, Service
from gpulet.plugin.rpc.framing import MOST_BYTES, CallFailed
from support.h2_client import Client, prefixed

ECHO, FEED = "/x.X/Echo", "/x.X/Feed"


def refuse(message: bytes) -> bytes:
    raise CallFailed("FAILED_PRECONDITION", "100 % müde: GPU-0\n")


def stumble(message: bytes) -> bytes:
    raise KeyError("lost")


def service(news: bytes = b"first", most: int = 2) -> Service:
    return Service({b"/x.X/Echo": lambda message: message, b"/x.X/Refuse": refuse, b"/x.X/Stumble": stumble},
                   FEED.encode(), news, most)  # fmt: skip


def client(made: Service | None = None, **options: int) -> Client:
    return Client(Connection(made or service()), **options)


def refused(path: str, body: bytes | None, **headers: str) -> tuple[str, str]:
    """The status of a call without an answer."""
    asking = client()
    stream = asking.ask(path, body, **headers)
    asking.exchange()
    assert stream in asking.ended and not asking.bodies[stream]
    assert asking.call(ECHO, b"after it") == b"after it"
    return asking.status(stream)


def test_a_call():
    asking = client()
    assert asking.call(ECHO, b"hello") == b"hello"
    assert asking.call(ECHO, b"") == b""
    assert asking.headers[1] == {":status": "200", "content-type": "application/grpc", "grpc-status": "0"}


def test_refusals():
    assert refused("/x.X/Refuse", prefixed(b"")) == ("9", "100 % müde: GPU-0\n")
    assert refused("/x.X/Nothing", prefixed(b"")) == ("12", "Method not found!")
    assert refused(ECHO, prefixed(b"", compressed=1)) == ("12", "compressed messages are not understood")
    assert refused(ECHO, None)[0] == "12"
    assert refused(ECHO, b"")[0] == "12"
    assert refused(ECHO, prefixed(b"a") + prefixed(b"b"))[0] == "13"
    assert refused(ECHO, prefixed(b"abc")[:-1])[0] == "13"


def test_a_bug_is_one_calls_failure(caplog):
    assert refused("/x.X/Stumble", prefixed(b"")) == ("2", "KeyError: 'lost'")
    assert "/x.X/Stumble failed" in caplog.text


def test_no_grpc():
    asking = client()
    stream = asking.ask(ECHO, prefixed(b""), content_type="text/plain")
    asking.exchange()
    assert asking.headers[stream] == {":status": "415"}
    assert asking.call(ECHO, b"after it") == b"after it"


def test_every_answer_is_observed():
    seen: list[tuple[str, str]] = []
    methods = {b"/x.X/Echo": lambda message: message, b"/x.X/Refuse": refuse, b"/x.X/Stumble": stumble}
    observe = lambda name, code, seconds: seen.append((name, code)) or seconds >= 0  # noqa: E731
    asking = client(Service(methods, FEED.encode(), b"first", 1, observe), window=MOST_BYTES)
    bodies = {ECHO: prefixed(b""), "/x.X/Refuse": prefixed(b""), "/x.X/Stumble": prefixed(b""), FEED: prefixed(b"")}
    for path, body in [*bodies.items(), (FEED, prefixed(b"")), ("/y", prefixed(b"")), ("/\xff", None), (ECHO, b"x"),
                       (ECHO, bytes(MOST_BYTES + 6))]:  # fmt: skip
        asking.ask(path, body)
        asking.exchange()
    assert seen == [
        ("Echo", "OK"), ("Refuse", "FAILED_PRECONDITION"), ("Stumble", "UNKNOWN"), ("Feed", "OK"),
        ("Feed", "RESOURCE_EXHAUSTED"), ("unknown", "UNIMPLEMENTED"), ("unknown", "UNIMPLEMENTED"),
        ("Echo", "INTERNAL"), ("Echo", "RESOURCE_EXHAUSTED"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("details", "kept"),
    [("x" * 100_000, "x" * 4096), ("\U0001f525" * 5000, "\U0001f525" * 341), ("%" * 9000, "%" * 1365)],
)
def test_details_of_any_length_fit_in_a_header(details: str, kept: str):
    def long(message: bytes) -> bytes:
        raise CallFailed("UNKNOWN", details)

    asking = Client(Connection(Service({b"/long": long}, b"", b"", 1)))
    stream = asking.ask("/long", prefixed(b""))
    asking.exchange()
    assert asking.status(stream) == ("2", kept)
    assert len(asking.headers[stream]["grpc-message"]) <= 4096


def test_too_many_headers_are_one_calls_failure():
    made = service()
    asking = client(made)
    feed = asking.ask(FEED, prefixed(b""))
    many = {f"x-{number}": "x" * 1000 for number in range(100)}
    stream = asking.ask(ECHO, None, end=False, **many)
    asking.exchange()
    assert asking.reset == {stream: 11} and not asking.wrong
    assert made.open == 1 and asking.messages(feed) == [b"first"]
    assert asking.call(ECHO, b"after it") == b"after it"  # its headers refer to the table of the earlier ones


def test_the_largest_message_and_one_more_byte():
    asking = client(window=MOST_BYTES * 2)
    asking.h2.increment_flow_control_window(MOST_BYTES * 2)
    assert len(asking.call(ECHO, bytes(MOST_BYTES))) == MOST_BYTES
    stream = asking.ask(ECHO, prefixed(bytes(MOST_BYTES)), end=False)
    asking.exchange()
    assert stream not in asking.ended
    asking.h2.send_data(stream, b"1")
    asking.exchange()
    assert asking.status(stream) == ("8", f"a message has at most {MOST_BYTES} bytes")
    assert asking.reset == {stream: 0}
    assert asking.call(ECHO, b"after it") == b"after it"


def test_many_messages_without_an_end():
    asking = client(window=MOST_BYTES * 2)
    half = prefixed(bytes(MOST_BYTES))[: MOST_BYTES // 2]
    streams = [asking.ask(ECHO, b"", end=False) for _ in range(40)]
    for stream in streams:
        with contextlib.suppress(StreamClosedError):  # in the middle of it
            asking.push(stream, half, end=False)
    asking.exchange()
    refused = [stream for stream in streams if stream in asking.ended]
    assert len(refused) == 36 and {asking.status(stream)[0] for stream in refused} == {"8"}
    assert sum(len(body) for _, body in asking.connection._asked.values()) <= 2 * MOST_BYTES + 10
    going, reset, *_ = (stream for stream in streams if stream not in refused)
    asking.h2.reset_stream(reset)
    asking.push(going, bytes(5 + MOST_BYTES - len(half)), end=True)  # whoever was taken can come to an end
    asking.exchange()
    for _ in range(200):
        if going not in asking.ended:
            asking.take(going)
    assert asking.messages(going) == [bytes(MOST_BYTES)]
    assert asking.call(ECHO, b"after it") == b"after it"


def test_an_answer_waits_for_the_clients_window():
    asking = client(window=100)
    stream = asking.ask(ECHO, prefixed(bytes(1000)))
    asking.exchange()
    assert len(asking.bodies[stream]) == 100 and asking.connection.busy
    assert asking.call(ECHO, b"small") == b"small"  # another stream isn't held up
    for _ in range(10):
        asking.take(stream)
    assert asking.messages(stream) == [bytes(1000)]
    assert asking.status(stream) == ("0", "") and not asking.connection.busy


def test_an_answer_waits_for_the_connections_window():
    asking = client(window=1 << 20)
    first, second = (asking.ask(ECHO, prefixed(bytes(65535 - 5 - spare))) for spare in (10, 0))
    asking.exchange()
    assert first in asking.ended and len(asking.bodies[second]) == 10
    asking.take(first)
    assert second in asking.ended


def test_a_window_made_smaller_while_it_is_used_up():
    asking = client(window=1000)
    stream = asking.ask(ECHO, prefixed(bytes(2000)))
    asking.exchange()
    asking.h2.update_settings({4: 500})  # what is left of it is -500 now
    asking.exchange()
    asking.h2.increment_flow_control_window(600, stream)
    asking.exchange()
    assert len(asking.bodies[stream]) == 1100
    asking.h2.update_settings({4: 5000})
    asking.exchange()
    assert asking.messages(stream) == [bytes(2000)]


def test_a_feed():
    made = service()
    asking = client(made)
    stream = asking.ask(FEED, prefixed(b""))
    asking.exchange()
    assert asking.messages(stream) == [b"first"] and made.open == 1
    for news in (b"second", b"third"):
        made.tell(news)
        asking.connection.refresh()
        asking.exchange()
    asking.connection.refresh()
    asking.exchange()
    assert asking.messages(stream) == [b"first", b"second", b"third"]
    asking.connection.end()
    asking.exchange()
    assert asking.status(stream) == ("0", "") and stream in asking.ended and made.open == 0


def test_who_reads_slowly_gets_the_newest():
    made = service(b"1" * 100)
    asking = client(made, window=50)
    stream = asking.ask(FEED, prefixed(b""))
    asking.exchange()
    for number in b"23456":
        made.tell(bytes([number]) * 100)
        asking.connection.refresh()
        asking.exchange()
    for _ in range(5):
        asking.take(stream)
    assert asking.messages(stream) == [b"1" * 100, b"6" * 100]


def test_a_feed_that_ends_while_it_is_sending():
    made = service(b"x" * 100)
    asking = client(made, window=50)
    stream = asking.ask(FEED, prefixed(b""))
    asking.exchange()
    asking.connection.end()
    assert made.open == 0 and asking.connection.busy
    for _ in range(3):
        asking.take(stream)
    assert asking.messages(stream) == [b"x" * 100] and asking.status(stream) == ("0", "")


def test_more_feeds_than_there_may_be():
    made = service(most=2)
    one, another = client(made), client(made)
    streams = [each.ask(FEED, prefixed(b"")) for each in (one, one, another)]
    one.exchange()
    another.exchange()
    assert another.status(streams[2]) == ("8", "2 streams are open already")
    one.h2.reset_stream(streams[0])
    one.exchange()
    assert made.open == 1
    stream = another.ask(FEED, prefixed(b""))
    another.exchange()
    assert another.messages(stream) == [b"first"]
    one.connection.lose()
    another.connection.lose()
    assert made.open == 0


def test_another_process_has_its_own_share_of_feeds():
    made = service(most=1)
    one, two = Client(Connection(made, 7)), Client(Connection(made, 8))
    for asking, code in ((one, ""), (one, "8"), (two, "")):
        stream = asking.ask(FEED, prefixed(b""))
        asking.exchange()
        assert asking.status(stream)[0] == code
    assert made.callers == {7: 1, 8: 1}
    one.connection.lose()
    assert made.callers == {8: 1} and made.open == 1


def test_reset_while_asking_while_answered_and_at_once():
    asking = client(window=10)
    half = asking.ask(ECHO, prefixed(b"abc")[:4], end=False)
    sending = asking.ask(ECHO, prefixed(bytes(100)))
    asking.exchange()
    at_once = asking.ask(FEED, None, end=False)
    for stream in (half, sending, at_once):
        asking.h2.reset_stream(stream)
    asking.exchange()
    assert not asking.connection.busy and not asking.wrong
    assert asking.call(ECHO, b"abc") == b"abc"


def test_leaving():
    asking = client()
    asking.connection.leave()
    asking.exchange()
    assert asking.goodbye == 0 and asking.connection.over


def test_a_client_that_leaves():
    made = service()
    asking = client(made)
    asking.ask(FEED, prefixed(b""))
    asking.exchange()
    asking.h2.close_connection()
    asking.connection.receive(asking.h2.data_to_send())
    assert asking.connection.over and made.open == 0


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40_000), min_size=1, max_size=12),
    window=st.integers(1, 70_000),
    piece=st.integers(1, 5_000),
)
def test_any_sizes_in_any_pieces(sizes: list[int], window: int, piece: int):
    asking = client(window=window, piece=piece)
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    streams = [asking.ask(ECHO, prefixed(message)) for message in messages]
    asking.exchange()
    for _ in range(200_000):
        waiting = [stream for stream in streams if stream not in asking.ended]
        if not waiting:
            break
        for stream in [*waiting, *asking.unread]:
            asking.take(stream)
    assert [asking.messages(stream) for stream in streams] == [[message] for message in messages]


@pytest.mark.parametrize("calls", [1000])
def test_nothing_is_kept_of_calls_that_are_over(calls: int):
    asking = client(window=1 << 20)
    for _ in range(calls):
        assert asking.call(ECHO, b"x" * 100) == b"x" * 100
        for stream in list(asking.unread):
            asking.take(stream)
    assert (
        not asking.connection._streams
        and not asking.connection._asked
        and not asking.connection._held
        and not asking.connection._read
    )
