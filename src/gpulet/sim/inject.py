"""Change a running node: faults, MIG layouts, a driver upgrade. Takes effect at once, in every process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from gpulet.errors import UsageError
from gpulet.sim import devices, mig, nvmlfile, tree
from gpulet.sim.node import SimNode, load, save

GRAMMAR = (
    "'gpu N xid X', 'gpu N xid X gi G ci C', 'gpu N lost', 'gpu N found', 'gpu N recovery CODE', "
    "'nvml init fails with CODE', 'nvml init takes 2s', 'nvml init works', 'mig gpuN 3g.40gb x2', 'driver VERSION'"
)


SCRIPT = "lines 'at SECONDS CHANGE', for example 'at 2s gpu 2 xid 79'; '#' begins a comment"


def inject(folder: Path, change: str) -> None:
    """Apply one change, written as in GRAMMAR. UsageError where it says nothing that can be done to this node."""
    node = load(folder)
    check(node, change)
    act, match = _parse(change)
    act(node, match)


def check(node: SimNode, change: str) -> None:
    """UsageError where a change says nothing that can be done to this node. Changes nothing."""
    act, match = _parse(change)
    if act is _mig:
        mig.apply(node.description, match[1])
    elif change.strip().lower().startswith("gpu"):
        _number(node, match[1])


def read_script(text: str, node: SimNode) -> list[tuple[float, str]]:
    """(seconds from the start, change) of each line, in order of time. UsageError for the first line that can't be
    read or done to this node."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = re.fullmatch(r"at\s+(\d+(?:\.\d+)?)\s*(ms|s|min)?\s+(\S.*)", words, re.IGNORECASE)
        if not match:
            raise UsageError(f"script line {number} can't be read", seen=words, wanted=SCRIPT)
        try:
            check(node, match[3])
        except UsageError as error:
            raise UsageError(f"script line {number}: {error.what}", seen=error.seen, wanted=error.wanted) from error
        found.append((float(match[1]) * _SECONDS[(match[2] or "s").lower()], match[3]))
    return sorted(found, key=lambda step: step[0])


def play(folder: Path, steps: Iterable[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Apply what `read_script` gave, each change at its time from now on; gives each again when it is done."""
    start = time.monotonic()
    for seconds, change in steps:
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        inject(folder, change)
        yield seconds, change


_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}


Act = Callable[[SimNode, "re.Match[str]"], None]


def _parse(change: str) -> tuple[Act, re.Match[str]]:
    for pattern, act in _CHANGES:
        match = re.fullmatch(pattern, change.strip(), re.IGNORECASE)
        if match:
            return act, match
    raise UsageError("change can't be read", seen=change, wanted=GRAMMAR)


def _say(node: SimNode, *lines: str) -> None:
    """Append to the control file; one write, so that a reader sees whole lines."""
    with node.control.open("ab", buffering=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _number(node: SimNode, text: str) -> int:
    if int(text) >= len(node.gpus):
        raise UsageError("no such GPU", seen=f"gpu {text}", wanted=f"0 to {len(node.gpus) - 1}")
    return int(text)


def _xid(node: SimNode, match: re.Match[str]) -> None:
    instances = f" {match[3]} {match[4]}" if match[3] else ""
    _say(node, f"gpu {_number(node, match[1])} xid {match[2]}{instances}")


def _lost(node: SimNode, match: re.Match[str]) -> None:
    number, lost = _number(node, match[1]), match[2].lower() == "lost"
    gpus = [replace(gpu, lost=lost) if gpu.index == number else gpu for gpu in node.gpus]
    save(replace(node, description=replace(node.description, gpus=tuple(gpus))))
    _say(node, f"gpu {number} {'lost' if lost else 'found'}")


def _recovery(node: SimNode, match: re.Match[str]) -> None:
    _say(node, f"gpu {_number(node, match[1])} recovery {match[2]}")


def _fails(node: SimNode, match: re.Match[str]) -> None:
    _say(node, f"node fails {match[1]}")


def _takes(node: SimNode, match: re.Match[str]) -> None:
    _say(node, f"node takes {int(float(match[1]) * (1 if (match[2] or 's').lower() == 'ms' else 1000))}")


def _works(node: SimNode, match: re.Match[str]) -> None:
    _say(node, "node fails 0", "node takes 0")


def _mig(node: SimNode, match: re.Match[str]) -> None:
    changed = replace(node, description=mig.apply(node.description, match[1]))
    devices.lay_proc(changed.root, changed.description)
    devices.lay_devices(changed.root, changed.description)
    tree.lay_nvml(changed.root, changed.description, changed.control)
    save(changed)
    for before, gpu in zip(node.gpus, changed.gpus, strict=True):
        if before != gpu:
            _say(node, *(f"gpu {gpu.index} {line}" for line in nvmlfile.mig_lines(changed.description, gpu)))


def _driver(node: SimNode, match: re.Match[str]) -> None:
    changed = replace(node, description=replace(node.description, driver=match[1]))
    if changed.description.driver != node.description.driver:
        tree.remove(node.root, node.description.driver)
    tree.lay(changed.root, changed.description, changed.control)
    devices.lay_proc(changed.root, changed.description)
    save(changed)
    _say(node, f"node driver {match[1]}")


_CHANGES: tuple[tuple[str, Act], ...] = (
    (r"gpu\s*(\d+)\s+xid\s+(\d+)(?:\s+gi\s*(\d+)\s+ci\s*(\d+))?", _xid),
    (r"gpu\s*(\d+)\s+(lost|found)", _lost),
    (r"gpu\s*(\d+)\s+recovery\s+(\d+)", _recovery),
    (r"nvml\s+init\s+fails(?:\s+with)?\s+(\d+)", _fails),
    (r"nvml\s+init\s+takes\s+(\d+(?:\.\d+)?)\s*(ms|s)?", _takes),
    (r"nvml\s+init\s+works", _works),
    (r"mig\s+(\S.*)", _mig),
    (r"driver\s+(\d+\.\d+(?:\.\d+)?)", _driver),
)
