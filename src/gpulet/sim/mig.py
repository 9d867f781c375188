"""MIG layouts: "gpu0: 1g.10gb x7" and the like, and where the instances go on the GPU.

A GPU has eight memory slices; an instance begins where its profile allows and takes as many as the profile says
(nvmlDeviceGetGpuInstancePossiblePlacements). The numbers of GPU instances follow from where they begin, as seen with
the driver: 0 for the whole GPU, 1 and 2 for the halves, 3 to 6 for the quarters, 7 to 13 for the eighths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from gpulet.errors import UsageError
from gpulet.sim.description import Description, Mig, MigProfile, SimGpu, stable_uuid

_LINE = re.compile(r"(?:gpu)?\s*(\d+|all)\s*[:\s]\s*(.*)", re.IGNORECASE)
_ITEM = re.compile(r"(?:(\d)c\.)?(\d+g\.\d+gb[+\-.a-z]*?)\s*(?:[×x*]\s*(\d+))?", re.IGNORECASE)
_FIRST_GI = {8: 0, 4: 1, 2: 3, 1: 7}
MEMORY_SLICES = 8


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
    return replace(gpu, mig_enabled=True, mig=tuple(_place(description, gpu, list(_wanted(text, profiles)))))


def _wanted(text: str, profiles: dict[str, MigProfile]) -> Iterable[tuple[int, MigProfile]]:
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


def _place(description: Description, gpu: SimGpu, wanted: list[tuple[int, MigProfile]]) -> Iterable[Mig]:
    # Large ones first, whatever the order asked for, so that they find their few places free.
    order = sorted(range(len(wanted)), key=lambda at: (-wanted[at][1].size, at))
    busy: set[int] = set()
    left = {name: profile.count for name, profile in description.mig_profiles(gpu).items()}
    used_slices = 0
    room: dict[tuple[str, int], tuple[int, int, int]] = {}  # profile, slices -> gi, start, the next ci
    for slot, at in enumerate(order):
        slices, profile = wanted[at]
        gi, start, ci = room.get((profile.name, slices), (-1, 0, 0))
        if gi < 0 or (ci + 1) * slices > profile.slices:
            ci = 0
            used_slices += profile.slices
            places = (p for p in profile.starts if not busy & set(range(p, p + profile.size)))
            found = next(places, None)
            if found is None or not left[profile.name] or used_slices > 7:
                raise UsageError(f"gpu{gpu.index} has no room for MIG device {slot}", seen=profile.name)
            start = found
            gi = _FIRST_GI[profile.size] + start // profile.size
            left[profile.name] -= 1
            busy |= set(range(start, start + profile.size))
        room[(profile.name, slices)] = (gi, start, ci + 1)
        identity = stable_uuid(description.profile, gpu.index, "mig", profile.name, gi, ci, slices)
        yield Mig(slot, f"MIG-{identity}", profile.name, gi, ci, slices, start)
