"""How long a preferred allocation takes: GPUs by size, on every machine that we simulate, against exhaustive search
where that ends, and whether both agree.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import exhaustive
from bench.measure import Say, spread, timed
from bench.peers import Peers
from bench.table import Cell, Goal, Table
from gpulet.node import nvml
from gpulet.node.gpu import NodeFacts
from gpulet.plugin.config import load
from gpulet.plugin.prefer import pair_scores, preference
from gpulet.plugin.resources import Resource, inventory
from gpulet.sim import description
from gpulet.sim import node as simulated

ROUNDS = 5
NUMBERS = (4, 8, 16)
LIMIT = 20.0  # milliseconds for any size of 16 GPUs
MOST_SPLITS = 20_000  # exhaustive search beyond this takes many seconds
COLUMNS = (
    *("GPUs", "size", "machines", "ms", "worst", "on", "some busy, worst", "asked again"),
    *("exhaustive", "splits", "times faster", "agree"),
)


@dataclass(frozen=True)
class Machine:
    """One simulated machine as the plugin sees it."""

    name: str
    facts: NodeFacts
    resource: Resource

    def cold(self, available: list[str], size: int) -> float:
        """Milliseconds of the first answer after the plugin's start."""
        prefer = preference(self.resource, self.facts, "distributed")
        return timed(lambda: prefer(available, [], size))

    def warm(self, available: list[str], size: int) -> float:
        """Milliseconds of a later answer."""
        prefer = preference(self.resource, self.facts, "distributed")
        prefer(available, [], size)
        return timed(lambda: prefer(available, [], size))


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The allocation table. Rounds: how often each is asked, and how many sets of busy GPUs; five unless told."""
    made = Table("prefer", f"preferred allocations, milliseconds, medians of {rounds} on each machine", COLUMNS)
    worst: dict[int, float] = {}
    for number in NUMBERS:
        every = list(machines(number))
        for size in range(1, number + 1):
            say(f"{size} of {number}")
            row = measured(every, number, size, rounds)
            made.rows.append(row)
            worst[number] = max(worst.get(number, 0.0), *(float(row[name] or 0) for name in ("worst", COLUMNS[6])))
    made.goals.append(Goal("ms for any size of 16 GPUs on any machine", LIMIT, worst.get(16)))
    made.notes.append(f"machines: {', '.join(machine.name for machine in every)}; empty: more splits than end in time")
    return [made]


def machines(number: int) -> Iterator[Machine]:
    """Every profile with so many GPUs of its kind; left out are those of another platform, those with MIG, and those
    whose addresses or minors don't reach for so many."""
    for name in description.profiles():
        told = description.load_profile(name, gpus=number)
        unique = min(len({gpu.bus_id for gpu in told.gpus}), len({gpu.minor for gpu in told.gpus}))
        if told.platform != "discrete" or unique < number:
            continue
        with tempfile.TemporaryDirectory(prefix="gpb") as folder:
            node = simulated.create(Path(folder) / "node", name, gpus=number)
            facts = nvml.facts(str(node.root))
        offered = inventory(facts, load([], {})).resources
        if len(facts.gpus) == number and len(offered) == 1 and not any(device.mig for device in offered[0].devices):
            yield Machine(name, facts, offered[0])


def measured(every: list[Machine], number: int, size: int, rounds: int) -> dict[str, Cell]:
    """One row: the median machine, the worst, and what exhaustive search says."""
    ids = {machine.name: [device.id for device in machine.resource.devices] for machine in every}
    cold = {one.name: spread([one.cold(ids[one.name], size) for _ in range(rounds)]).median for one in every}
    warm = [spread([one.warm(ids[one.name], size) for _ in range(rounds)]).median for one in every]
    chance = random.Random(f"{number}/{size}")
    busy = [
        one.cold(sorted(chance.sample(ids[one.name], chance.randint(size, number))), size)
        for one in every
        for _ in range(rounds)
    ]
    slowest = max(cold, key=cold.__getitem__)
    middle = spread(list(cold.values())).median
    cells: list[Cell] = [number, size, len(every), middle, cold[slowest], slowest, max(busy), max(warm)]
    ways = exhaustive.count(number, size)
    if ways > MOST_SPLITS:
        return dict(zip(COLUMNS, [*cells, None, ways, None, None], strict=True))
    taken, agree = zip(*(compared(one, number, size) for one in every), strict=True)
    slow = spread(list(taken)).median
    return dict(zip(COLUMNS, [*cells, slow, ways, slow / middle, f"{sum(agree)} of {len(every)}"], strict=True))


def compared(machine: Machine, number: int, size: int) -> tuple[float, bool]:
    """Milliseconds of exhaustive search, and whether our answer belongs to a split that is as good."""
    known = {gpu.uuid: gpu for gpu in machine.facts.gpus}
    devices = machine.resource.devices
    scores = pair_scores([known[device.base] for device in devices])
    place = {device.id: index for index, device in enumerate(devices)}
    chosen = [place[one] for one in preference(machine.resource, machine.facts, "distributed")([*place], [], size)]
    found: list[int] = []
    taken = timed(lambda: found.append(exhaustive.best(scores, range(number), size)))
    return taken, exhaustive.best_with(scores, chosen, range(number), size) == found[0]
