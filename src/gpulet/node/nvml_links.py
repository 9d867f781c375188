"""How the GPUs of a node reach each other: PCIe levels and NVLinks, also those through an NVSwitch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pynvml

from gpulet.node.gpu import Gpu, Link
from gpulet.node.nvml_ask import text
from gpulet.node.procfs import nvml_bus_id

LEVELS = {
    0: "board",
    10: "switch",
    20: "switches",
    30: "host-bridge",
    40: "numa",
    50: "system",
}  # nvmlGpuTopologyLevel_t
_MOST_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH


def _remote_ends(handle: Any) -> tuple[dict[str, int], int]:
    """(active NVLinks by the bus id at their other end, active NVLinks that end at a switch)."""
    ends: dict[str, int] = {}
    switched = 0
    for link in range(_MOST_NVLINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) != 1:
                continue
            remote = pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId
        except pynvml.NVMLError as error:
            if error.value in (pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_NOT_SUPPORTED):
                break  # this GPU has no more links
            continue
        if _ends_at_switch(handle, link):
            switched += 1
            continue
        bus_id = nvml_bus_id(text(remote))
        ends[bus_id] = ends.get(bus_id, 0) + 1
    return ends, switched


def _ends_at_switch(handle: Any, link: int) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH)
    except pynvml.NVMLError:
        return False  # older drivers don't say; the bus id still tells a direct link


def _level(one: Any, two: Any) -> str:
    try:
        return LEVELS.get(pynvml.nvmlDeviceGetTopologyCommonAncestor(one, two), "")
    except pynvml.NVMLError:  # one GPU's trouble must not take the others' facts away
        return ""


def all_links(found: Sequence[tuple[Gpu, Any]]) -> list[Gpu]:
    """The GPUs with their links filled in. `found` pairs each with its NVML handle.

    GPUs behind NVSwitches reach each other with as many links as the one with fewer has to the switches.
    """
    ends = [_remote_ends(handle) for _gpu, handle in found]
    levels = {
        (one, two): _level(found[one][1], found[two][1]) for one in range(len(found)) for two in range(one)
    }  # the relation is symmetric, so each pair is asked for once
    out = []
    for one, (gpu, _handle) in enumerate(found):
        links = []
        for two, (peer, _other) in enumerate(found):
            if one == two:
                continue
            direct = ends[one][0].get(peer.bus_id, 0)
            through_switch = min(ends[one][1], ends[two][1])
            links.append(Link(peer.index, levels[max(one, two), min(one, two)], direct + through_switch))
        out.append(gpu.replace(links=tuple(links)))
    return out
