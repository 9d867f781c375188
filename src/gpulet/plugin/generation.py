"""One generation of offers, worked out whole from a configuration and the node's facts before anything changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpulet.errors import ConfigError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin import mps
from gpulet.plugin.allocate import Surroundings
from gpulet.plugin.config import Config
from gpulet.plugin.prefer import preference, strangers
from gpulet.plugin.resources import control_nodes, inventory
from gpulet.plugin.server import Offer

log = logging.getLogger(__name__)

IMEX_NODE = "/dev/nvidia-caps-imex-channels/channel"

Publish = Callable[[Config, NodeFacts, tuple[int, ...]], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Generation:
    """What is offered, by resource name. notices: (kind, text) of what was left out, or can't be done as well as it
    should be. kept: UUIDs of GPUs that no longer answer and are still listed, as unhealthy."""

    config: Config
    facts: NodeFacts
    offers: Mapping[str, Offer]
    notices: tuple[tuple[str, str], ...] = ()
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
    answering = facts
    facts = with_lost(facts, before)
    offered = inventory(facts, config)
    if config.mps_active:
        mps.check(offered.resources)
    imex = imex_channels(config)
    classes = publish(config, facts, imex) if config.cdi else ()
    surroundings = Surroundings(control_nodes(config.lookup_dev_root), imex, classes)
    offers = {}
    notices = [("MIGLayoutInvalid" if text in offered.layouts else "DeviceNotOffered", text)
               for text in offered.problems]  # fmt: skip
    for resource in offered.resources:
        prefer = preference(resource, facts, config.allocation_policy)
        offers[resource.name] = Offer(resource, config, surroundings, prefer=prefer)
        if apart := strangers(resource, answering):  # nobody is given one that is lost
            notices.append(("AllocationFallback", f"{resource.name}: {apart}"))
    there = {gpu.uuid for gpu in answering.gpus}
    kept = tuple(gpu.uuid for gpu in facts.gpus if gpu.uuid not in there)
    return Generation(config, facts, offers, tuple(notices), kept)
