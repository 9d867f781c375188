"""Which of the free devices a container should get: GetPreferredAllocation's answer.

Whole, unshared GPUs go by how they are linked (partition.py); MIG devices and replicas by policy: "distributed" takes
from where least is taken, "packed" from where most is, "spread" from as many GPUs as possible. No answer fails a Pod:
where nothing can be preferred the answer is empty and the kubelet chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.plugin.partition import Partitioner
from gpulet.plugin.resources import Device, Resource

# What the peer gives a pair of GPUs for the nearest point that connects them, and for each NVLink.
LEVEL_SCORE = {"board": 60, "switch": 50, "switches": 40, "host-bridge": 30, "numa": 20, "system": 10}
NVLINK_SCORE, NVLINKS_COUNTED = 100, 18
MOST_GPUS = 16  # beyond, the exact answer may take seconds: neighbours are gathered greedily

Prefer = Callable[[Sequence[str], Sequence[str], int], list[str]]


def pair_scores(gpus: Sequence[Gpu]) -> list[list[int]]:
    """The pair scores of GPUs, in their order. Where the two ends tell different stories the lower one counts."""

    def told(one: Gpu, other: Gpu) -> int:
        link = next((link for link in one.links if link.peer == other.index), None)
        if link is None:
            return 0
        return LEVEL_SCORE.get(link.level, 0) + NVLINK_SCORE * min(link.nvlinks, NVLINKS_COUNTED)

    return [[0 if a is b else min(told(a, b), told(b, a)) for b in gpus] for a in gpus]


def strangers(resource: Resource, facts: NodeFacts) -> str:
    """Why this resource's GPUs are preferred without regard to some links, "" where all are known or none matter."""
    if any(device.mig or device.replicas for device in resource.devices):
        return ""
    members = {device.base for device in resource.devices}
    gpus = [gpu for gpu in facts.gpus if gpu.uuid in members]
    known = {(gpu.index, link.peer) for gpu in gpus for link in gpu.links if link.level or link.nvlinks}
    apart = [(one.index, other.index) for one, other in combinations(gpus, 2)
             if not {(one.index, other.index), (other.index, one.index)} <= known]  # fmt: skip
    if not apart:
        return ""
    pairs = ", ".join(f"{one} and {other}" for one, other in apart[:3]) + (", ..." if len(apart) > 3 else "")
    return f"NVML doesn't tell how GPUs {pairs} are linked: sets of GPUs are preferred as if they were not"


def preference(resource: Resource, facts: NodeFacts, policy: str) -> Prefer:
    """The function (available, must include, size) -> ids for one resource. Unknown and repeated ids are dropped."""
    by_id = resource.by_id
    place = {device.id: number for number, device in enumerate(resource.devices)}
    if any(device.mig or device.replicas for device in resource.devices):
        return lambda available, required, size: _by_policy(
            resource, _known(available, place), _known(required, place), size, policy
        )
    known = {gpu.uuid: gpu for gpu in facts.gpus}
    gpus = [known[device.base] for device in resource.devices if device.base in known]
    scores = pair_scores(gpus) if len(gpus) == len(by_id) else [[0] * len(by_id) for _ in by_id]
    solver: list[Partitioner] = []

    def aligned(available: Sequence[str], required: Sequence[str], size: int) -> list[str]:
        free = [place[device_id] for device_id in _known(available, place)]
        must = [place[device_id] for device_id in _known(required, place)]
        if len(free) > MOST_GPUS:
            chosen = _gathered(scores, free, must, size)
        else:
            solver[:] = solver or [Partitioner(scores)]
            chosen = solver[0].choose(free, must, size)
        return [resource.devices[number].id for number in chosen]

    return aligned


def _known(ids: Sequence[str], place: dict[str, int]) -> list[str]:
    return sorted({device_id for device_id in ids if device_id in place}, key=place.__getitem__)


def _by_policy(
    resource: Resource, available: Sequence[str], required: Sequence[str], size: int, policy: str
) -> list[str]:
    """Required devices, then one after the other the best of the rest."""
    taken = set(required)
    candidates = [resource.by_id[device_id] for device_id in available if device_id not in taken]
    chosen = [resource.by_id[device_id] for device_id in required]
    if len(chosen) > size or len(candidates) < size - len(chosen):
        return []
    free, all_devices = _by_place(candidates), _by_place(resource.devices)
    picked = _by_place(chosen) if policy == "spread" else Counter()
    sign = -1 if policy == "packed" else 1

    def key(device: Device) -> tuple[int, ...]:
        """Smallest is best; a MIG device or replica first by itself, then by its GPU."""
        places = (device.base, device.gpu_uuid)
        used = [sign * (all_devices[where] - free[where]) for where in places]
        now = [picked[where] for where in places]
        if policy == "spread":
            return now[1], now[0], -free[device.gpu_uuid], -free[device.base]
        return used[0], now[0], used[1], now[1]

    stacks: dict[str, list[Device]] = {}  # the replicas of one base are alike: only the first has to be looked at
    for device in reversed(candidates):
        stacks.setdefault(device.base, []).append(device)
    order = {device.id: number for number, device in enumerate(candidates)}
    while len(chosen) < size:
        # the first of equals, in the node's order
        best = min((stack[-1] for stack in stacks.values()), key=lambda device: (key(device), order[device.id]))
        stacks[best.base].pop()
        if not stacks[best.base]:
            del stacks[best.base]
        chosen.append(best)
        for where in {best.base, best.gpu_uuid}:
            free[where] -= 1
            picked[where] += 1
    return [device.id for device in chosen]


def _by_place(devices: Sequence[Device]) -> Counter[str]:
    """How many devices a base, and a physical GPU, holds."""
    return Counter(where for device in devices for where in {device.base, device.gpu_uuid})


def _gathered(scores: Sequence[Sequence[int]], free: Sequence[int], must: Sequence[int], size: int) -> list[int]:
    if size <= 0 or len(free) < size or len(must) > size or not set(must) <= set(free):
        return []
    chosen = list(must) or [min(free)]
    while len(chosen) < size:
        rest = [number for number in free if number not in chosen]
        chosen.append(max(rest, key=lambda number: (sum(scores[number][other] for other in chosen), -number)))
    return sorted(chosen)
