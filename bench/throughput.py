"""Containers one after another and eight at a time: create, start and delete, as a node does under load."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bench.contenders import ALL, BARE, Contender, contenders, lacking, runtimes
from bench.measure import Say, alternate, spread, timed
from bench.peers import Peers
from bench.site import Container, Runtime, Site
from bench.table import Table

ROUNDS = 5
BATCH = 22  # five rounds are the 110 Pods that a kubelet takes by default
WIDTHS = (1, 8)
COLUMNS = ("runtime", "mode", "at a time", "containers", "per second", "quartiles", "of bare", "ms each over bare")


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of throughput. Rounds: batches of 22 for every contender, five unless told."""
    chosen = [one for one in contenders(peers) if one in (BARE, *_whole())]
    title = f"create + start + delete of {rounds * BATCH} containers, 2 of 8 GPUs each, in turns of {BATCH}"
    made = Table("throughput", title, COLUMNS, notes=lacking(peers))
    with Site() as site:
        ready = runtimes(site, peers, chosen)
        for width in WIDTHS:
            actions: dict[str, Callable[[], float]] = {
                name: partial(batch, site, one, width) for name, one in ready.items()
            }
            taken = alternate(actions, rounds, lambda text, width=width: say(f"{width} at a time, {text}"))  # type: ignore[misc]
            bare = spread(taken[BARE.name]).median
            for one in chosen:
                seen = spread(taken[one.name])
                each = None if one == BARE else (seen.median - bare) / BATCH
                quartiles = f"{BATCH / seen.upper * 1e3:.1f} to {BATCH / seen.lower * 1e3:.1f}"
                rate, part = BATCH / seen.median * 1e3, bare / seen.median
                made.add(
                    f"{one.maker}{' prefork' if one.prefork else ''}",
                    f"{one.mode} {one.form}".strip(),
                    width,
                    rounds * BATCH,
                    rate,
                    quartiles,
                    part,
                    each,
                )
    return [made]


def _whole() -> list[Contender]:
    ours = [Contender("gpulet", mode, form, ALL) for mode, form in (("jit-cdi", ""), ("cdi", "JSON"))]
    ours += [replace(one, prefork=True) for one in ours]
    return [*ours, Contender("peer", "jit-cdi", "", ALL), Contender("peer", "cdi", "YAML", ALL)]


def batch(site: Site, runtime: Runtime, width: int) -> float:
    """Milliseconds until a batch of containers, `width` at a time, was created, started and deleted."""
    containers = [site.container(runtime) for _ in range(BATCH)]
    try:
        with ThreadPoolExecutor(width) as pool:
            return timed(lambda: list(pool.map(life, containers)))
    finally:
        for container in containers:
            container.remove()


def life(container: Container) -> None:
    """One container from its bundle to its end."""
    container.create()
    container.start()
    container.delete()
