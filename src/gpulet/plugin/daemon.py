"""The daemon: one generation of offers after another, each resource kept registered by its own agent.

A generation is worked out whole (configuration, facts, CDI specs) before anything of the last one is touched; what
can't be worked out leaves the last one in force. Agents of resources that stay keep their server and their streams.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gpulet.errors import NodeError, NvmlError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin import mps
from gpulet.plugin.aside import Asking, Unanswered, aside
from gpulet.plugin.config import Config
from gpulet.plugin.generation import Generation, Publish, generation, with_lost
from gpulet.plugin.health import Notice, NvmlState, XidSeen
from gpulet.plugin.holders import holders
from gpulet.plugin.kubelet import Agent
from gpulet.plugin.news import News
from gpulet.plugin.resources import wanted
from gpulet.plugin.server import Offer
from gpulet.plugin.wellness import Wellness

if TYPE_CHECKING:
    from gpulet.plugin.metrics import Metrics
    from gpulet.plugin.monitor import Session

log = logging.getLogger(__name__)

LAST_PATIENCE = 1.0  # seconds that the end waits for the health checks; NVML may hang
Load = Callable[[], Config]
Look = Callable[[Config], NodeFacts]


class Daemon:
    """Runs until `stop` is set. load: reads the configuration anew; look: asks the node; publish: writes CDI specs and
    returns the optional classes that have something in them; session: opens NVML for health events, None: no checks;
    report: told what people should know."""

    def __init__(
        self,
        load: Load,
        look: Look,
        publish: Publish,
        session: Callable[[Config], Session] | None = None,
        metrics: Metrics | None = None,
        report: Callable[[Notice], None] | None = None,
    ) -> None:
        self._metrics = metrics
        self.news = News(metrics, report)
        self.wellness = Wellness(session, self._health_changed, self._told)
        self._wanted = Config()  # the newest configuration that could be read, in force or not yet
        self.silent: dict[str, str] = {}  # resource -> what its MPS control daemon's trouble is
        self._yielded: set[str] = set()  # resources that another process serves in our stead
        self._offering: asyncio.Task[None] | None = None
        self.stop = asyncio.Event()
        self.generation: Generation | None = None
        self.looked: NodeFacts | None = None  # what the last look found, taken over or not
        self.agents: dict[str, Agent] = {}
        self._load, self._look, self._publish = load, Asking(look), publish
        self._failure: BaseException | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reload = asyncio.Event()
        self._file: tuple[int, int] | None = None

    @property
    def unanswered(self) -> bool:
        """Whether the node has been asked and lets us wait."""
        return self._look.overdue

    def reload(self) -> None:
        """Read the configuration again soon (SIGHUP)."""
        self._reload.set()

    async def run(self, config: Config) -> None:
        """Offer this configuration's resources, then follow changes. Raises GpuletError for a first generation that
        can't be worked out (NVML's failures only with fail_on_init_error)."""
        self._wanted = config
        work, stopped = asyncio.ensure_future(self._work(config)), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, stopped):  # whatever it waits for: an end that was asked for comes at once
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)
            for name in list(self._tasks):
                await self._end(name)
            await self._end_health()
        if self._failure:
            raise self._failure
        if not work.cancelled():
            work.result()

    async def _end_health(self) -> None:
        try:
            async with asyncio.timeout(LAST_PATIENCE):
                await aside(self.wellness.stop)
        except TimeoutError:
            log.warning("the health checks don't end: NVML gives no answer; ending without them")

    async def _work(self, config: Config) -> None:
        # the file's version isn't known: it may have changed since it was read, so the first round reads it again
        await self._first(config)
        while True:
            await self._wait(config.refresh_interval)
            config = await self._follow(config)

    async def _first(self, config: Config) -> None:
        try:
            facts = await self._look(config)  # may take long: probes want their answer meanwhile
            await self._adopt(generation(config, facts, self._publish))
        except NvmlError as error:
            unanswered = isinstance(error, Unanswered)  # it may be slow and not broken: followed as any change is
            if config.fail_on_init_error and not unanswered:
                raise
            self._cannot_ask(error)
            if not unanswered:
                log.warning("waiting for it, since fail-on-init-error is off")
        except NodeError as error:
            if config.fail_on_init_error:
                raise
            log.warning("%s; waiting for it, since fail-on-init-error is off", error)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._reload.wait()
        except TimeoutError:
            pass

    async def _follow(self, config: Config) -> Config:
        """Take over what changed in the configuration or on the node; what can't be taken over changes nothing, and
        is tried again at the next look. Returns the configuration in force."""
        self._read_again(config)
        if self._wanted != config:
            try:
                await self._take_over(self._wanted)
                log.info("new configuration in force: %s", self._wanted.difference(config))
                config = self._wanted
                self.news.trouble("configuration", "")
            except Exception as error:
                self.news.trouble("configuration", f"new configuration refused, the last one stays: {error}", error)
        try:
            self._who_serves()
            self.wellness.take_acknowledgements(config)
            self.wellness.keep()
            await self._take_over(config)
            await self._ask_mps()
            await self._audit()
            self.news.trouble("node", "")
        except NvmlError as error:
            if self.generation is None and config.fail_on_init_error and not isinstance(error, Unanswered):
                raise  # the first answer, which came late
            self._cannot_ask(error)
        except Exception as error:
            self.news.trouble("node", f"the last generation stays: {error}", error)
        try:
            await aside(self.news.drifted, config, self.generation, self.looked)
            self.news.trouble("comparison", "")
        except Exception as error:
            self.news.trouble("comparison", f"driver and CDI specs can't be compared with the node: {error}", error)
        return config

    def _cannot_ask(self, error: NvmlError) -> None:
        self.news.trouble("node", f"the node's GPUs can't be asked: {error}")
        self.wellness.hear(NvmlState(str(error), user="facts"))

    def _read_again(self, config: Config) -> None:
        """Have the newest configuration that can be read as the wanted one. config: the one in force."""
        told, signature = self._reload.is_set(), _signature(self._wanted)
        if not told and signature == self._file:
            return
        self._reload.clear()
        self._file = signature
        try:
            new = self._load()
        except Exception as error:
            self._wanted = config
            self.news.trouble("configuration", f"new configuration refused, the last one stays: {error}", error)
            return
        for warning in new.warnings if new.warnings != self._wanted.warnings else ():
            log.warning("%s", warning)
        if told and new == config:
            log.info("configuration read again: nothing has changed")
        self._wanted = new
        self.news.trouble("configuration", "")

    async def _take_over(self, config: Config) -> None:
        """Look at the node, and make a generation where it or the configuration differs from the one in force."""
        facts = await self._look(config)
        current = self.generation
        before = current.facts if current else None
        self.looked = looked = with_lost(facts, before)
        if current is None or looked != before or config != current.config:
            await self._adopt(generation(config, facts, self._publish, before))
        self.wellness.hear(NvmlState(user="facts"))

    def _told(self, news: Notice | XidSeen) -> None:
        self.news.health(news, self.generation.facts.gpus if self.generation else ())

    async def _audit(self) -> None:
        """Whether what the kubelet gave out is there, once, and can be used."""
        current = self.generation
        if current:
            await self.news.audit(current)
            lost = await aside(self.news.access.look, current)
            held = await holders(current.config, current.offers) if lost else ()
            for one in lost:
                self.news.lost_access(one, held)

    async def _ask_mps(self) -> None:
        """Whether each control daemon still answers: without it no container could compute on what we offer."""
        silent = {}
        for name, offer in self.generation.offers.items() if self.generation else ():
            agent = self.agents.get(name)
            if mps.shared(offer.resource, offer.config) and agent and agent.state.registered:
                silent[name] = await mps.problem(name, offer.config)
        for name, problem in silent.items():
            if bool(problem) != bool(self.silent.get(name)):
                kind = "MPSFailed" if problem else "MPSRecovered"
                text = f"{name}: {problem or 'the MPS daemon answers again'}"
                self.news.say(kind, text, level=logging.ERROR if problem else logging.INFO)
        silent = {name: problem for name, problem in silent.items() if problem}
        if silent != self.silent:
            self.silent = silent
            self._health_changed()

    async def _adopt(self, new: Generation) -> None:
        self.news.adopted(new, self.generation)
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
            filters = new.config.device_filter
            out = sum(not wanted(gpu, filters) for gpu in new.facts.gpus)
            why = f" {out} GPUs are left out by --device-filter={','.join(filters)}" if out else ""
            log.warning("No devices found. Waiting for some.%s", why)

    def _with_health(self, new: Generation) -> Mapping[str, Offer]:
        """The offers with what is unhealthy now, which become the generation's."""
        offers = {name: replace(offer, sick=self._sick(name, offer)) for name, offer in new.offers.items()}
        self.generation = replace(new, offers=offers)
        return offers

    def _sick(self, name: str, offer: Offer) -> dict[str, str]:
        devices, silent = offer.resource.devices, self.silent.get(name)
        alike = {device.base: silent for device in devices if device.replicas} if silent else {}
        return {**alike, **self.wellness.health.sick(devices)}

    def _health_changed(self) -> None:
        """Bring the change to the streams; what comes while one is on its way goes with the next."""
        if self._offering is None or self._offering.done():
            self._offering = asyncio.get_running_loop().create_task(self._offer_health())

    async def _offer_health(self) -> None:
        shown: tuple[object, object] = (None, None)
        while self.generation and (shown[0] is not self.wellness.health or shown[1] is not self.silent):
            shown = self.wellness.health, self.silent
            for name, offer in self._with_health(self.generation).items():
                if name in self.agents:
                    await self.agents[name].offer(offer)

    def _begin(self, name: str, offer: Offer) -> None:
        observe = self._metrics.observe if self._metrics else None
        gate = partial(mps.problem, name, offer.config) if mps.shared(offer.resource, offer.config) else None
        agent = Agent(
            offer.config.kubelet_socket_dir,
            offer.config.kubelet_socket,
            offer,
            observe=observe,
            notify=self._registered,
            gate=gate,
        )
        self.agents[name] = agent
        task = asyncio.get_running_loop().create_task(agent.run(), name=name)
        task.add_done_callback(self._ended)
        self._tasks[name] = task

    def _who_serves(self) -> None:
        """Have the faults kept by us, or by another plugin where that serves all that we offer."""
        self.wellness.stand_aside(bool(self.agents) and self.agents.keys() <= self._yielded)

    def _registered(self, name: str, outcome: str) -> None:
        self._yielded -= {name}
        if outcome == "yielded":
            self._yielded |= {name}
        self._who_serves()
        if outcome == "registered":
            self.news.registered(name)
        if self._metrics:
            agent = self.agents.get(name)
            kubelet = agent.state.registered if agent and outcome == "registered" else None
            self._metrics.notify(name, outcome, kubelet)

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
