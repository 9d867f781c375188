"""What people are told about the plugin and its node: in the log, as Events, in the metrics. Each thing once, when it
is new, and again when it has changed.

    ConfigRejected, NodeChangeRejected       what can't be taken over; the last good one stays
    DeviceNotOffered, MIGLayoutInvalid       what isn't offered, and why
    AllocationFallback                       how GPUs are linked isn't known: sets are preferred without that
    AllocatedGPUGone, GPUDoublyAllocated     the kubelet's books and our devices don't agree
    GPUAccessLost                            a container may no longer use the GPU that it was given (about its Pod)
    DriverMismatch, CDISpecStale             driver and module, specs and node don't fit together
    PluginReRegistered                       the kubelet was told of a resource again
    GPUUnhealthy, GPURecovered, NVMLFailed, NVMLRecovered: health.py; MPSFailed, MPSRecovered: daemon.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from gpulet.errors import GpuletError
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.plugin import drift
from gpulet.plugin.access import AccessLost, AccessWatch
from gpulet.plugin.config import Config
from gpulet.plugin.generation import Generation
from gpulet.plugin.health import Notice, XidSeen
from gpulet.plugin.holders import Audit, Holder, on_node

if TYPE_CHECKING:
    from gpulet.plugin.metrics import Metrics

log = logging.getLogger(__name__)

REJECTED = {"configuration": "ConfigRejected", "node": "NodeChangeRejected"}


class News:
    """Tells it. report: where Events go."""

    def __init__(self, metrics: Metrics | None, report: Callable[[Notice], None] | None) -> None:
        self.access = AccessWatch()
        self._metrics, self._report = metrics, report
        self._books = Audit()
        self._last: dict[str, str] = {}  # "node", "configuration", ... -> what was last said of it, "" for all is well
        self._registered: set[str] = set()

    def health(self, news: Notice | XidSeen, gpus: Iterable[Gpu]) -> None:
        """Health had news, which the log has already: people look for a GPU by more than its UUID."""
        if self._metrics:
            self._metrics.told(news)
        if isinstance(news, Notice):
            whose = "".join(_whose(gpu) for gpu in gpus if gpu.uuid == news.uuid)
            self._event(replace(news, text=news.text + whose))

    def say(self, kind: str, text: str, *, pod: tuple[str, str, str] | None = None, level: int = logging.ERROR) -> None:
        """Something about the plugin, the node or a Pod."""
        log.log(level, "%s: %s", kind, text)
        self._event(Notice(kind, "", text, pod))

    def _event(self, notice: Notice) -> None:
        if self._report:
            self._report(notice)

    def _is_new(self, what: str, text: str) -> bool:
        before, self._last[what] = self._last.get(what, ""), text
        return bool(text) and text != before

    def trouble(self, what: str, text: str, error: BaseException | None = None) -> None:
        """What of "node" or "configuration" can't be taken over, or another thing that can't be done; "" where there is
        none any more. With the trace of an error that nobody expected."""
        if what == "node" and not text and self._last.get(what):
            log.info("the node can be looked at again")
        if self._is_new(what, text):
            strange = error is not None and not isinstance(error, GpuletError | OSError)
            log.error("%s", text, exc_info=error if strange else None)
            if error is not None and what in REJECTED:
                self._event(Notice(REJECTED[what], "", str(error)))

    def adopted(self, new: Generation, before: Generation | None) -> None:
        """Another generation is in force."""
        for kind, text in new.notices:
            log.warning("%s: %s", "not offered" if kind != "AllocationFallback" else kind, text)
            if before is None or (kind, text) not in before.notices:
                self._event(Notice(kind, "", text))

    def registered(self, resource: str) -> None:
        """The kubelet took a resource."""
        if resource in self._registered:
            self._event(Notice("PluginReRegistered", "", f"{resource} is registered with the kubelet again"))
        self._registered.add(resource)

    async def audit(self, current: Generation) -> None:
        """Whether the kubelet's books and our devices agree."""
        offered = {name: offer.resource.by_id for name, offer in current.offers.items()}
        for kind, text in await self._books.news(current.config, offered, on_node(current.facts)):
            if kind:
                self.say(kind, text)
            else:
                log.warning("%s", text)

    def drifted(self, config: Config, current: Generation | None, looked: NodeFacts | None) -> None:
        """Whether the driver's two parts, and CDI specs and the node, still fit together."""
        found = {"DriverMismatch": drift.mismatch(drift.driver_versions(config.lookup_root))}
        found["CDISpecStale"] = drift.stale_specs(current, looked) if current else ""
        for kind, text in found.items():
            if self._is_new(kind, text):
                self.say(kind, text)

    def lost_access(self, lost: AccessLost, held: Iterable[Holder]) -> None:
        """A container may no longer use its GPU. held: who has what, by name where the kubelet tells names."""
        one = lost.named(held)
        pod = (one.namespace, one.pod, lost.holder.pod) if one.namespace else None
        whose = f"Pod {one.owner}" if pod else f"the Pod with UID {one.pod}"
        self.say("GPUAccessLost", f"container {one.container} of {whose} {lost.text}", pod=pod)


def _whose(gpu: Gpu) -> str:
    known = (f"GPU {gpu.index}", gpu.bus_id and f"PCI {gpu.bus_id}", f"serial {gpu.serial or 'unknown'}", gpu.uuid)
    return f" [{', '.join(filter(None, known))}]"
