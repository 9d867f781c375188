"""The best set of k GPUs out of the free ones: the peer's objective, solved exactly.

The objective (go-gpuallocator's best-effort policy): split the free GPUs into sets of k, the last one smaller where k
doesn't divide them, so that the sum of pair scores inside the sets is greatest; of the best split, take the set with
the greatest score that holds all required GPUs. Among equally good splits the first in the order of indices counts,
as when the peer is given its GPUs in order; where some are required, the one whose set with these scores most.

Enumerating splits takes minutes for 16 GPUs. Here every set of GPUs is a bit mask and the best split of what remains
is remembered. What makes it fast on real machines is symmetry: GPUs behind one switch, and whole switches behind one
socket, can be exchanged without changing any score, so masks that differ only by such an exchange are one state.
Exchanges are verified on the score matrix, so that a machine without symmetry costs time and never the right answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from gpulet.plugin.splits import Matrix, best_of_two, first_of_two, pairs, ways


class Partitioner:
    """Answers for one machine. scores: symmetric, scores[i][j] the pair score of GPUs i and j, the diagonal ignored."""

    def __init__(self, scores: Matrix) -> None:
        order, siblings = _arrange(scores, range(len(scores)))
        self._given = scores
        self._bit = {gpu: bit for bit, gpu in enumerate(order)}
        self._scores = [[0 if a == b else scores[a][b] for b in order] for a in order]
        self._swaps = _verified(self._scores, siblings)
        self._nearest = [
            sorted(((other, score) for other, score in enumerate(row) if other != bit), key=lambda item: -item[1])
            for bit, row in enumerate(self._scores)
        ]
        self._bounds: dict[tuple[int, int], int] = {}
        self._best: dict[tuple[int, int], int] = {}
        self._canonical: dict[int, int] = {}

    def choose(self, available: Sequence[int], required: Sequence[int], size: int) -> list[int]:
        """`size` of the available GPUs, all required ones among them, in ascending order; [] where that can't be."""
        free, must = set(available), set(required)
        if size <= 0 or len(free) < size or len(must) > size or not must <= free:
            return []
        if len(free) == size:
            return sorted(free)
        if not must:
            return self._best_set(sorted(free), size)
        return self._best_around(free, must, size)

    def _best_set(self, gpus: list[int], size: int) -> list[int]:
        """The strongest full set of the first best split: walks down the splits in order, led by their known sums."""
        left, target = gpus, self._split(self._mask(gpus), size)
        best: tuple[int, list[int]] = (-1, [])
        while left:
            if size < len(left) <= 2 * size:
                last = first_of_two(self._given, left, size, target)
                return max([best, *last], key=lambda item: item[0])[1]
            first, *others = left
            small = len(left) % size
            options = ways(self._given, [first], others, size - 1, left) if len(left) >= size else []
            if small:
                options += ways(self._given, [first], others, small - 1, left)
            inf = len(self._given)  # the gaps of the smaller set come after every GPU
            in_order = sorted((sorted(way) + [inf] * (size - len(way)), way, score) for way, score in options)
            for _, taken, score in in_order:
                rest = [gpu for gpu in others if gpu not in taken]
                mask = self._mask(rest)
                if score + self._bound(mask, size) >= target and score + self._split(mask, size) == target:
                    break
            left, target = rest, target - score
            if len(taken) == size and score > best[0]:
                best = score, sorted(taken)
        return best[1]

    def _best_around(self, free: set[int], must: set[int], size: int) -> list[int]:
        pool = self._mask(free)
        fixed = sorted(must)
        best: tuple[int, int, list[int]] | None = None
        for way, score in ways(self._given, fixed, sorted(free - must), size - len(fixed), sorted(free)):
            gpus = sorted(way)
            total = score + self._split(pool & ~self._mask(gpus), size)
            if best is None or (total, score) > best[:2] or ((total, score) == best[:2] and gpus < best[2]):
                best = (total, score, gpus)
        return best[2] if best else []

    def _mask(self, gpus: Sequence[int] | set[int]) -> int:
        mask = 0
        for gpu in gpus:
            mask |= 1 << self._bit[gpu]
        return mask

    def _canon(self, mask: int) -> int:
        """The state that stands for all masks that differ from this one by exchanges."""
        found = self._canonical.get(mask)
        if found is None:
            found = mask
            for low, high, ones in self._swaps:
                a, b = found >> low & ones, found >> high & ones
                if a < b:
                    found ^= (a ^ b) << low | (a ^ b) << high
            self._canonical[mask] = found
        return found

    def _bound(self, mask: int, size: int) -> int:
        """No split of these GPUs scores more: each GPU has at most size - 1 others in its set, at best its nearest."""
        found = self._bounds.get((mask, size))
        if found is None:
            total = 0
            for bit in _bits(mask):
                left = size - 1
                for other, score in self._nearest[bit]:
                    if not left:
                        break
                    if mask >> other & 1:
                        total += score
                        left -= 1
            found = self._bounds[mask, size] = total // 2
        return found

    def _split(self, mask: int, size: int) -> int:
        """The greatest sum of scores when these GPUs are split into sets of `size` and one of the rest."""
        mask = self._canon(mask)
        bits = _bits(mask)
        if len(bits) <= size:
            return pairs(self._scores, bits)
        found = self._best.get((mask, size))
        if found is not None:
            return found
        if len(bits) <= 2 * size:
            self._best[mask, size] = best = best_of_two(self._scores, bits, size)
            return best
        rest = len(bits) % size
        best = 0
        if rest:  # the smaller set first: what remains then divides evenly, and its lowest GPU is in some full set
            options, fixed, count = bits, [], rest
        else:
            options, fixed, count = bits[1:], bits[:1], size - 1
        reached: dict[int, int] = {}
        for members, score in ways(self._scores, fixed, options, count, bits):
            state = self._canon(mask - sum([1 << bit for bit in members]))
            if score > reached.get(state, -1):
                reached[state] = score
        promising = sorted(((score + self._bound(state, size), score, state) for state, score in reached.items()))
        while promising and promising[-1][0] > best:
            _, score, state = promising.pop()
            best = max(best, score + self._split(state, size))
        self._best[mask, size] = best
        return best


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _arrange(scores: Matrix, gpus: Sequence[int]) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """GPUs in an order where those close to each other stand together, and the blocks of each level as lists of
    siblings (first place, length), inner levels first."""
    members = list(gpus)
    for threshold in sorted({scores[a][b] for a, b in combinations(members, 2)}):
        blocks = _components(scores, members, threshold + 1)
        if len(blocks) > 1:
            break
    else:
        return members, []
    order: list[int] = []
    levels: list[list[tuple[int, int]]] = []
    here = []
    for block in sorted(blocks, key=lambda block: (-len(block), block)):
        inner, below = _arrange(scores, block)
        levels += [[(place + len(order), length) for place, length in siblings] for siblings in below]
        here.append((len(order), len(inner)))
        order += inner
    return order, [*levels, here]


def _components(scores: Matrix, members: Sequence[int], threshold: int) -> list[list[int]]:
    """The groups connected by pair scores of at least `threshold`."""
    left = set(members)
    groups = []
    while left:
        group, edge = set(), [min(left)]
        while edge:
            one = edge.pop()
            if one not in group:
                group.add(one)
                edge += [other for other in left if other != one and scores[one][other] >= threshold]
        left -= group
        groups.append(sorted(group))
    return groups


def _verified(scores: Matrix, levels: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int, int]]:
    """The exchanges of two blocks that leave every score as it is, as (first bit, first bit, ones); in an order that
    sorts the blocks of a level."""
    swaps = []
    for siblings in levels:
        for (low, length), (high, other) in combinations(siblings, 2):
            if length != other:
                continue
            places = list(range(len(scores)))
            for offset in range(length):
                places[low + offset], places[high + offset] = high + offset, low + offset
            if all(scores[a][b] == scores[places[a]][places[b]] for a, b in combinations(range(len(scores)), 2)):
                swaps.append((low, high, (1 << length) - 1))
    return swaps
