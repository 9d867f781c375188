"""Sets of GPUs and what they score: the ways to choose one, and the best split into two.

Called by partition.py thousands of times for one answer, and so written for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Matrix = Sequence[Sequence[int]]


def best_of_two(scores: Matrix, members: Sequence[int], size: int) -> int:
    """The greatest sum of scores when the members are split into a set of `size` and one of the rest."""
    small = len(members) - size
    alike = groups(scores, members, members)
    if 2 * len(alike) > len(members):
        fixed = 1 if small == size else 0  # of two equal sets the first is the one with the first member
        return Halves(scores, members).best(fixed, small)
    degree = {one: sum([scores[one][other] for other in members]) for one in members}
    found = ways(scores, [], members, small, members)
    return sum(degree.values()) // 2 + max(2 * score - sum([degree[one] for one in way]) for way, score in found)


def first_of_two(scores: Matrix, members: Sequence[int], size: int, target: int) -> list[tuple[int, list[int]]]:
    """The full sets, each with its score, of the first split into two that reaches `target`, in order."""
    halves = Halves(scores, members)
    small = len(members) - size
    found = [way for count in {size, small} if (way := halves.first(count, target))]
    # a smaller set stands after all that begin with it
    way = min(found, key=lambda way: way + [len(scores)] * (size - len(way)))
    other = [one for one in members if one not in way]
    return [(pairs(scores, half), half) for half in (way, other) if len(half) == size]


class Halves:
    """Splits of the members into two sets. What a split scores follows from one set alone: the sum of all pairs, plus
    twice the pairs inside the set, minus all pairs of its members; so a set grows by one member in one addition."""

    def __init__(self, scores: Matrix, members: Sequence[int]) -> None:
        self.members = list(members)
        self.rows = [[2 * scores[one][other] if one != other else 0 for other in members] for one in members]
        degrees = [sum(row) // 2 for row in self.rows]
        self.total = sum(degrees) // 2
        self.gains = [-degree for degree in degrees]

    def best(self, fixed: int, count: int) -> int:
        """The best score with a first set of `count` members, the first member among them where `fixed` is 1."""
        if count == 0:
            return self.total
        if fixed:
            return self._grow(self.total + self.gains[0], _plus(self.gains[1:], self.rows[0], 1), 1, count - 1)
        return self._grow(self.total, self.gains, 0, count)

    def _grow(self, value: int, gains: list[int], at: int, count: int) -> int:
        """gains: of the members from `at` on, what each would add."""
        if count == 0:
            return value
        if count == 1:
            return value + max(gains)
        best = -1
        for offset in range(len(gains) - count + 1):
            place = at + offset
            grown = self._grow(
                value + gains[offset],
                _plus(gains[offset + 1 :], self.rows[place], place + 1),
                place + 1,
                count - 1,
            )
            if grown > best:
                best = grown
        return best

    def first(self, count: int, target: int) -> list[int]:
        """The first set of `count` members, with the first member in it, whose split reaches `target`; or []."""
        if count == 0:
            return []
        found = self._seek(self.total + self.gains[0], _plus(self.gains[1:], self.rows[0], 1), 1, count - 1, target)
        return [self.members[place] for place in (0, *found)] if found is not None else []

    def _seek(self, value: int, gains: list[int], at: int, count: int, target: int) -> tuple[int, ...] | None:
        if count == 0:
            return () if value == target else None
        if count == 1:
            wanted = target - value
            return (at + gains.index(wanted),) if wanted in gains else None
        for offset in range(len(gains) - count + 1):
            place = at + offset
            rest = _plus(gains[offset + 1 :], self.rows[place], place + 1)
            found = self._seek(value + gains[offset], rest, place + 1, count - 1, target)
            if found is not None:
                return (place, *found)
        return None


def _plus(gains: list[int], row: list[int], start: int) -> list[int]:
    """The gains with a row's added, from its place `start` on."""
    return [gain + more for gain, more in zip(gains, row[start:], strict=True)]


def groups(scores: Matrix, members: Sequence[int], pool: Sequence[int]) -> list[list[int]]:
    """The members, those together that are interchangeable as far as the pool is concerned."""
    found: list[list[int]] = []
    for one in members:
        for group in found:
            a, b = scores[one], scores[group[0]]
            if all(a[other] == b[other] for other in pool if other not in (one, group[0])):
                group.append(one)
                break
        else:
            found.append([one])
    return found


def ways(
    scores: Matrix, fixed: Sequence[int], members: Sequence[int], count: int, pool: Sequence[int]
) -> list[tuple[tuple[int, ...], int]]:
    """The ways to add `count` of the members to the fixed ones, each with its score; of members that are
    interchangeable as far as the pool is concerned always the first."""
    alike = groups(scores, members, pool)
    if 4 * len(alike) > 3 * len(members):  # next to nothing is interchangeable: not worth the counting
        plain = [(*fixed, *way) for way in combinations(members, count)]
        return [(way, pairs(scores, way)) for way in plain]
    found = [(tuple(fixed), pairs(scores, fixed))]
    left, full = len(members), len(fixed) + count
    for group in alike:
        left -= len(group)
        row = scores[group[0]]
        grown = []
        if len(group) == 1:  # the usual case on a machine with little symmetry, and there it has to be fast
            for way, score in found:
                if len(way) + left >= full:
                    grown.append((way, score))
                if len(way) < full:
                    grown.append(((*way, group[0]), score + sum([row[other] for other in way])))
            found = grown
            continue
        inside = row[group[1]]
        for way, score in found:
            least, most = max(0, full - len(way) - left), min(len(group), full - len(way))
            link = sum([row[other] for other in way]) if most else 0
            for taken in range(least, most + 1):
                grown.append((way + tuple(group[:taken]), score + taken * link + taken * (taken - 1) // 2 * inside))
        found = grown
    return found


def pairs(scores: Matrix, members: Sequence[int]) -> int:
    total = 0
    for place, one in enumerate(members):
        row = scores[one]
        for other in members[place + 1 :]:
            total += row[other]
    return total
