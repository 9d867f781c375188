"""What the daemon tells monitoring: /metrics (Prometheus), /healthz and /readyz on one small HTTP server.

Loaded only where an address is configured. Counters count from the process's start; gauges are taken when asked.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gpulet.errors import ConfigError
from gpulet.plugin.health import Notice, XidSeen
from gpulet.plugin.xid import CATALOGUE

if TYPE_CHECKING:
    from gpulet.plugin.daemon import Daemon

MOST_REQUEST_BYTES = 16384
RPC_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class Metrics:
    """All metrics of one daemon."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.rpc = Histogram("dp_rpc_duration_seconds", "Time to answer the kubelet", ["rpc"], registry=registry,
                             buckets=RPC_SECONDS)  # fmt: skip
        self.rpc_errors = Counter("dp_rpc_errors", "Refused calls of the kubelet", ["rpc", "code"], registry=registry)
        self.registrations = Counter("dp_registrations", "Registrations by outcome", ["resource", "outcome"],
                                     registry=registry)  # fmt: skip
        self.transitions = Counter("gpu_health_transitions", "Health changes", ["uuid", "to"], registry=registry)
        self.xids = Counter("gpu_xid", "Xids seen", ["uuid", "xid", "class", "action"], registry=registry)
        self.xid_time = Gauge("gpu_xid_last_timestamp_seconds", "When the last Xid came", ["uuid"], registry=registry)
        self.expected = Gauge("gpu_expected", "GPUs that are or were there", registry=registry)
        self.enumerated = Gauge("gpu_enumerated", "GPUs that answered the last look", registry=registry)
        self.health = Gauge("gpu_health", "1 healthy, 0 not", ["uuid", "pci", "serial", "reason"], registry=registry)
        self.devices = Gauge("dp_devices", "Devices offered", ["resource", "health"], registry=registry)
        self.registered = Gauge("dp_registered", "1 while the kubelet knows it", ["resource"], registry=registry)
        self.streams = Gauge("dp_stream_connected", "ListAndWatch streams", ["resource"], registry=registry)
        self.checked = Gauge(
            "dp_last_health_check_timestamp_seconds", "When health was last heard of", registry=registry
        )
        self.config = Gauge("dp_config_info", "1; the configuration in force", ["hash"], registry=registry)
        self.driver = Gauge("driver_info", "1; the driver in force", ["version", "cuda"], registry=registry)

    def observe(self, rpc: str, code: str, seconds: float) -> None:
        """A call was answered."""
        self.rpc.labels(rpc).observe(seconds)
        if code != "OK":
            self.rpc_errors.labels(rpc, code).inc()

    def told(self, news: Notice | XidSeen) -> None:
        """Health had news."""
        if isinstance(news, Notice):
            self.transitions.labels(news.uuid, news.kind).inc()
            return
        row = CATALOGUE.get(news.number)
        kind, action = (row.kind, row.action) if row else ("", "")
        self.xids.labels(news.uuid, str(news.number), kind, action).inc()
        self.xid_time.labels(news.uuid).set_to_current_time()

    def notify(self, resource: str, outcome: str) -> None:
        """A registration came out so."""
        self.registrations.labels(resource, outcome).inc()

    def text(self, daemon: Daemon) -> bytes:
        """Everything in Prometheus' text form."""
        for gauge in (self.health, self.devices, self.registered, self.streams, self.config, self.driver):
            gauge.clear()
        self.checked.set(daemon.wellness.heard)
        for name, agent in daemon.agents.items():
            self.registered.labels(name).set(1 if agent.state.registered else 0)
            self.streams.labels(name).set(agent.streams)
        current = daemon.generation
        if current:
            self.expected.set(len(current.facts.gpus) + sum(not lost.uuid for lost in current.facts.lost))
            self.enumerated.set(len(current.facts.gpus) - len(current.kept))
            self.config.labels(hashlib.sha256(repr(current.config).encode()).hexdigest()[:12]).set(1)
            self.driver.labels(current.facts.driver, current.facts.cuda).set(1)
            for gpu in current.facts.gpus:
                faults = [fault.reason for fault in daemon.wellness.health.faults if fault.uuid == gpu.uuid]
                reason = faults[0] if faults else daemon.wellness.health.problem
                self.health.labels(gpu.uuid, gpu.bus_id, gpu.serial, reason).set(0 if reason else 1)
            for name, offer in current.offers.items():
                sick = sum(device.base in offer.sick for device in offer.resource.devices)
                self.devices.labels(name, "Unhealthy").set(sick)
                self.devices.labels(name, "Healthy").set(len(offer.resource.devices) - sick)
        return generate_latest(self.registry)


def _health(daemon: Daemon) -> list[str]:
    """What is wrong with the daemon itself."""
    problem = daemon.wellness.health.problem
    return [f"NVML: {problem}"] if problem else []


def _readiness(daemon: Daemon) -> list[str]:
    """Why GPUs can't be given out now."""
    if daemon.generation is None:
        return ["no GPUs found yet"]
    waiting = [f"{name} isn't registered" for name, agent in daemon.agents.items() if not agent.state.registered]
    waiting += [
        f"the kubelet has no stream of {name}"
        for name, agent in daemon.agents.items()
        if agent.state.registered and not agent.streams
    ]
    return [*_health(daemon), *waiting]


class Endpoint:
    """The HTTP server at "host:port"."""

    def __init__(self, address: str, daemon: Daemon, metrics: Metrics) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65535:
            raise ConfigError("invalid --metrics-address option", seen=address, wanted="host:port or :port")
        self._host, self._port = host.strip("[]") or None, int(port)
        self._daemon, self._metrics = daemon, metrics
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that is listened at."""
        return int(self._server.sockets[0].getsockname()[1]) if self._server else self._port

    async def start(self) -> None:
        """Listen. Raises ConfigError where the address can't be had."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._port)
        except OSError as error:
            raise ConfigError(f"can't listen at {self._host or ''}:{self._port}", seen=error.strerror) from error

    async def stop(self) -> None:
        """Stop listening."""
        if self._server:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            status, kind, body = self._answer(request[:MOST_REQUEST_BYTES].split(b" ", 2))
            head = (
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # who asks badly gets nothing
        finally:
            writer.close()

    def _answer(self, words: list[bytes]) -> tuple[str, str, bytes]:
        path = words[1].partition(b"?")[0] if len(words) > 1 and words[0] == b"GET" else b""
        if path == b"/metrics":
            return "200 OK", "text/plain; version=0.0.4; charset=utf-8", self._metrics.text(self._daemon)
        if path not in (b"/healthz", b"/readyz"):
            return "404 Not Found", "text/plain", b"try /metrics, /healthz or /readyz\n"
        wrong = _health(self._daemon) if path == b"/healthz" else _readiness(self._daemon)
        body = ("\n".join(wrong or ["ok"]) + "\n").encode()
        return "503 Service Unavailable" if wrong else "200 OK", "text/plain", body
