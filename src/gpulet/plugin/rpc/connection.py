"""gRPC on one client's HTTP/2 connection: messages put together and taken apart, calls answered, feeds fed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from gpulet.plugin.rpc.framing import CONTENT_TYPE, MOST_BYTES, CallFailed, framed, single, status
from gpulet.plugin.rpc.http2 import Http2, block

log = logging.getLogger(__name__)

MOST_BODY = MOST_BYTES + 5  # a message and its prefix
BEGIN = [(b":status", b"200"), CONTENT_TYPE]
BEGIN_BLOCK, OK_BLOCK = block(BEGIN), block(status())
NOT_GRPC = block([(b":status", b"415")])


class Service:
    """What can be called, shared by all connections.

    unary: path -> message in, message out; it may raise CallFailed. feed: the path of the one call that is answered
    with a stream: `news`, and the next news whenever there is some. most: feeds that are open at the same time.
    """

    def __init__(self, unary: Mapping[bytes, Callable[[bytes], bytes]], feed: bytes, news: bytes, most: int) -> None:
        self.unary = unary
        self.feed = feed
        self.most = most
        self.open = 0  # feeds that are open now
        self.tell(news)

    def tell(self, news: bytes) -> None:
        """The message that every feed is to get from now on. The listener has to be woken after it."""
        self.news = framed(news)


class Connection(Http2):
    """A client and the service that it calls."""

    def __init__(self, service: Service) -> None:
        super().__init__(window=MOST_BODY + 1)  # so that a body that is too large is seen, and not waited for
        self._service = service
        self._asked: dict[int, tuple[bytes, bytearray]] = {}  # stream -> path, body so far
        self._feeds: dict[int, bytes] = {}  # stream -> the last news that it was sent

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
        body = self._asked[stream][1]
        body += data
        if len(body) > MOST_BODY:
            del self._asked[stream]
            self._refuse(stream, CallFailed("RESOURCE_EXHAUSTED", f"a message has at most {MOST_BYTES} bytes"))

    def complete(self, stream: int) -> None:
        path, body = self._asked.pop(stream)
        try:
            if path == self._service.feed:
                self._open_feed(stream)
                return
            method = self._service.unary.get(path)
            if method is None:
                raise CallFailed("UNIMPLEMENTED", "Method not found!")
            answer = framed(method(single(bytes(body))))
        except CallFailed as failed:
            self._refuse(stream, failed)
        except Exception as error:
            log.exception("%s failed", path.decode(errors="replace"))
            self._refuse(stream, CallFailed("UNKNOWN", f"{type(error).__name__}: {error}"))
        else:
            self.begin(stream, BEGIN_BLOCK)
            self.send(stream, answer, OK_BLOCK)

    def sent(self, stream: int) -> None:
        if stream in self._feeds:
            self._feed(stream)

    def gone(self, stream: int) -> None:
        self._asked.pop(stream, None)
        self._leave_feed(stream)

    def _open_feed(self, stream: int) -> None:
        if self._service.open >= self._service.most:
            raise CallFailed("RESOURCE_EXHAUSTED", f"{self._service.most} streams are open already")
        self._service.open += 1
        self._feeds[stream] = b""
        self.begin(stream, BEGIN_BLOCK)
        self._feed(stream)

    def _feed(self, stream: int) -> None:
        """The newest news, once the last ones have been sent; those between are skipped."""
        news = self._service.news
        if self._feeds[stream] is not news and not self.sending(stream):
            self._feeds[stream] = news
            self.send(stream, news)

    def _leave_feed(self, stream: int) -> None:
        if self._feeds.pop(stream, None) is not None:
            self._service.open -= 1

    def _refuse(self, stream: int, failed: CallFailed) -> None:
        self.finish(stream, block([*BEGIN, *status(failed.code, failed.details)]))
