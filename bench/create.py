"""What GPUs cost a starting container: `create` alone, through each runtime, over the low-level runtime alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

from bench.contenders import ALL, BARE, SAME, SOME, Contender, contenders, lacking, runtimes
from bench.measure import Say, Spread, alternate, spread, timed
from bench.peers import Peers
from bench.site import Runtime, Site
from bench.table import Cell, Goal, Table

ROUNDS = 40
# of the peer's added time; for what; the capabilities that are asked for in mode jit-cdi, and in mode cdi
GOALS = ((0.30, "with the same mounts", SAME, ALL), (0.22, f"for {SOME}", SOME, SOME))
COLUMNS = (
    "runtime",
    "mode",
    "specification",
    "capabilities",
    "ms",
    "least",
    "quartiles",
    "added",
    "of the peer's",
    "by least",
)


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of `create`. Rounds: 40 unless told."""
    chosen = contenders(peers)
    with Site() as site:
        ready = runtimes(site, peers, chosen)
        actions: dict[str, Callable[[], float]] = {name: partial(once, site, one) for name, one in ready.items()}
        taken = alternate(actions, rounds, say)
    return [table({one: spread(taken[one.name]) for one in chosen}, lacking(peers))]


def once(site: Site, runtime: Runtime) -> float:
    """Milliseconds of one `create`; the bundle before and the removal after don't count."""
    container = site.container(runtime)
    try:
        return timed(container.create)
    finally:
        container.remove()


def rival(one: Contender) -> Contender | None:
    """The peer that a contender of ours is held against: the same mode; in its CDI modes it knows no capabilities."""
    if one.maker != "gpulet":
        return None
    form = "YAML" if one.mode == "cdi" else ""
    return Contender("peer", one.mode, form, one.capabilities if one.mode == "legacy" else ALL)


def ratios(taken: dict[Contender, float]) -> dict[Contender, float]:
    """Each contender of ours that has a rival here: added time, of the rival's added time. taken: milliseconds."""
    bare = taken[BARE]
    pairs = {one: other for one in taken if (other := rival(one)) in taken and other is not None}
    return {one: (taken[one] - bare) / (taken[other] - bare) for one, other in pairs.items()}


def table(taken: dict[Contender, Spread], notes: list[str]) -> Table:
    """The table from what was measured."""
    made = Table("create", f"create, 2 of 8 GPUs, medians of {taken[BARE].n}, milliseconds", COLUMNS, notes=notes)
    against = ratios({one: seen.median for one, seen in taken.items()})
    by_least = ratios({one: seen.least for one, seen in taken.items()})
    for one, seen in taken.items():
        added: Cell = None if one == BARE else seen.median - taken[BARE].median
        quartiles = f"{seen.lower:.1f} to {seen.upper:.1f}"
        words = (f"{one.maker}{' prefork' if one.prefork else ''}", one.mode, one.form, one.capabilities)
        made.add(*words, seen.median, seen.least, quartiles, added, against.get(one), by_least.get(one))
    for limit, text, with_facts, with_spec in GOALS:
        for form, prefork in product(("", "JSON", "peer's YAML"), (True, False)):
            one = Contender("gpulet", "cdi" if form else "jit-cdi", form, with_spec if form else with_facts, prefork)
            if one in taken:
                made.goals.append(Goal(f"{one.name}: added time of the peer's, {text},", limit, against.get(one)))
    return made
