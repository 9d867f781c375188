"""MIG devices of one GPU through NVML, and the names of their profiles (NVIDIA MIG user guide)."""

from __future__ import annotations

from math import ceil, floor
from typing import Any

import pynvml

from gpulet.node.gpu import Gpu, MigDevice
from gpulet.node.nvml_ask import ask, text
from gpulet.node.nvml_errors import ABOUT_THE_QUESTION
from gpulet.node.procfs import CapMinors

# An empty slot (there may be holes), one whose device went while it was asked, or one that we may not ask. Another
# error is of the whole GPU: its devices are there all the same.
_EMPTY = ABOUT_THE_QUESTION | {pynvml.NVML_ERROR_NOT_FOUND}


def profile_name(compute_slices: int, gpu_slices: int, memory: int, total: int, suffix: str = "") -> str:
    """ "1g.10gb", or "1c.2g.20gb" where the compute instance has fewer slices than the GPU instance.

    memory and total in bytes. The gigabytes are the GPU's, rounded up, times the memory share in eighths; a half is
    rounded up, as the driver does.
    """
    eighths = ceil(8 * memory / total) if total else 0
    gigabytes = floor(eighths / 8 * ceil(total / 2**30) + 0.5)
    compute = "" if compute_slices == gpu_slices else f"{compute_slices}c."
    return f"{compute}{gpu_slices}g.{gigabytes}gb{suffix}"


def _profile(gpu: Gpu, handle: Any) -> tuple[str, int]:
    """(profile or "", memory in bytes). The driver writes the profile at the end of the device's name; older don't."""
    attributes = ask(None, pynvml.nvmlDeviceGetAttributes_v2, handle)
    if attributes is None:
        return "", 0
    memory = int(attributes.memorySizeMB) * 2**20
    _, said, profile = text(ask("", pynvml.nvmlDeviceGetName, handle)).rpartition(" MIG ")
    if said and "g." in profile:
        return profile, memory
    if not gpu.memory:  # the share of an unknown whole
        return "", memory
    slices = int(attributes.computeInstanceSliceCount), int(attributes.gpuInstanceSliceCount)
    return profile_name(*slices, memory, gpu.memory), memory


def _placement(parent: Any, gi: int) -> tuple[int, int]:
    try:
        info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(parent, gi))
    except pynvml.NVMLError:  # asking needs root on some drivers
        return 0, 0
    return int(info.placement.start), int(info.placement.size)


def _in_slot(gpu: Gpu, handle: Any, slot: int, minors: CapMinors) -> MigDevice:
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
    uuid = text(pynvml.nvmlDeviceGetUUID(mig))
    gi = int(pynvml.nvmlDeviceGetGpuInstanceId(mig))
    ci = int(pynvml.nvmlDeviceGetComputeInstanceId(mig))
    profile, memory = _profile(gpu, mig)
    return MigDevice(
        uuid,
        gpu.index,
        gpu.minor,
        slot,
        gi,
        ci,
        profile=profile,
        memory=memory,
        placement=_placement(handle, gi),
        gi_minor=minors.access(gpu.minor, f"gi{gi}"),
        ci_minor=minors.access(gpu.minor, f"gi{gi}/ci{ci}"),
    )


def mig_devices(gpu: Gpu, handle: Any, minors: CapMinors) -> tuple[MigDevice, ...]:
    """The MIG devices of a GPU in the order of their slots. One that can't be named is left out. Raises NVMLError where
    the GPU doesn't answer."""
    found = []
    for slot in range(ask(0, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
        try:
            found.append(_in_slot(gpu, handle, slot, minors))
        except pynvml.NVMLError as error:
            if error.value not in _EMPTY:
                raise
    return tuple(found)
