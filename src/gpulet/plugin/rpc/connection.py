"""gRPC on one client's HTTP/2 connection: messages put together and taken apart, calls answered, feeds fed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from gpulet.plugin.rpc.framing import CONTENT_TYPE, MOST_BYTES, CallFailed, framed, single, status
from gpulet.plugin.rpc.headers import block
from gpulet.plugin.rpc.http2 import Http2

log = logging.getLogger(__name__)

MOST_BODY = MOST_BYTES + 5  # a message and its prefix
MOST_HELD = 2 * MOST_BODY  # bytes of a connection's requests that haven't come to their end
BEGIN = [(b":status", b"200"), CONTENT_TYPE]
BEGIN_BLOCK, OK_BLOCK = block(BEGIN), block(status())
NOT_GRPC = block([(b":status", b"415")])

Observe = Callable[[str, str, float], None]  # a call's name, the code that it was answered with, the seconds it took


def unobserved(name: str, code: str, seconds: float) -> None:
    """The observer where nobody wants to know."""


class Service:
    """What can be called, shared by all connections.

    unary: path -> message in, message out; it may raise CallFailed. feed: the path of the one call that is answered
    with a stream: `news`, and the next news whenever there is some. most: feeds that one process may have
    open at the same time. observe: is told of each call that was answered, of a feed when it begins.
    """

    def __init__(
        self,
        unary: Mapping[bytes, Callable[[bytes], bytes]],
        feed: bytes,
        news: bytes,
        most: int,
        observe: Observe = unobserved,
    ) -> None:
        self.unary = unary
        self.feed = feed
        self.most = most
        self.observe = observe
        self.callers: dict[int, int] = {}  # process -> feeds that it has open now
        self.tell(news)

    @property
    def open(self) -> int:
        """Feeds that are open now."""
        return sum(self.callers.values())

    def tell(self, news: bytes) -> None:
        """The message that every feed is to get from now on. The listener has to be woken after it."""
        self.news = framed(news)

    def name(self, path: bytes) -> str:
        """A call's name without its service; "unknown" for what isn't ours, whose names are as many as clients like."""
        return path.rpartition(b"/")[2].decode() if path in self.unary or path == self.feed else "unknown"


class Connection(Http2):
    """A client and the service that it calls. caller: its process, 0 where it isn't known."""

    def __init__(self, service: Service, caller: int = 0) -> None:
        super().__init__(window=MOST_BODY + 1)  # so that a body that is too large is seen, and not waited for
        self._service, self._caller = service, caller
        self._asked: dict[int, tuple[bytes, bytearray]] = {}  # stream -> path, body so far
        self._held = 0  # bytes of those bodies
        self._feeds: dict[int, bytes] = {}  # stream -> the last news that it was sent
        self.behind = False  # whether what we said before still waits in this process: then there is no more news

    def refresh(self) -> None:
        """There are news for the feeds."""
        for stream in list(self._feeds):
            self._feed(stream)

    def end(self) -> None:
        """End the feeds, as soon as what they are saying has been said."""
        for stream in list(self._feeds):
            self._leave_feed(stream)
            self.finish(stream, OK_BLOCK)

    def request(self, stream: int, headers: dict[bytes, bytes]) -> None:
        if headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self._asked[stream] = headers.get(b":path", b""), bytearray()
        else:
            self.finish(stream, NOT_GRPC)

    def body(self, stream: int, data: bytes) -> None:
        path, body = self._asked[stream]
        body += data
        self._held += len(data)
        if len(body) > MOST_BODY:
            problem = f"a message has at most {MOST_BYTES} bytes"
        elif self._held > MOST_HELD:
            problem = f"unfinished messages have at most {MOST_HELD} bytes"
        else:
            return
        self._forget_question(stream)
        self._refuse(stream, path, CallFailed("RESOURCE_EXHAUSTED", problem), 0.0)

    def complete(self, stream: int) -> None:
        began = time.perf_counter()
        path, body = self._asked[stream]
        self._forget_question(stream)
        try:
            answer = self._answer(stream, path, bytes(body))
        except CallFailed as failed:
            self._refuse(stream, path, failed, time.perf_counter() - began)
        except Exception as error:
            log.exception("%s failed", path.decode(errors="replace"))
            refusal = CallFailed("UNKNOWN", f"{type(error).__name__}: {error}")
            self._refuse(stream, path, refusal, time.perf_counter() - began)
        else:
            if answer is not None:
                self.begin(stream, BEGIN_BLOCK)
                self.send(stream, answer, OK_BLOCK)
            self._service.observe(self._service.name(path), "OK", time.perf_counter() - began)

    def sent(self, stream: int) -> None:
        if stream in self._feeds:
            self._feed(stream)

    def gone(self, stream: int) -> None:
        self._forget_question(stream)
        self._leave_feed(stream)

    def _forget_question(self, stream: int) -> None:
        if stream in self._asked:
            self._held -= len(self._asked.pop(stream)[1])

    def _answer(self, stream: int, path: bytes, body: bytes) -> bytes | None:
        """The answer of a unary call; None for a feed, which is open now. Raises CallFailed."""
        if path == self._service.feed:
            self._open_feed(stream)
            return None
        method = self._service.unary.get(path)
        if method is None:
            raise CallFailed("UNIMPLEMENTED", "Method not found!")
        return framed(method(single(body)))

    def _open_feed(self, stream: int) -> None:
        callers, most = self._service.callers, self._service.most
        own = callers.get(self._caller, 0)
        if own >= most:
            raise CallFailed("RESOURCE_EXHAUSTED", f"{most} streams are open already")
        callers[self._caller] = own + 1
        self._feeds[stream] = b""
        self.begin(stream, BEGIN_BLOCK)
        self._feed(stream)

    def _feed(self, stream: int) -> None:
        """The newest news, once the last ones have been sent; those between are skipped."""
        news = self._service.news
        if self._feeds[stream] is not news and not self.sending(stream) and not self.behind:
            self._feeds[stream] = news
            self.send(stream, news)

    def _leave_feed(self, stream: int) -> None:
        if self._feeds.pop(stream, None) is not None:
            callers = self._service.callers
            callers[self._caller] -= 1
            if not callers[self._caller]:
                del callers[self._caller]

    def _refuse(self, stream: int, path: bytes, failed: CallFailed, seconds: float) -> None:
        self._service.observe(self._service.name(path), failed.code, seconds)
        self.finish(stream, block([*BEGIN, *status(failed.code, failed.details)]))
