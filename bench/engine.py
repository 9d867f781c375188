"""What GPUs cost a starting container in a real engine: the kubelet's StartContainer, answered by containerd with each
runtime, over a plain container with the low-level runtime alone.
"""

from __future__ import annotations

import shlex
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.contenders import ALL, BARE, SAME, SOME, Contender, contenders, lacking, runtimes
from bench.measure import Say, Spread, alternate, spread, timed
from bench.peers import Peers
from bench.site import Runtime, Site
from bench.table import Goal, Table
from gpulet.sim import rootfs
from gpulet.sim.containerd import Containerd, Pod, image_file

ROUNDS = 40
COLUMNS = ("runtime", "mode", "capabilities", "ms", "least", "quartiles", "over plain")
PLAIN = Contender("gpulet", "jit-cdi", "", "no GPU")
GOAL = Contender("gpulet", "jit-cdi", "", SOME)  # what a container has that names no capabilities
CHOSEN = (BARE, *(Contender("gpulet", "jit-cdi", "", some) for some in (SOME, SAME)),
          *(Contender("gpulet", "cdi", "YAML", some) for some in (SOME, ALL)),
          *(Contender("peer", mode, form, ALL) for mode, form in (("jit-cdi", ""), ("cdi", "YAML"), ("legacy", ""))),
          Contender("peer", "legacy", "", SOME))  # fmt: skip


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of StartContainer. Rounds: 40 unless told."""
    title = f"StartContainer by containerd, 2 of 8 GPUs, medians of {rounds}, milliseconds"
    if not (shutil.which("containerd") and shutil.which("ctr")):
        return [Table("engine", title, COLUMNS, notes=["containerd isn't installed here"])]
    made = Table("engine", title, COLUMNS, notes=lacking(peers))
    chosen = [one for one in contenders(peers) if one in CHOSEN]
    with Site() as site:
        ready = runtimes(site, peers, chosen)
        programs = {f"r{number}": _program(site, name, ready[name]) for number, name in enumerate(ready)}
        image = image_file(site.folder, rootfs.create(site.folder / "root"))
        with Containerd(programs) as engine:
            engine.load(image)
            actions: dict[str, Callable[[], float]] = {}
            for handler, one in zip(programs, chosen, strict=True):
                pod = engine.pod("bench", str(uuid.uuid4()), "runc" if one == BARE else handler)
                asked = {} if one == BARE else dict(entry.split("=", 1) for entry in ready[one.name].env)
                actions[one.name] = partial(once, pod, asked)
                if one == GOAL:
                    actions[PLAIN.name] = partial(once, pod, {})
            taken = {name: spread(times) for name, times in alternate(actions, rounds, say).items()}
    return [_filled(made, [*chosen, PLAIN], taken)]


def _program(site: Site, name: str, runtime: Runtime) -> Path:
    """A program with the runtime's environment in it, which containerd would else have to give to all of them."""
    path = site.folder / name.replace(" ", "-").replace(",", "-")
    settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in runtime.environ.items())
    path.write_text(f'#!/bin/sh\n{settings} exec {shlex.quote(runtime.program)} "$@"\n')
    path.chmod(0o755)
    return path


def once(pod: Pod, env: dict[str, str]) -> float:
    """Milliseconds of one start; making the container before and ending it afterwards don't count."""
    container = pod.create("main", ["sleep", "1000"], env)
    try:
        return timed(partial(pod.start, container))
    finally:
        pod.end(container)


def _filled(made: Table, chosen: list[Contender], taken: dict[str, Spread]) -> Table:
    plain = taken[BARE.name].median
    for one in chosen:
        if one.name in taken:
            seen = taken[one.name]
            quartiles = f"{seen.lower:.1f} to {seen.upper:.1f}"
            over = None if one == BARE else seen.median - plain
            words = (one.maker, f"{one.mode} {one.form}".strip(), one.capabilities)
            made.add(*words, seen.median, seen.least, quartiles, over)
    if GOAL.name in taken:
        made.goals.append(
            Goal(f"{GOAL.name}: milliseconds over a plain container", 40, taken[GOAL.name].median - plain)
        )
    return made
