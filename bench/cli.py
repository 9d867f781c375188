"""The container CLI: info, list, configure on a real container with 8 GPUs and device rules, where NVML is cheap and
where it takes two seconds; and the prestart hook for a container that wants no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench import site as sites
from bench.measure import Say, Spread, alternate, spread, timed
from bench.peers import Peers
from bench.site import Site
from bench.table import Goal, Table
from gpulet.errors import EngineError
from gpulet.sim.inject import inject

ROUNDS = 20
SLOW_ROUNDS = 3  # two seconds each, for whoever initialises NVML
SLOW = "nvml init takes 2s"
# the hook: keeps its state where we find it, and waits; $0 is the bundle
WAIT = 'cat > "$0/state.new" && mv "$0/state.new" "$0/state" && read -r line < "$0/gate"'
CONFIGURE = ("--device=all", "--compute", "--utility")
COLUMNS = ("program", "what", "NVML", "ms", "least", "quartiles", "of the peer's")


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of the CLI. Rounds: 20 unless told; with a slow NVML three at most."""
    made = Table("cli", "container CLI and hook, 8 GPUs, milliseconds", COLUMNS)
    made.notes += [f"no peer: {name} names one" for name, path in _parts(peers).items() if not path]
    with Site() as site:
        clis = {"gpulet": str(site.launchers["gpulet-container-cli"]), "peer": peers.container_cli}
        clis = {name: path for name, path in clis.items() if path}
        for nvml, count in (("at once", rounds), ("2 s", min(rounds, SLOW_ROUNDS))):
            for what in ("info", "list", "configure"):
                say(f"{what}, NVML {nvml}")
                act = _configure if what == "configure" else partial(_plain, what)
                _rows(made, what, nvml, alternate({n: partial(act, site, p) for n, p in clis.items()}, count))
            if nvml == "at once":
                _slow_down(site)
        hooks = {"gpulet": str(site.launchers["gpulet-hook"]), "peer": peers.hook}
        _rows(made, "hook, no GPU", "2 s", alternate(_idle(site, hooks), rounds))
    made.goals += goals(made)
    return [made]


def _parts(peers: Peers) -> Mapping[str, str]:
    return {"PEER_CONTAINER_CLI": peers.container_cli, "PEER_HOOK": peers.hook}


def _rows(made: Table, what: str, nvml: str, taken: Mapping[str, list[float]]) -> None:
    every: dict[str, Spread] = {name: spread(values) for name, values in taken.items()}
    for name, seen in every.items():
        ratio = seen.median / every["peer"].median if name == "gpulet" and "peer" in every else None
        made.add(name, what, nvml, seen.median, seen.least, f"{seen.lower:.1f} to {seen.upper:.1f}", ratio)


def _plain(what: str, site: Site, program: str) -> float:
    return timed(lambda: call([program, f"--root={site.node.root}", what]))


def _configure(site: Site, program: str) -> float:
    """On a container of its own, held at the moment when a low-level runtime calls its prestart hooks."""
    with held(site) as (pid, root):
        _show_driver(site, pid, root)
        command = [program, f"--root={site.node.root}", "configure", *CONFIGURE, f"--pid={pid}", str(root)]
        return timed(lambda: call(command))


def _show_driver(site: Site, pid: int, root: Path) -> None:
    """Lets the container's /proc have a driver's folder, as on a node with one: NVIDIA's program can't do without."""
    mount = ["mount", "--bind", f"{site.node.root}/proc/driver", f"{root}/proc/driver"]
    call(["nsenter", f"--mount=/proc/{pid}/ns/mnt", *mount])


def _slow_down(site: Site) -> None:
    """From now on NVML takes two seconds, also for a program that makes the driver root its own root before it asks."""
    inject(site.node.folder, SLOW)
    there = site.node.root / str(site.node.control)[1:]
    there.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(site.node.control, there)


@contextlib.contextmanager
def held(site: Site) -> Iterator[tuple[int, Path]]:
    """A container whose prestart hook waits for us: (its process, its root file system as the host sees it)."""
    container = site.container(sites.BARE)
    path, state, gate = (container.bundle / name for name in ("config.json", "state", "gate"))
    os.mkfifo(gate)
    config = json.loads(path.read_text())
    hook = {"path": "/bin/sh", "args": ["sh", "-c", WAIT, str(container.bundle)], "env": [f"PATH={os.environ['PATH']}"]}
    path.write_text(json.dumps({**config, "hooks": {"prestart": [hook]}}))
    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(container.create)
        try:
            while not state.exists():
                if created.done():
                    created.result()
                time.sleep(0.001)
            yield int(json.loads(state.read_text())["pid"]), container.bundle / "rootfs"
        finally:
            if not created.done():
                gate.write_text("\n")
            created.result()
            container.remove()


def _idle(site: Site, hooks: Mapping[str, str]) -> dict[str, Callable[[], float]]:
    """Each hook's prestart for a container without a request. Its configuration has the legacy mode."""
    environ = site.config("idle", f'[nvidia-container-cli]\nroot = "{site.node.root}"\n')
    container = site.container(sites.BARE)
    container.create()
    state = json.dumps({"ociVersion": "1.0.2", "pid": container.pid(), "bundle": str(container.bundle)}).encode()
    acts = {name: partial(call, [path, "prestart"], environ, state) for name, path in hooks.items() if path}
    return {name: partial(timed, act) for name, act in acts.items()}


def call(command: list[str], environ: Mapping[str, str] | None = None, state: bytes = b"") -> None:
    """Runs a program to its end. Raises EngineError with its last line."""
    done = subprocess.run(
        command, input=state, capture_output=True, env={"PATH": os.environ["PATH"], **(environ or {})}
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise EngineError(f"{command[0]} failed", seen=lines[-1] if lines else f"exit code {done.returncode}")


def goals(made: Table) -> list[Goal]:
    """The project's own limits, against what came out."""
    ours = {(row["what"], row["NVML"]): row for row in made.rows if row["program"] == "gpulet"}

    def seen(what: str, nvml: str, column: str) -> float | None:
        value = ours[what, nvml][column]
        return float(value) if value is not None else None

    slow, quick = seen("configure", "2 s", "ms"), seen("configure", "at once", "ms")
    return [
        Goal("configure, of the peer's,", 1.0, seen("configure", "at once", "of the peer's")),
        Goal("configure where NVML takes 2 s, of the peer's,", 0.05, seen("configure", "2 s", "of the peer's")),
        Goal(
            "configure where NVML takes 2 s, of that where it doesn't,", 1.2, slow / quick if slow and quick else None
        ),
        Goal("hook, no GPU: ms", 20.0, seen("hook, no GPU", "2 s", "ms")),
    ]
