"""The daemon's HTTP server: /metrics for Prometheus, /healthz and /readyz for the kubelet's probes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from gpulet.errors import ConfigError
from gpulet.plugin.aside import aside
from gpulet.plugin.holders import holders

if TYPE_CHECKING:
    from gpulet.plugin.daemon import Daemon
    from gpulet.plugin.metrics import Metrics

log = logging.getLogger(__name__)

MOST_REQUEST_BYTES = 16384
RETRY = 5.0  # seconds until an address that is taken is tried again
PATIENCE = 10.0  # seconds for one question and its answer
FRESH = 1.0  # seconds for which the metrics that one has got are another's too
MOST_CLIENTS = 32  # at the same time: the kubelet's calls need descriptors too


def _health(daemon: Daemon) -> list[str]:
    """What is wrong with the daemon itself. A node that never had a driver is none of its faults: to start it again and
    again would change nothing there. One that doesn't answer is: a call of it may hang in this process alone."""
    problem = daemon.wellness.health.problem
    return [f"NVML: {problem}"] if problem and (daemon.generation or daemon.unanswered) else []


def _readiness(daemon: Daemon) -> list[str]:
    """Why GPUs can't be given out now."""
    if daemon.generation is None:
        problem = daemon.wellness.health.problem
        return ["no GPUs found yet" + (f": {problem}" if problem else "")]
    registers = bool(daemon.generation.config.kubelet_socket)  # else somebody else tells the kubelet of our sockets
    waiting = [
        f"{name} isn't registered" + (f": {agent.problem}" if agent.problem else "")
        for name, agent in daemon.agents.items()
        if registers and not agent.state.registered
    ]
    waiting += [f"{name}: {problem}" for name, problem in daemon.silent.items()]
    waiting += [
        f"the kubelet has no stream of {name}" + (f": {agent.problem}" if agent.problem else "")
        for name, agent in daemon.agents.items()
        if agent.state.registered and not agent.streams
    ]
    return [*_health(daemon), *waiting]


class Endpoint:
    """The HTTP server at "host:port". fresh: as FRESH."""

    def __init__(self, address: str, daemon: Daemon, metrics: Metrics, fresh: float = FRESH) -> None:
        host, _, port = address.rpartition(":")
        if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
            raise ConfigError("invalid --metrics-address option", seen=address, wanted="host:port or :port")
        self._host, self._port = host.strip("[]") or None, int(port)
        self._daemon, self._metrics = daemon, metrics
        self._server: asyncio.Server | None = None
        self._again: asyncio.Task[None] | None = None
        self._clients = 0
        self._collecting = asyncio.Lock()
        self._collected, self._body = -fresh, b""
        self.fresh = fresh

    @property
    def port(self) -> int:
        """The port that is listened at."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server else self._port

    async def start(self) -> None:
        """Listen. An address that can't be had, as during a rolling update on the host's network, is tried again and
        again: GPUs must not wait for metrics."""
        problem = await self._listen()
        if problem:
            log.error("%s; trying again every %g s, the devices are offered all the same", problem, RETRY)
            self._again = asyncio.get_running_loop().create_task(self._keep_trying())

    async def _listen(self) -> str:
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port)
        except OSError as error:
            return f"can't listen at {self._host or ''}:{self._port} for metrics: {error.strerror}"
        return ""

    async def _keep_trying(self) -> None:
        while True:
            await asyncio.sleep(RETRY)
            if not await self._listen():
                log.info("listening at %s:%d for metrics now", self._host or "", self._port)
                return

    async def stop(self) -> None:
        """Stop listening. Doesn't wait for those who are connected: that would be for as long as they like."""
        if self._again:
            self._again.cancel()
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._clients >= MOST_CLIENTS:
            writer.transport.abort()
            return
        self._clients += 1
        try:
            async with asyncio.timeout(PATIENCE):
                request = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = await self._answer(request[:MOST_REQUEST_BYTES].split(b" ", 2))
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # who asks badly, or doesn't take the answer, gets nothing
        finally:
            self._clients -= 1
            writer.close()

    async def _text(self) -> bytes:
        """The metrics, worked out by one thread at a time: the loop has the kubelet to answer."""
        async with self._collecting:
            if time.monotonic() - self._collected >= self.fresh:
                current = self._daemon.generation
                held = await holders(current.config, current.offers) if current else []
                self._body = await aside(self._metrics.text, self._daemon, held)
                self._collected = time.monotonic()
            return self._body

    async def _answer(self, words: list[bytes]) -> tuple[str, str, bytes]:
        path = words[1].partition(b"?")[0] if len(words) > 1 and words[0] == b"GET" else b""
        if path == b"/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", await self._text()
        if path not in (b"/healthz", b"/readyz"):
            return "404 Not Found", "text/plain", b"try /metrics, /healthz or /readyz\n"
        wrong = _health(self._daemon) if path == b"/healthz" else _readiness(self._daemon)
        body = ("\n".join(wrong or ["ok"]) + "\n").encode()
        return "503 Service Unavailable" if wrong else "200 OK", "text/plain", body
