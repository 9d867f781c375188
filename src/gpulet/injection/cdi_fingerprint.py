"""What a CDI spec was made from, written into it; and whether a spec still fits the node.

The stamp is in the spec's annotations, which engines ignore. Verification doesn't rely on it alone: paths and numbers
are held against the node too, so other generators' specs can be checked as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from gpulet.errors import CdiError
from gpulet.injection import cdi_rules
from gpulet.injection.cdi_registry import device_node
from gpulet.node.devices import kernel_major
from gpulet.node.gpu import NodeFacts
from gpulet.node.procfs import read_text

PREFIX = "gpulet.io/"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def mig_layout(facts: NodeFacts) -> str:
    """The MIG devices as one word list: "0:7/0 0:8/0" (GPU index: GPU instance / compute instance)."""
    return " ".join(f"{mig.gpu}:{mig.gi}/{mig.ci}" for gpu in facts.gpus for mig in gpu.mig)


def fingerprint(facts: NodeFacts, *, gpus: bool = True) -> dict[str, str]:
    """Annotations for a spec: driver, boot, MIG layout, GPUs and the majors that a reboot may change. gpus: whether the
    spec is for GPUs and holds driver files; for others the boot and the majors are told alone.
    """
    majors = " ".join(f"{name}={number}" for name, number in facts.majors if number != 195)
    said = {
        "driver": facts.driver if gpus else "",
        "boot-id": (read_text(_BOOT_ID) or "").strip(),
        "mig": mig_layout(facts) if gpus else "",
        "gpus": " ".join(gpu.uuid or gpu.bus_id or gpu.name for gpu in facts.gpus) if gpus else "",
        "majors": majors,
    }
    return {PREFIX + name: value for name, value in said.items() if value}


def _stamp(spec: Mapping[str, Any], facts: NodeFacts) -> Iterator[str]:
    """Differences between the spec's stamp and the node. The boot id alone is no reason: majors may be the same."""
    made = spec.get("annotations") or {}
    if PREFIX + "gpus" not in made:
        return
    now = fingerprint(facts)
    for name in ("driver", "mig", "gpus"):
        before, after = made.get(PREFIX + name, ""), now.get(PREFIX + name, "")
        if before != after:
            yield f"made for {name} {before or 'none'!r}, the node has {after or 'none'!r}"


def _numbers(edits: Mapping[str, Any], facts: NodeFacts | None) -> Iterator[str]:
    """Device nodes whose numbers in the spec aren't those of the node on disk, or there not those of the kernel."""
    for node in edits.get("deviceNodes") or ():
        host = node.get("hostPath") or node["path"]
        try:
            real = device_node({"path": node["path"], "hostPath": host}, "")
        except CdiError as error:
            yield f"device node {host}: {error.seen}"
            continue
        said = node.get("major") or 0
        if said and (said, node.get("minor") or 0) != (real.major, real.minor):
            yield f"device node {host} is {real.major}:{real.minor}, the spec says {said}:{node.get('minor') or 0}"
        now = kernel_major(facts, node["path"]) if facts else -1
        if now >= 0 and now != real.major:
            yield f"device node {host} is {real.major}:{real.minor}, its driver has major {now} since this boot"


def _paths(edits: Mapping[str, Any]) -> Iterator[str]:
    for mount in edits.get("mounts") or ():
        if mount["hostPath"].startswith("/") and not os.path.lexists(mount["hostPath"]):
            yield f"mount of {mount['hostPath']}: no such file"
    for hook in edits.get("hooks") or ():
        if not os.access(hook["path"], os.X_OK):
            yield f"hook {hook['path']}: not there or not executable"


def problems(spec: Mapping[str, Any], facts: NodeFacts | None = None) -> list[str]:
    """Why the spec doesn't fit the node any more, one line each, none where it does. facts: what the node is now."""
    found = list(_stamp(spec, facts)) if facts is not None else []
    for edits in cdi_rules.all_edits(spec):
        found += [*_numbers(edits, facts), *_paths(edits)]
    return list(dict.fromkeys(found))
