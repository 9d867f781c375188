"""Whether a container saw what it was to see.

Two things are kept apart on purpose. What a container *is to see* comes from the request's rules (`request/decide.py`)
applied to the bundle that the engine wrote, or from the engine's own edits; what it *saw* comes from the probe that
runs inside. A container is right when the two are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpulet import settings as settings_file
from gpulet.injection.select import select
from gpulet.node.gpu import NodeFacts
from gpulet.request import decide, policy
from gpulet.request.bundle import Container
from gpulet.request.model import Request
from gpulet.sim.engine import RunningContainer

LIBRARY_NEEDS = "utility"  # libnvidia-ml comes with this driver capability


@dataclass(frozen=True)
class Due:
    """What a container is to see. nvml: UUIDs that NVML is to list; minors: of the /dev/nvidiaN that are to open."""

    nvml: frozenset[str] = frozenset()
    minors: frozenset[int] = frozenset()


def request_of(container: RunningContainer) -> Request:
    """What the rules say of a bundle as the engine wrote it."""
    settings = settings_file.load(str(container.handler.config))
    seen = Container.from_config(container.before, str(container.bundle))
    ledger = policy.read_ledger(settings.policy_checkpoint) if decide.needs_ledger(seen, settings) else None
    return decide.decide(seen, settings, ledger).request


def due(
    facts: NodeFacts, ids: Iterable[str], *, capabilities: Sequence[str] = ("all",), privileged: bool = False
) -> Due:
    """What the devices that `ids` name bring. A privileged container has every node of the machine besides."""
    wanted = tuple(ids)
    chosen = select(facts, wanted)
    parents = {gpu.index: gpu for gpu in facts.gpus}
    gpus = [*chosen.gpus, *(parents[mig.gpu] for mig in chosen.migs)]
    if privileged:
        gpus = list(facts.gpus)
    has_library = bool(wanted) and ({LIBRARY_NEEDS, "all"} & set(capabilities))
    listed = {gpu.uuid for gpu in gpus} | {mig.uuid for mig in chosen.migs}
    return Due(frozenset(listed if has_library else ()), frozenset(gpu.minor for gpu in gpus))


def verdict(facts: NodeFacts, due: Due, probe: dict[str, Any]) -> list[str]:
    """What the probe saw otherwise than was due; nothing where the container is right."""
    names = [device.removeprefix("/dev/nvidia") for device in probe["devices"]]
    checks: dict[str, tuple[set[Any], set[Any]]] = {
        "NVML's GPUs": ({one["uuid"] for one in probe["nvml"]}, set(due.nvml)),
        "GPU nodes": ({int(name) for name in names if name.isdigit()}, set(due.minors)),
        "GPUs that open": (set(probe["opened"]), set(due.minors)),
        "GPUs refused": (set(probe["denied"]), {gpu.minor for gpu in facts.gpus} - due.minors),
    }
    return [
        f"{what}: {sorted(got)} (wanted {sorted(wanted)}; NVML says: {probe['nvml_error'] or 'nothing wrong'})"
        for what, (got, wanted) in checks.items()
        if got != wanted
    ]
