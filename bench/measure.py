"""Times taken in turns: what disturbs the machine for a moment then disturbs every contender alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Say = Callable[[str], None]


@dataclass(frozen=True)
class Spread:
    """What a series of times was, in milliseconds: the least of them, both quartiles and the median of n."""

    n: int
    least: float
    lower: float
    median: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(1, values[0], values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(len(values), min(values), lower, median, upper)


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def timed(action: Callable[[], object]) -> float:
    """How long an action takes, in milliseconds."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


def alternate(
    contenders: Mapping[str, Callable[[], float]], rounds: int, say: Say = lambda text: None
) -> dict[str, list[float]]:
    """Runs every contender once a round, each round beginning with another one; gives what each returned.

    One round more is run first and forgotten: it fills caches and compiles.
    """
    names = list(contenders)
    told: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        say(f"round {number + 1} of {rounds}")
        start = max(number, 0) % len(names)
        for name in (*names[start:], *names[:start]):
            value = contenders[name]()
            if number >= 0:
                told[name].append(value)
    return told
