"""A unix socket, its connections and the one thread that serves them.

Calls are answered in that thread, one after another: none of them takes longer than a few milliseconds, and every
thread that an answer passes through costs as much as the answer itself.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from gpulet.plugin.rpc.client import other_end
from gpulet.plugin.rpc.connection import Connection, Service

log = logging.getLogger(__name__)

AT_ONCE = 1 << 16  # bytes read in one go; malloc takes twice that from the kernel anew each time
MOST_CLIENTS = 64  # connections at a time; the kubelet has one
IN, OUT = select.EPOLLIN, select.EPOLLOUT


class _Client:
    """A connection and its socket. rest: what the socket didn't take yet."""

    def __init__(self, sock: socket.socket, service: Service) -> None:
        self.socket = sock
        self.connection = Connection(service, other_end(sock))
        self.rest = memoryview(b"")

    @property
    def busy(self) -> bool:
        """Whether it has still to send something."""
        return bool(self.rest) or self.connection.busy

    def receive(self) -> None:
        """Take what has come."""
        try:
            data = self.socket.recv(AT_ONCE)
        except BlockingIOError:
            return
        if data:
            wrong = self.connection.receive(data)
            if wrong:
                log.warning("a client was disconnected, it broke HTTP/2: %s", wrong)
        else:
            self.connection.lose()

    def flush(self) -> None:
        """Send what there is, and then what was news while the client took nothing.

        Raises OSError where nobody is there any more.
        """
        self._send()
        if self.connection.behind and not self.rest:
            self.connection.behind = False
            self.connection.refresh()
            self._send()
        self.connection.behind = bool(self.rest)

    def _send(self) -> None:
        said = self.connection.outgoing()
        if said:
            self.rest = memoryview(b"".join((self.rest, said)) if self.rest else said)
        if self.rest:
            try:
                self.rest = self.rest[self.socket.send(self.rest) :]
            except BlockingIOError:
                pass


class Listener:
    """Serves one service at `path` from start() to stop()."""

    def __init__(self, path: str, service: Service) -> None:
        self._path = path
        self._service = service
        self._clients: dict[int, _Client] = {}
        self._until: float | None = None  # once it is to end: seconds of time.monotonic()
        self._complaint = ""  # why connections are turned away, since it was last said
        self._bell = -1
        self._waking = threading.Lock()  # a descriptor that is closed may be another thread's by now

    def start(self) -> None:
        """Bind and serve. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(self._path)
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._poll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._socket, IN)
        self._poll.register(self._bell, IN)
        self._thread = threading.Thread(target=self._run, name=os.path.basename(self._path), daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """The service has news for its feeds. From any thread."""
        with self._waking:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def stop(self, patience: float) -> None:
        """End the feeds, tell the clients, go. Blocks. patience: seconds for what is being sent."""
        if self._bell < 0:
            return
        self._until = time.monotonic() + patience
        self.wake()
        self._thread.join()
        with self._waking:
            os.close(self._bell)
            self._bell = -1

    def _run(self) -> None:
        try:
            while self._until is None:
                for file, what in self._poll.poll():
                    self._look(file, what)
            self._end(self._until)
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._socket.close()
            self._poll.close()

    def _end(self, until: float) -> None:
        self._socket.close()
        for client in list(self._clients.values()):
            self._serve(client, client.connection.end)
        while any(client.busy for client in self._clients.values()):
            left = until - time.monotonic()
            if left <= 0:
                break
            for file, what in self._poll.poll(left):
                self._look(file, what)
        for client in list(self._clients.values()):
            self._serve(client, client.connection.leave)

    def _look(self, file: int, what: int) -> None:
        """Something is to be done for a descriptor."""
        if file == self._bell:
            os.eventfd_read(self._bell)
            for client in list(self._clients.values()):
                self._serve(client, client.connection.refresh)
        elif file == self._socket.fileno():
            self._accept()
        elif file in self._clients:
            client = self._clients[file]
            self._serve(client, None if what == OUT else client.receive)

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors left: it would fail again at once
            self._complain(f"no connection can be taken: {error}")
            time.sleep(0.05)
            return
        if len(self._clients) < MOST_CLIENTS:
            self._complaint = ""
        elif not self._make_room():
            sock.close()
            return
        sock.setblocking(False)
        client = self._clients[sock.fileno()] = _Client(sock, self._service)
        self._poll.register(sock, IN)
        self._serve(client, None)

    def _make_room(self) -> bool:
        """Give up the oldest connection whose client asks for nothing; whether there was one."""
        self._complain(f"{MOST_CLIENTS} connections are open, of which the oldest silent one makes room for a new one")
        silent = next((client for client in self._clients.values() if client.connection.silent), None)
        if silent:
            self._drop(silent)
        return silent is not None

    def _complain(self, text: str) -> None:
        """Warn, once until a connection is taken again without trouble."""
        if text != self._complaint:
            log.warning("%s: %s", self._path, text)
            self._complaint = text

    def _serve(self, client: _Client, action: Callable[[], None] | None) -> None:
        """Do it, and send what comes of it. Whoever doesn't take what we send isn't heard until he does."""
        waited = bool(client.rest)
        try:
            if action:
                action()
            client.flush()
        except OSError:
            self._drop(client)  # nobody is there any more
            return
        except Exception:
            log.exception("%s: a connection is given up", self._path)
            self._drop(client)
            return
        if client.connection.over:
            self._drop(client)
        elif waited != bool(client.rest):
            self._poll.modify(client.socket, OUT if client.rest else IN)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.socket.fileno()]
        client.connection.lose()
        client.socket.close()  # which takes it out of the epoll too
