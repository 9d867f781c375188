"""MIG layouts: "gpu0: 1g.10gb x7" and the like, and where the instances go on the GPU.

A GPU's memory slices are eight (twelve on RTX PRO 6000); an instance begins where its profile allows and takes as many
as the profile says (nvmlDeviceGetGpuInstancePossiblePlacements). The numbers of GPU instances follow from where they
begin, as seen with the driver: 0 for the whole GPU, 1 and 2 for the halves, 3 to 6 for the quarters, 7 to 13 for the
eighths. Media engines are shared out too: a profile with "+me.all" leaves none to the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gpulet.errors import UsageError
from gpulet.sim.description import Description, Mig, MigProfile, SimGpu, stable_uuid

_LINE = re.compile(r"(?:gpu)?\s*(\d+|all)\s*[:\s]\s*(.*)", re.IGNORECASE)
_ITEM = re.compile(r"(?:(\d)c\.)?(\d+g\.\d+gb[+\-.a-z]*?)\s*(?:[×x*]\s*(\d+))?", re.IGNORECASE)


def apply(description: Description, line: str) -> Description:
    """The node with one GPU's (or "all" GPUs') MIG layout changed: "gpu0: 3g.40gb x2", "0: 1c.3g.40gb x3, 4g.40gb",
    "gpu0: off" for MIG switched off, "gpu0:" for MIG switched on with nothing in it. UsageError where it can't be.
    """
    match = _LINE.fullmatch(line.strip())
    if not match:
        raise UsageError("MIG layout can't be read", seen=line, wanted="for example 'gpu0: 1g.10gb x7'")
    numbers = [gpu.index for gpu in description.gpus] if match[1].lower() == "all" else [int(match[1])]
    gpus = list(description.gpus)
    for number in numbers:
        if number >= len(gpus):
            raise UsageError(
                "MIG layout names a GPU that isn't there", seen=f"gpu{number}", wanted=f"0 to {len(gpus) - 1}"
            )
        gpus[number] = _partition(description, gpus[number], match[2].strip())
    return replace(description, gpus=tuple(gpus))


def _partition(description: Description, gpu: SimGpu, text: str) -> SimGpu:
    if text.lower() == "off":
        return replace(gpu, mig_enabled=False, mig=())
    profiles = description.mig_profiles(gpu)
    if not profiles:
        raise UsageError(f"gpu{gpu.index} can't do MIG", seen=gpu.name, wanted="for example an A100, H100 or B200")
    instances = _instances(_wanted(text, profiles))
    starts = _place([profile for profile, _ in instances])
    if starts is None or _too_many([profile for profile, _ in instances], _whole(profiles)):
        raise UsageError(
            f"this MIG layout doesn't fit on gpu{gpu.index}", seen=text, wanted="a layout that its driver takes"
        )
    return replace(gpu, mig_enabled=True, mig=tuple(_devices(description, gpu, instances, starts)))


def _wanted(text: str, profiles: dict[str, MigProfile]) -> Iterator[tuple[int, MigProfile]]:
    """The compute instances asked for: their slices and the profile of the GPU instance around them."""
    for part in filter(None, (part.strip() for part in re.split(r"[,;]", text))):
        match = _ITEM.fullmatch(part)
        profile = profiles.get(match[2].lower()) if match else None
        if not match or profile is None:
            raise UsageError("unknown MIG profile", seen=part, wanted=f"one of {', '.join(profiles)}")
        slices = int(match[1] or profile.slices)
        if slices > profile.slices:
            raise UsageError(
                "compute instance larger than its GPU instance", seen=part, wanted=f"at most {profile.slices}c"
            )
        for _ in range(int(match[3] or 1)):
            yield slices, profile


Instance = tuple[MigProfile, list[int]]  # a GPU instance and the slices of each compute instance in it


def _instances(wanted: Iterable[tuple[int, MigProfile]]) -> list[Instance]:
    """Compute instances share a GPU instance of their profile while it has room; large GPU instances come first."""
    made: list[Instance] = []
    for slices, profile in wanted:
        room = (inside for one, inside in made if one == profile and sum(inside) + slices <= profile.slices)
        inside = next(room, None)
        if inside is None:
            made.append((profile, [slices]))
        else:
            inside.append(slices)
    return sorted(made, key=lambda instance: -instance[0].size)


def _place(profiles: Sequence[MigProfile], busy: frozenset[int] = frozenset()) -> list[int] | None:
    """Where each GPU instance begins, the first way that fits; None where there is none."""
    if not profiles:
        return []
    for start in profiles[0].starts:
        taken = frozenset(range(start, start + profiles[0].size))
        if taken & busy:
            continue
        others = _place(profiles[1:], busy | taken)
        if others is not None:
            return [start, *others]
    return None


def _whole(profiles: dict[str, MigProfile]) -> MigProfile:
    """The profile that takes the GPU whole: it has every slice and every engine that there is."""
    return max(profiles.values(), key=lambda profile: (profile.slices, profile.size))


def _too_many(profiles: Sequence[MigProfile], whole: MigProfile) -> bool:
    """Whether they need more slices or engines than the GPU has, or are more of a kind than the driver allows."""
    counts = Counter(profile.name for profile in profiles)
    if any(counts[profile.name] > profile.count for profile in profiles):
        return True
    shared = ("slices", "decoders", "encoders", "jpeg", "ofa")
    return any(sum(getattr(profile, what) for profile in profiles) > getattr(whole, what) for what in shared)


def _devices(
    description: Description, gpu: SimGpu, instances: Sequence[Instance], starts: Sequence[int]
) -> Iterator[Mig]:
    slot, memory_slices = 0, _whole(description.mig_profiles(gpu)).size
    for (profile, inside), start in zip(instances, starts, strict=True):
        gi = memory_slices // profile.size - 1 + start // profile.size
        for ci, slices in enumerate(inside):
            identity = stable_uuid(description.profile, gpu.index, "mig", profile.name, gi, ci, slices)
            yield Mig(slot, f"MIG-{identity}", profile.name, gi, ci, slices, start)
            slot += 1
