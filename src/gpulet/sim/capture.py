"""Write down what a node is, so that the same node can be laid out elsewhere: a bug report becomes a test."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from gpulet import codec
from gpulet.errors import GpuletError, NodeError
from gpulet.node import nvml, platform, procfs
from gpulet.node.gpu import Gpu, MigDevice, NodeFacts
from gpulet.sim import description as describe
from gpulet.sim.description import LEVELS, Description, Mig, SimGpu, stable_uuid
from gpulet.sim.node import load


def capture(root: Path, file: Path, *, redact: bool = True) -> Description:
    """Write the description of the node under `root` ("/" for this machine) to `file`.

    redact: put made-up UUIDs and serial numbers in the place of the real ones. NodeError where nothing is to be seen.
    """
    if (root.absolute().parent / "node.yaml").exists():
        found = load(root.absolute().parent).description
    else:
        found = from_facts(_facts(str(root)), root)
    if redact:
        found = redacted(found)
    try:
        _write(file, describe.to_yaml(found).encode())
    except OSError as error:
        raise NodeError(f"{file} can't be written", seen=error.strerror) from error
    return found


def _write(file: Path, data: bytes) -> None:
    """Aside and renamed, so that what was there is there still where the disk is full. What is no file but a pipe or a
    device takes it as it is. Raises OSError."""
    if file.exists() and not file.is_file():
        file.write_bytes(data)
    else:
        codec.put(os.path.realpath(file), data)


def _facts(root: str) -> NodeFacts:
    """NVML knows most; without it, /proc still names the GPUs."""
    try:
        return nvml.facts(root)
    except GpuletError:
        facts = procfs.facts(root)
        if not facts.gpus:
            raise
        return facts


def from_facts(facts: NodeFacts, root: Path) -> Description:
    """The description of a node of which `facts` were found."""
    by_name = {kind["name"]: model for model, kind in describe.models().items()}
    lost = _lost(facts, root)
    gpus = [_gpu(gpu, by_name.get(gpu.name, ""), facts, root) for gpu in (*facts.gpus, *lost)]
    gpus = [replace(gpu, lost=True) if gpu.uuid in {one.uuid for one in lost} else gpu for gpu in gpus]
    return Description(
        profile="captured",
        driver=facts.driver,
        cuda=facts.cuda or "12.0",
        platform="wsl" if platform.detect(str(root)).kind == "wsl" else "discrete",
        gpus=_numbered(sorted(gpus, key=lambda gpu: gpu.index)),
        imex=facts.imex,
        fabricmanager=(root / "run/nvidia-fabricmanager/socket").exists(),
        nvswitches=sum(bool(_SWITCH.fullmatch(node.path)) for node in facts.nodes),
        majors={name: major for name, major in facts.majors if major != 195},
    )


def _lost(facts: NodeFacts, root: Path) -> list[Gpu]:
    """The GPUs that NVML can't be asked about any more, as far as /proc still names them."""
    gone = {one.index for one in facts.lost}
    return [gpu for gpu in procfs.facts(str(root)).gpus if gpu.index in gone] if gone else []


def _numbered(gpus: list[SimGpu]) -> tuple[SimGpu, ...]:
    """The same with indices from 0 on. Where one is missing, the numbers that links and levels are by don't hold."""
    if [gpu.index for gpu in gpus] == list(range(len(gpus))):
        return tuple(gpus)
    return tuple(replace(gpu, index=index, links=(), levels=()) for index, gpu in enumerate(gpus))


def _gpu(gpu: Gpu, model: str, facts: NodeFacts, root: Path) -> SimGpu:
    kind = describe.models().get(model, {})
    return SimGpu(
        index=gpu.index,
        minor=gpu.minor,
        uuid=gpu.uuid,
        bus_id=gpu.bus_id.lower(),
        model=model,
        name=gpu.name,
        brand=gpu.brand.lower() if gpu.brand.lower() in describe.BRANDS else "nvidia",
        arch=gpu.arch or kind.get("arch", "0.0"),
        memory=(gpu.memory >> 20) or kind.get("memory", 0),
        pci=_pci(gpu.bus_id.lower(), root) or tuple(kind.get("pci", ("00000000", "00000000"))),
        serial=gpu.serial,
        numa=gpu.numa,
        links=_links(gpu, facts),
        mig_enabled=gpu.mig_enabled and bool(kind.get("mig")),
        mig=tuple(filter(None, (_mig(one, kind.get("mig", {})) for one in gpu.mig))),
        levels=_levels(gpu, facts),
    )


def _pci(bus_id: str, root: Path) -> tuple[str, str] | None:
    """Device and subsystem id as NVML writes them, from sysfs."""
    folder = root / "sys/bus/pci/devices" / bus_id[4:]
    try:
        words = [(folder / name).read_text().strip().removeprefix("0x") for name in _PCI_FILES]
    except OSError:
        return None
    return f"{words[0]}{words[1]}", f"{words[2]}{words[3]}"


_PCI_FILES = ("device", "vendor", "subsystem_device", "subsystem_vendor")
_SWITCH = re.compile(r"/dev/nvidia-nvswitch\d+")


def _links(gpu: Gpu, facts: NodeFacts) -> tuple[str, ...]:
    """Which GPU each NVLink leads to. As many to each of several others as to all of them: that is a switch's work."""
    counts = {link.peer: link.nvlinks for link in gpu.links if link.nvlinks}
    others = len(facts.gpus) - 1
    if others > 1 and len(counts) == others and len(set(counts.values())) == 1 and max(counts.values()) * others > 18:
        return ("s",) * max(counts.values())
    return tuple(str(peer) for peer, count in sorted(counts.items()) for _ in range(count))


def _levels(gpu: Gpu, facts: NodeFacts) -> tuple[int, ...]:
    seen = {link.peer: LEVELS[link.level] for link in gpu.links if link.level}
    if not seen:
        return ()
    return tuple(seen.get(index, LEVELS["system"]) for index in range(len(facts.gpus) + len(facts.lost)))


def _mig(one: MigDevice, kinds: dict[str, dict[str, int]]) -> Mig | None:
    head, _, rest = one.profile.partition(".")
    name = rest if head.endswith("c") else one.profile
    if name not in kinds:
        return None
    slices = int(head[:-1]) if head.endswith("c") else int(kinds[name]["slices"])
    return Mig(one.slot, one.uuid, name, one.gi, one.ci, slices, one.placement[0])


def redacted(description: Description) -> Description:
    """The same node with made-up identities."""
    gpus = tuple(
        replace(
            gpu,
            uuid=f"GPU-{stable_uuid('redacted', gpu.index)}",
            serial=f"{gpu.index:013d}",
            mig=tuple(
                replace(mig, uuid=f"MIG-{stable_uuid('redacted', gpu.index, mig.gi, mig.ci)}") for mig in gpu.mig
            ),
        )
        for gpu in description.gpus
    )
    cluster = stable_uuid("redacted", "cluster") if description.cluster else ""
    return replace(description, gpus=gpus, cluster=cluster)
