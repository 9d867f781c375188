"""The daemon: one generation of offers after another, each resource kept registered by its own agent.

A generation is worked out whole (configuration, facts, CDI specs) before anything of the last one is touched; what
can't be worked out leaves the last one in force. Agents of resources that stay keep their server and their streams.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from gpulet.errors import ConfigError, GpuletError, NodeError, NvmlError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin import mps
from gpulet.plugin.allocate import Surroundings
from gpulet.plugin.config import Config
from gpulet.plugin.health import NvmlState
from gpulet.plugin.kubelet import Agent
from gpulet.plugin.prefer import preference
from gpulet.plugin.resources import control_nodes, inventory
from gpulet.plugin.server import Offer
from gpulet.plugin.wellness import Wellness

if TYPE_CHECKING:
    from gpulet.plugin.metrics import Metrics
    from gpulet.plugin.monitor import Session

log = logging.getLogger(__name__)

IMEX_NODE = "/dev/nvidia-caps-imex-channels/channel"

Load = Callable[[], Config]
Look = Callable[[Config], NodeFacts]
Publish = Callable[[Config, NodeFacts, tuple[int, ...]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Generation:
    """What is offered, by resource name, and what was left out and why. kept: UUIDs of GPUs that no longer answer and
    are still listed, as unhealthy."""

    config: Config
    facts: NodeFacts
    offers: Mapping[str, Offer]
    problems: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def imex_channels(config: Config) -> tuple[int, ...]:
    """The configured channels that exist. Raises ConfigError where one is required and missing."""
    found = []
    for channel in config.imex_channel_ids:
        if any(os.path.exists(root.rstrip("/") + f"{IMEX_NODE}{channel}") for root in (config.lookup_dev_root, "/")):
            found.append(channel)
        elif config.imex_required:
            raise ConfigError(f"requested IMEX channel channel{channel} does not exist", seen=f"{IMEX_NODE}{channel}",
                              remedy="load nvidia-caps-imex-channels, or turn imex.required off")  # fmt: skip
        else:
            log.warning("IMEX channel %d does not exist: not offered", channel)
    return tuple(found)


def with_lost(facts: NodeFacts, before: NodeFacts | None) -> NodeFacts:
    """The facts with GPUs that don't answer any more as they were before: the kubelet is to see them as unhealthy, not
    as gone, and whoever has one keeps it on its books."""
    known = {gpu.index: gpu for gpu in before.gpus} if before else {}
    answering = {gpu.uuid for gpu in facts.gpus}
    silent = [known[lost.index] for lost in facts.lost if lost.index in known]
    silent = [gpu for gpu in silent if gpu.uuid not in answering]
    return facts.replace(gpus=tuple(sorted([*facts.gpus, *silent], key=lambda gpu: gpu.index)))


def generation(config: Config, facts: NodeFacts, publish: Publish, before: NodeFacts | None = None) -> Generation:
    """One generation, worked out; writes the CDI specs where a strategy needs them. Raises GpuletError."""
    answering = {gpu.uuid for gpu in facts.gpus}
    facts = with_lost(facts, before)
    offered = inventory(facts, config)
    if config.mps_active:
        mps.check(offered.resources)
    imex = imex_channels(config)
    classes = publish(config, facts, imex) if config.cdi else ()
    surroundings = Surroundings(control_nodes(config.lookup_dev_root), imex, classes)
    offers = {}
    for resource in offered.resources:
        prefer = preference(resource, facts, config.allocation_policy)
        offers[resource.name] = Offer(resource, config, surroundings, prefer=prefer)
    kept = tuple(gpu.uuid for gpu in facts.gpus if gpu.uuid not in answering)
    return Generation(config, facts, offers, offered.problems, kept)


class Daemon:
    """Runs until `stop` is set. load: reads the configuration anew; look: asks the node; publish: writes CDI specs and
    returns the optional classes that have something in them; session: opens NVML for health events, None: no checks."""

    def __init__(
        self,
        load: Load,
        look: Look,
        publish: Publish,
        session: Callable[[Config], Session] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.wellness = Wellness(session, self._health_changed, metrics.told if metrics else lambda news: None)
        self._metrics = metrics
        self._offering: asyncio.Task[None] | None = None
        self.stop = asyncio.Event()
        self.generation: Generation | None = None
        self.agents: dict[str, Agent] = {}
        self._load, self._look, self._publish = load, look, publish
        self._failure: BaseException | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reload = asyncio.Event()
        self._file: tuple[int, int] | None = None

    def reload(self) -> None:
        """Read the configuration again soon (SIGHUP)."""
        self._reload.set()

    async def run(self, config: Config) -> None:
        """Offer this configuration's resources, then follow changes. Raises GpuletError for a first generation that
        can't be worked out (NVML's failures only with fail_on_init_error)."""
        self._file = _signature(config)
        try:
            await self._first(config)
            while not self.stop.is_set():
                await self._wait(config.refresh_interval)
                if not self.stop.is_set():
                    config = await self._follow(config)
        finally:
            await asyncio.to_thread(self.wellness.stop)
            for name in list(self._tasks):
                await self._end(name)
        if self._failure:
            raise self._failure

    async def _first(self, config: Config) -> None:
        try:
            await self._adopt(generation(config, self._look(config), self._publish))
        except NodeError as error:
            if config.fail_on_init_error:
                raise
            log.warning("%s; waiting for it, since fail-on-init-error is off", error)

    async def _wait(self, seconds: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self.stop, self._reload)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _follow(self, config: Config) -> Config:
        """Take over what changed in the configuration or on the node; on any failure keep what is in force."""
        if self._reload.is_set() or _signature(config) != self._file:
            self._reload.clear()
            self._file = _signature(config)
            try:
                config = self._load()
            except GpuletError as error:
                log.error("new configuration refused, the last one stays: %s", error)
        try:
            self.wellness.take_acknowledgements(config)
            facts = await asyncio.to_thread(self._look, config)
            self.wellness.hear(NvmlState(user="facts"))
            current = self.generation
            before = current.facts if current else None
            if current is None or with_lost(facts, before) != before or config != current.config:
                await self._adopt(generation(config, facts, self._publish, before))
        except NvmlError as error:
            log.error("the node's GPUs can't be asked: %s", error)
            self.wellness.hear(NvmlState(str(error), user="facts"))
        except (GpuletError, OSError) as error:
            log.error("the last generation stays: %s", error)
            return self.generation.config if self.generation else config
        return config

    async def _adopt(self, new: Generation) -> None:
        for problem in new.problems:
            log.warning("not offered: %s", problem)
        moved = self.generation is not None and _place(self.generation.config) != _place(new.config)
        for name in list(self._tasks):
            if moved or name not in new.offers:
                await self._end(name)
        self.generation = new
        self.wellness.adopt(new.config, new.facts)
        for name, offer in self._with_health(new).items():
            if name in self.agents:
                await self.agents[name].offer(offer)
            else:
                self._begin(name, offer)
        if not new.offers:
            log.warning("No devices found. Waiting for some.")

    def _with_health(self, new: Generation) -> Mapping[str, Offer]:
        """The offers with what is unhealthy now, which become the generation's."""
        offers = {
            name: replace(offer, sick=self.wellness.health.sick(offer.resource.devices))
            for name, offer in new.offers.items()
        }
        self.generation = replace(new, offers=offers)
        return offers

    def _health_changed(self) -> None:
        """Bring the change to the streams; what comes while one is on its way goes with the next."""
        if self._offering is None or self._offering.done():
            self._offering = asyncio.get_running_loop().create_task(self._offer_health())

    async def _offer_health(self) -> None:
        shown = None
        while self.generation and shown is not self.wellness.health:
            shown = self.wellness.health
            for name, offer in self._with_health(self.generation).items():
                if name in self.agents:
                    await self.agents[name].offer(offer)

    def _begin(self, name: str, offer: Offer) -> None:
        observe, notify = (self._metrics.observe, self._metrics.notify) if self._metrics else (None, None)
        shared = any(device.replicas for device in offer.resource.devices)
        gate = partial(mps.problem, name, offer.config) if offer.config.mps_active and shared else None
        agent = Agent(
            offer.config.kubelet_socket_dir,
            offer.config.kubelet_socket,
            offer,
            observe=observe,
            notify=notify,
            gate=gate,
        )
        self.agents[name] = agent
        task = asyncio.get_running_loop().create_task(agent.run(), name=name)
        task.add_done_callback(self._ended)
        self._tasks[name] = task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """An agent ends only when told to: anything else is a bug, and a daemon that hides it would be worse."""
        if not task.cancelled() and (error := task.exception()):
            log.critical("the agent of %s failed: ending", task.get_name(), exc_info=error)
            self._failure = error
            self.stop.set()

    async def _end(self, name: str) -> None:
        self.agents.pop(name, None)
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _place(config: Config) -> tuple[str, str, str]:
    """What an agent can't change while it lives."""
    return config.kubelet_socket_dir, config.kubelet_socket, config.mps_root if config.mps_active else ""


def _signature(config: Config) -> tuple[int, int] | None:
    """Which version of the config file is there now; follows the config-manager's symbolic link."""
    try:
        info = os.stat(config.config_file)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns
