"""The device plugin over its real socket: start, device list, Allocate, GetPreferredAllocation, memory; with 8 GPUs and
with 1,000 replicas of each.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from bench.measure import Say, alternate, percentile, spread, timed
from bench.peers import Peers
from bench.plugins import Plugin, makers
from bench.site import Site
from bench.table import Goal, Table
from gpulet.plugin.api import deviceplugin_pb2 as pb

ROUNDS = 500
STARTS = 5
REPLICAS = (1, 1000)
ASKED = 2
COLUMNS = ("plugin", "devices", "what", "p50", "p99", "least", "of the peer's")


def run(peers: Peers, rounds: int, say: Say) -> list[Table]:
    """The table of the plugin's answers. Rounds: calls of each kind; 500 unless told."""
    made = Table("rpc", f"the device plugin: {rounds} calls in turns, {STARTS} starts; ms and MiB", COLUMNS)
    if not peers.device_plugin:
        made.notes.append("no peer: PEER_DEVICE_PLUGIN names one")
    with Site() as site:
        every = makers(peers, site.node, site.folder)
        seen: dict[tuple[str, int, str], list[float]] = defaultdict(list)
        for replicas in REPLICAS:
            for number in range(STARTS):
                say(f"{8 * replicas} devices, start {number + 1} of {STARTS}")
                for make in every.values():
                    with make(replicas) as plugin:
                        _note_start(plugin, replicas, seen)
        with ExitStack() as stack:  # all at once and in turns, so that few devices and many have the same moments
            plugins = {
                (name, replicas): stack.enter_context(make(replicas))
                for replicas in REPLICAS
                for name, make in every.items()
            }
            for what in ("Allocate", "GetPreferredAllocation"):
                calls = {f"{name} {replicas}": _call(one, what) for (name, replicas), one in plugins.items()}
                taken = alternate(calls, rounds if what == "Allocate" else max(1, rounds // 10))
                for name, replicas in plugins:
                    seen[f"{what} {ASKED}", replicas, name] = taken[f"{name} {replicas}"]
            for (name, replicas), plugin in plugins.items():
                seen["resident MiB after the calls", replicas, name] = [plugin.resident()]
    _rows(made, seen)
    made.goals += goals(made)
    return [made]


def _note_start(plugin: Plugin, replicas: int, seen: dict[tuple[str, int, str], list[float]]) -> None:
    ear = plugin.ear
    seen["start to registration", replicas, plugin.name].append((ear.registered - plugin.began) * 1e3)
    seen["device list, from the question", replicas, plugin.name].append((ear.listed - ear.asked) * 1e3)
    seen["resident MiB after the start", replicas, plugin.name].append(plugin.resident())


def _call(plugin: Plugin, what: str) -> Any:
    ids = sorted(plugin.ear.devices)
    request: Any
    if what == "Allocate":
        # replicas of different GPUs: a thousand replicas of one stand together in the order of ids
        chosen = ids[:: max(1, len(ids) // 8)][:ASKED]
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=chosen)])
    else:
        one = pb.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=ASKED)
        request = pb.PreferredAllocationRequest(container_requests=[one])
    method = getattr(plugin.ear.stub, what)
    return lambda: timed(lambda: method(request, timeout=60))


def _rows(made: Table, seen: dict[tuple[str, int, str], list[float]]) -> None:
    for (what, replicas, name), values in sorted(seen.items(), key=lambda item: item[0][1]):
        middle = spread(values).median
        rival = seen.get((what, replicas, "peer")) if name == "gpulet" else None
        ratio = middle / spread(rival).median if rival else None
        made.add(name, 8 * replicas, what, middle, percentile(values, 99), min(values), ratio)


def goals(made: Table) -> list[Goal]:
    """The project's own limits, against what came out."""

    def seen(what: str, devices: int, column: str) -> float | None:
        for row in made.rows:
            if (row["plugin"], row["what"], row["devices"]) == ("gpulet", what, devices):
                value = row[column]
                return float(value) if value is not None else None
        return None

    few, many = seen("Allocate 2", 8, "p50"), seen("Allocate 2", 8000, "p50")
    return [
        Goal("Allocate with 8 devices, of the peer's,", 1.2, seen("Allocate 2", 8, "of the peer's")),
        Goal("Allocate with 8,000 devices, of that with 8,", 1.2, many / few if few and many else None),
        Goal("ms to a list of 8,000", 100.0, seen("device list, from the question", 8000, "p50")),
        Goal("MiB resident, 8 devices", 45.6, seen("resident MiB after the calls", 8, "p50")),
        Goal("ms from the start to the registration", 500.0, seen("start to registration", 8, "p50")),
    ]
