"""The preferred set of GPUs by looking at every way to split them, as the peer does: slow, and the measure of what is
right. The objective is told in gpulet.plugin.partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb, factorial

Matrix = Sequence[Sequence[int]]


def splits(gpus: Sequence[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every split of GPUs into sets of `size`, one of them smaller where they don't divide evenly."""
    if not gpus:
        yield []
        return
    first, *others = gpus
    small = len(gpus) % size
    for length in {size, small} - {0}:
        if length == size and len(gpus) < size:
            continue
        for way in combinations(others, length - 1):
            rest = [gpu for gpu in others if gpu not in way]
            if length == small and len(rest) % size:
                continue
            for more in splits(rest, size):
                yield [(first, *way), *more]


def count(number: int, size: int) -> int:
    """How many splits there are."""
    sets, small = divmod(number, size)
    ordered: int = factorial(size) ** sets * factorial(sets)
    return comb(number, small) * factorial(number - small) // ordered


def score(scores: Matrix, gpus: Sequence[int]) -> int:
    """The sum of pair scores inside one set."""
    return sum(scores[a][b] for a, b in combinations(gpus, 2))


def value(scores: Matrix, split: Sequence[tuple[int, ...]], size: int) -> tuple[int, int]:
    """What a split is worth: its sum, then the best of its full sets."""
    every = [score(scores, gpus) for gpus in split]
    return sum(every), max((one for one, gpus in zip(every, split, strict=True) if len(gpus) == size), default=0)


def best(scores: Matrix, gpus: Sequence[int], size: int) -> int:
    """The sum of the best split."""
    return max(value(scores, split, size)[0] for split in splits(gpus, size))


def best_with(scores: Matrix, chosen: Sequence[int], gpus: Sequence[int], size: int) -> int:
    """The sum of the best split of which the chosen GPUs are one set."""
    rest = [gpu for gpu in gpus if gpu not in chosen]
    return score(scores, chosen) + (best(scores, rest, size) if rest else 0)
