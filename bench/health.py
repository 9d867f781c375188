"""From an Xid to Unhealthy in the kubelet's stream: the stand-in driver raises the event, the plugin tells the kubelet,
of every replica of that GPU where it does as it should.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from bench.measure import Say, spread
from bench.peers import Peers
from bench.plugins import Plugin, makers
from bench.site import Site
from bench.table import Goal, Table
from gpulet.errors import NodeError
from gpulet.sim.node import SimNode

ROUNDS = 3
XID = 79  # a GPU has fallen off the bus: no plugin passes over it
LIMIT = 50.0  # milliseconds
WATCH_BEGINS = 1.0  # seconds that a plugin is given to start listening for events after its registration
GRACE = 2.0  # seconds for the rest of a GPU's replicas
COLUMNS = ("plugin", "devices", "events", "first ms", "all ms", "least", "quartiles", "told of", "of the peer's")


@dataclass(frozen=True)
class Heard:
    """One event: milliseconds to the first device of the GPU that is unhealthy, and until all are; None where that
    didn't come; told: how many of them are."""

    first: float
    all: float | None
    told: int


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of latencies. Rounds: starts of each plugin, each with one event for every GPU; three unless told."""
    made = Table("health", "from an Xid to Unhealthy in the kubelet's stream, milliseconds", COLUMNS)
    if not peers.device_plugin:
        made.notes.append("no peer: PEER_DEVICE_PLUGIN names one")
    for replicas in (1, 1000):
        heard: dict[str, list[Heard]] = defaultdict(list)
        for number in range(rounds):
            with Site() as site:  # a new one: faults stay with a node
                for name, make in makers(peers, site.node, site.folder).items():
                    say(f"{8 * replicas} devices, {name}, start {number + 1} of {rounds}")
                    site.node.control.write_text("")
                    with make(replicas) as plugin:
                        time.sleep(WATCH_BEGINS)
                        heard[name] += listen(plugin, site.node, replicas)
        _rows(made, heard, replicas)
    made.notes.append("a peer that is told of fewer than all replicas leaves the others healthy for good")
    return [made]


def _rows(made: Table, heard: dict[str, list[Heard]], replicas: int) -> None:
    for name, events in heard.items():
        first = spread([event.first for event in events])
        whole = [event.all for event in events if event.all is not None]
        every = spread(whole) if len(whole) == len(events) else None
        rival = heard.get("peer") if name == "gpulet" else None
        ratio = first.median / spread([event.first for event in rival]).median if rival else None
        quartiles = f"{first.lower:.1f} to {first.upper:.1f}"
        told = f"{min(event.told for event in events)} of {replicas}"
        latest = every.median if every else None
        made.add(name, 8 * replicas, first.n, first.median, latest, first.least, quartiles, told, ratio)
        if name == "gpulet":
            made.goals.append(Goal(f"ms until all devices are known, {8 * replicas} of them,", LIMIT, latest))


def listen(plugin: Plugin, node: SimNode, replicas: int) -> list[Heard]:
    """What is heard of an Xid on each GPU in turn. Raises NodeError where nothing is."""
    return [_heard(plugin, node, index, gpu.uuid, replicas) for index, gpu in enumerate(node.gpus)]


def _heard(plugin: Plugin, node: SimNode, index: int, uuid: str, replicas: int) -> Heard:
    began = time.perf_counter()
    with node.control.open("a") as control:
        control.write(f"gpu {index} xid {XID}\n")
    first = plugin.ear.wait(lambda: _sick(plugin, uuid) > 0, f"call GPU {index} unhealthy")
    latest = None
    try:
        moment = plugin.ear.wait(lambda: _sick(plugin, uuid) == replicas, "say so of its replicas", GRACE)
        latest = (moment - began) * 1e3
    except NodeError:
        pass  # the table says how many
    return Heard((first - began) * 1e3, latest, _sick(plugin, uuid))


def _sick(plugin: Plugin, uuid: str) -> int:
    devices = plugin.ear.devices.items()
    return sum(health == "Unhealthy" for name, health in devices if name.startswith(uuid))
