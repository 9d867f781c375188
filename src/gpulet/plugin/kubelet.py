"""Staying registered with the kubelet: a pure decision over what is seen, and the agent that carries it out.

The agent looks at the kubelet's socket, its own socket and its open streams a few times a second instead of waiting
for inotify events: whatever was missed between two looks (a restart under the same name, a replaced folder, an
exhausted watch), the next look sees where things stand.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import stat
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.rpc.client import call_of
from gpulet.plugin.rpc.framing import CallFailed
from gpulet.plugin.server import Offer, Server

log = logging.getLogger(__name__)

API_VERSION = "v1beta1"
LOOK_EVERY = 0.1  # seconds
REGISTER_TIMEOUT = 10.0  # seconds; the kubelet itself gives a plugin 10 s to answer its call back
STREAM_GRACE = 1.0  # seconds without a stream before we think that the kubelet lost us
GATE_DOUBLINGS = 4  # what we wait for is on this node and comes soon: look again after 1.6 s at most
FIRST_DELAY, LAST_DELAY = 0.1, 30.0  # seconds between failed attempts

KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}

Identity = tuple[int, int, int]  # device, inode, modification time: a new socket may get the old one's inode, and
# changing a socket's owner or mode, as the kubelet may do after binding, must not look like a new one


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. kubelet: its socket, None where absent; own: whether our socket is in place (None: nothing there,
    False: somebody else's); streams: the kubelet's open ListAndWatch calls; now: seconds on a monotonic clock."""

    now: float
    kubelet: Identity | None = None
    own: bool | None = None
    streams: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Where a resource stands. registered: the kubelet's socket that accepted us; failures in a row; retry: not
    before this time; lonely: since when there is no stream."""

    registered: Identity | None = None
    attempted: Identity | None = None
    failures: int = 0
    retry: float = 0.0
    lonely: float | None = None


def decide(state: State, seen: Seen) -> tuple[State, str]:
    """The state after a look, and what to do: "enlist" (serve anew and register), "yield" (stop serving) or "".

    "yield": another process took our socket's name, as the successor in a rolling update does. Taking it back would
    start a fight; as soon as the name is free again we enlist.
    """
    if seen.kubelet is None:
        return replace(state, lonely=None), ""
    if state.registered is None:
        fresh = seen.kubelet != state.attempted
        return state, "enlist" if fresh or seen.now >= state.retry else ""
    if seen.own is False:
        return State(), "yield"
    if seen.kubelet != state.registered or seen.own is None:
        return State(), "enlist"
    if seen.streams:
        return replace(state, lonely=None, failures=0), ""
    since = seen.now if state.lonely is None else state.lonely
    if seen.now - since >= STREAM_GRACE and seen.now >= state.retry:
        return replace(state, registered=None, attempted=state.registered), "enlist"
    return replace(state, lonely=since), ""


def failed(state: State, kubelet: Identity | None, now: float, jitter: float) -> State:
    """The state after an attempt that failed. jitter: between 0 and 1, so that a fleet doesn't retry in phase."""
    delay = min(FIRST_DELAY * 2**state.failures, LAST_DELAY) * (0.75 + jitter / 2)
    return State(attempted=kubelet, failures=min(state.failures + 1, 20), retry=now + delay)


def accepted(state: State, kubelet: Identity | None, now: float) -> State:
    """The state after the kubelet took us. The time of the next attempt grows with failures in a row, since a kubelet
    that takes us and never opens a stream must not be asked ten times a second."""
    delay = min(FIRST_DELAY * 2**state.failures, LAST_DELAY)
    return State(registered=kubelet, failures=min(state.failures + 1, 20), retry=now + delay)


def identify(path: str) -> Identity | None:
    """Which socket is at the path now, None where none is."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_mtime_ns) if stat.S_ISSOCK(info.st_mode) else None


def in_the_way(path: str) -> str:
    """What stands at the path where a socket was to be, "" for nothing at all."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "a link that leads nowhere" if os.path.islink(path) else ""
    except OSError as error:
        return f"something that can't be looked at: {error.strerror}"
    return KINDS.get(stat.S_IFMT(mode), "a device")


async def register(kubelet_socket: str, endpoint: str, resource: str) -> int:
    """Tell the kubelet of one resource. Returns once the kubelet has called back and accepted: its process, whose
    streams are the kubelet's. 0 where we are in a PID namespace of our own, as all that call from outside of it.

    Raises CallFailed.
    """
    request = pb.RegisterRequest(
        version=API_VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=pb.DevicePluginOptions(get_preferred_allocation_available=True),
    )
    method = "/v1beta1.Registration/Register"
    _, process = await call_of(kubelet_socket, method, request.SerializeToString(), REGISTER_TIMEOUT)
    return process


async def _alive(path: str) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return False
    writer.close()
    return True


class Agent:
    """Keeps one resource served and registered until it is stopped.

    kubelet_socket "": serve, don't register. notify: called with the resource and "registered", "failed", "waiting" or
    "yielded". gate: asked before each attempt to register, "" or what has to be waited for.
    """

    def __init__(
        self,
        folder: str,
        kubelet_socket: str,
        offer: Offer,
        *,
        observe: Callable[[str, str, float], None] | None = None,
        notify: Callable[[str, str], None] | None = None,
        gate: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self.name = offer.resource.name
        self.endpoint = offer.resource.endpoint
        self.path = os.path.join(folder, self.endpoint)
        self.state = State()
        self.problem = ""  # why the last attempt to register came to nothing
        self._waiting = ""  # for the kubelet's socket, as it was said last
        self._kubelet_socket = kubelet_socket
        self._offer = offer
        self._server: Server | None = None
        self._kubelet: int | None = None  # the process that took us
        self._server_args: tuple[Any, ...] = (observe,) if observe else ()
        self._gate = gate
        self._notify = notify or (lambda resource, event: None)

    @property
    def streams(self) -> int:
        """ListAndWatch calls that the kubelet has open; before one took us, that anybody has."""
        return self._server.streams(self._kubelet) if self._server else 0

    async def offer(self, offer: Offer) -> None:
        """Say this from now on."""
        self._offer = offer
        if self._server:
            self._server.offer(offer)

    async def run(self) -> None:
        """Serve and register until cancelled; always leaves without a server and without a socket of ours."""
        try:
            if not self._kubelet_socket:
                await self._serve()
            while True:
                if self._kubelet_socket:
                    await self._look()
                await asyncio.sleep(LOOK_EVERY)
        finally:
            await self._withdraw()

    async def _look(self) -> None:
        own = self._server.holds_socket() if self._server else None
        seen = Seen(time.monotonic(), identify(self._kubelet_socket), own, self.streams)
        if seen.kubelet is None:
            self._wait_for_socket()
        elif self._waiting:
            self._waiting = self.problem = ""
        self.state, action = decide(self.state, seen)
        if action == "enlist":
            await self._enlist(seen.kubelet)
        elif action == "yield":
            log.warning("%s: another process serves at %s: standing back", self.name, self.path)
            self._notify(self.name, "yielded")
            await self._withdraw()
            while await _alive(self.path):
                await asyncio.sleep(LOOK_EVERY * 5)

    def _wait_for_socket(self) -> None:
        other = in_the_way(self._kubelet_socket)
        waiting = f"waiting for the kubelet's socket {self._kubelet_socket}" + (f": {other} is there" if other else "")
        if waiting != self._waiting:
            log.log(logging.WARNING if other else logging.INFO, "%s: %s", self.name, waiting)
        self._waiting = self.problem = waiting

    async def _enlist(self, kubelet: Identity | None) -> None:
        await self._withdraw()
        problem = await self._gate() if self._gate else ""
        if problem:
            state = replace(self.state, failures=min(self.state.failures, GATE_DOUBLINGS))
            self.state = failed(state, kubelet, time.monotonic(), random.random())
            log.warning("%s: %s", self.name, problem)
            self.problem = problem
            self._notify(self.name, "waiting")
            return
        try:
            await self._serve()
            self._kubelet = await register(self._kubelet_socket, self.endpoint, self.name)
        except (CallFailed, OSError) as error:
            self.state = failed(self.state, kubelet, time.monotonic(), random.random())
            self.problem = f"registration with {self._kubelet_socket} failed: {error}"
            if isinstance(error, OSError):  # only serving raises it
                folder = isinstance(error, IsADirectoryError) and (error.filename2 or error.filename)
                why = f"a folder is at {folder}: remove it" if folder else error
                self.problem = f"can't serve at {self.path}: {why}"
            log.warning("%s: %s", self.name, self.problem)
            self._notify(self.name, "failed")
            return
        # whichever kubelet took us: had another one replaced it meanwhile, the stream's end would tell
        self.state = accepted(self.state, identify(self._kubelet_socket), time.monotonic())
        self.problem = ""
        log.info("Registered device plugin for '%s' with Kubelet", self.name)
        self._notify(self.name, "registered")

    async def _serve(self) -> None:
        server = Server(self.path, self._offer, *self._server_args)
        server.start()
        self._server = server

    async def _withdraw(self) -> None:
        server, self._server = self._server, None
        if server:
            try:
                await asyncio.to_thread(server.stop)
            except OSError as error:  # a folder that has become read-only
                log.warning("%s: our socket %s can't be removed: %s", self.name, self.path, error.strerror)
