"""The description that stands behind the stand-in libnvidia-ml's ELF image, and the lines of the control file.

Both have one grammar, read by nvml/node.c: "node KEY VALUE..." and "gpu NUMBER KEY VALUE...". The control file plays
over the description, so whatever changes on a running node is one more such line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpulet.sim.description import BRANDS, Description, MigProfile, SimGpu, models

MARK = b"GPULETS1"
ADDRESSING_ATS = 2  # NVML_DEVICE_ADDRESSING_MODE_ATS
FABRIC_COMPLETED = 3  # nvmlGpuFabricState: NVML_GPU_FABRIC_STATE_COMPLETED


def library(image: bytes, description: Description, control: Path) -> bytes:
    """The whole library file for one node: ELF image, description, its length, the mark."""
    text = "".join(f"{line}\n" for line in lines(description, control)).encode()
    return image + text + len(text).to_bytes(8, "little") + MARK


def lines(description: Description, control: Path) -> Iterator[str]:
    """The description as lines."""
    major, minor = (int(part) for part in description.cuda.split(".")[:2])
    yield f"node driver {description.driver}"
    yield f"node nvml {major}.{description.driver}"
    yield f"node cuda {major * 1000 + minor * 10}"
    yield f"node control {control}"
    if description.platform == "wsl":
        yield "node wsl 1"
    if description.cluster:
        yield f"node fabric {FABRIC_COMPLETED} {description.clique} {description.cluster}"
    elif description.fabricmanager:
        yield f"node fabric {FABRIC_COMPLETED} 0 00000000-0000-0000-0000-000000000000"
    for gpu in description.gpus:
        for line in gpu_lines(description, gpu):
            yield f"gpu {gpu.index} {line}"


def gpu_lines(description: Description, gpu: SimGpu) -> Iterator[str]:
    """What is to be said of one GPU, each line still without its "gpu NUMBER "."""
    major, minor = gpu.arch.split(".")
    yield f"minor {gpu.minor}"
    yield f"uuid {gpu.uuid}"
    yield f"bus {gpu.bus_id}"
    yield f"name {gpu.name}"
    yield f"brand {BRANDS[gpu.brand]}"
    yield f"arch {major} {minor}"
    yield f"memory {gpu.memory << 20}"
    if models().get(gpu.model, {}).get("coherent"):
        yield f"addressing {ADDRESSING_ATS}"
    yield f"pci {' '.join(gpu.pci)}"
    yield f"serial {gpu.serial}"
    yield "vbios 96.00.74.00.01"
    yield "levels " + " ".join(str(description.level(gpu, other)) for other in description.gpus)
    if gpu.links:
        yield "links " + " ".join(gpu.links)
    profiles = description.mig_profiles(gpu)
    for profile in profiles.values():
        yield _profile_line(profile)
    if profiles:
        yield from mig_lines(description, gpu)
    if gpu.lost:
        yield "lost"


def _profile_line(profile: MigProfile) -> str:
    numbers = (profile.kind, profile.id, profile.slices, profile.count, profile.sms, profile.copy, profile.decoders)
    more = (profile.encoders, profile.jpeg, profile.ofa, profile.size, profile.memory)
    return f"profile {' '.join(map(str, numbers + more))} MIG {profile.name}"


def mig_lines(description: Description, gpu: SimGpu) -> Iterator[str]:
    """A GPU's MIG mode and devices; said again, they take the place of what was said before."""
    profiles = description.mig_profiles(gpu)
    yield f"mode {int(gpu.mig_enabled)}"
    yield "nomig"
    for mig in gpu.mig:
        profile = profiles[mig.profile]
        numbers = (mig.gi, mig.ci, profile.kind, mig.ci_slices, mig.start, profile.size)
        caps = (gi_cap(gpu.minor, mig.gi), ci_cap(gpu.minor, mig.gi, mig.ci))
        yield f"mig {mig.slot} {mig.uuid} {' '.join(map(str, numbers + caps))}"


# The driver numbers its capability nodes in this order: config, monitor, then for each GPU fifteen GPU instances, each
# followed by its eight compute instances (/proc/driver/nvidia-caps/mig-minors).
CONFIG_CAP, MONITOR_CAP, FIRST_CAP = 1, 2, 3
GIS, CIS = 15, 8


def gi_cap(minor: int, gi: int) -> int:
    """The nvidia-caps minor of a GPU instance."""
    return FIRST_CAP + (minor * GIS + gi) * (1 + CIS)


def ci_cap(minor: int, gi: int, ci: int) -> int:
    """The nvidia-caps minor of a compute instance."""
    return gi_cap(minor, gi) + 1 + ci
