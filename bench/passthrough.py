"""What every other command of the low-level runtime costs when it goes through ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench import site as sites
from bench.contenders import ALL, BARE, Contender, contenders, lacking, runtimes
from bench.measure import Say, alternate, spread, timed
from bench.peers import Peers
from bench.site import Container, Runtime, Site
from bench.table import Goal, Table

ROUNDS = 40
LIMIT = 12.0  # milliseconds over bare
COMMANDS = ("state", "kill", "delete")
COLUMNS = ("runtime", "command", "ms", "least", "quartiles", "added")


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of commands passed through. Rounds: 40 unless told."""
    wanted = (BARE, Contender("gpulet", "jit-cdi", "", ALL), Contender("peer", "jit-cdi", "", ALL))
    chosen = [one for one in contenders(peers) if one in wanted]
    made = Table("passthrough", f"commands passed through, medians of {rounds}, milliseconds", COLUMNS)
    made.notes += lacking(peers)
    with Site() as site:
        ready = runtimes(site, peers, chosen)
        plain = site.container(sites.BARE, ["/bin/sleep", "2147483647"])
        plain.create()
        plain.start()
        for command in COMMANDS:
            actions: dict[str, Callable[[], float]] = {
                name: partial(once, site, plain, one, command) for name, one in ready.items()
            }
            taken = alternate(actions, rounds, lambda text, command=command: say(f"{command}, {text}"))  # type: ignore[misc]
            bare = spread(taken[BARE.name]).median
            for one in chosen:
                seen = spread(taken[one.name])
                added = None if one == BARE else seen.median - bare
                quartiles = f"{seen.lower:.1f} to {seen.upper:.1f}"
                made.add(one.maker, command, seen.median, seen.least, quartiles, added)
                if one.maker == "gpulet":
                    made.goals.append(Goal(f"{command}: ms over bare", LIMIT, added))
    return [made]


def once(site: Site, plain: Container, runtime: Runtime, command: str) -> float:
    """Milliseconds of one command: on the container that runs, or for `delete` on one of its own."""
    if command == "delete":
        gone = site.container(sites.BARE)
        gone.create()
        try:
            return timed(lambda: gone.run("delete", "--force", gone.name, through=runtime))
        finally:
            gone.remove()
    words = ("kill", plain.name, "CONT") if command == "kill" else ("state", plain.name)
    return timed(lambda: plain.run(*words, through=runtime))
