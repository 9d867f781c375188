"""From the node's facts to the resources that the kubelet is offered: pure.

A GPU whose MIG layout a strategy can't express is left out with a reason; the others are offered all the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property

from gpulet.node.gpu import Gpu, MigDevice, NodeFacts
from gpulet.plugin.config import Config
from gpulet.plugin.sharing import PREFIX, Pattern, replicate

DISPLAY_ONLY = ("DGX Display", "NVIDIA DGX Display")  # a workstation's own display adapter, no compute device


@dataclass(frozen=True, slots=True)
class Device:
    """One device offered to the kubelet.

    id: what the kubelet is told; base: the GPU's or MIG device's UUID; index: "3", or "3:0" (GPU, MIG slot);
    gpu, gpu_uuid: the physical GPU; gi, ci: MIG instance ids, -1 for a whole GPU; paths: device nodes; memory in
    bytes; replicas: how many share the base, 0 where it isn't shared.
    """

    id: str
    base: str
    index: str
    gpu: int
    gpu_uuid: str
    paths: tuple[str, ...] = ()
    numa: int = -1
    memory: int = 0
    arch: str = ""
    gi: int = -1
    ci: int = -1
    replicas: int = 0

    @property
    def mig(self) -> bool:
        """Whether this is a MIG device."""
        return ":" in self.index

    def replica(self, number: int, replicas: int) -> Device:
        """The same device under a replica's id."""
        return replace(self, id=f"{self.base}::{number}", replicas=replicas)


@dataclass(frozen=True)
class Resource:
    """A resource and its devices, in the node's order."""

    name: str
    devices: tuple[Device, ...]

    @cached_property
    def by_id(self) -> dict[str, Device]:
        """The devices by advertised id."""
        return {device.id: device for device in self.devices}

    @property
    def endpoint(self) -> str:
        """The name of this resource's socket in the kubelet's folder."""
        return f"nvidia-{self.name.partition('/')[2]}.sock"


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is offered, and what was left out and why."""

    resources: tuple[Resource, ...]
    problems: tuple[str, ...] = ()


def inventory(facts: NodeFacts, config: Config) -> Inventory:
    """The resources that this node offers under this configuration. Raises ConfigError where sharing can't be met."""
    found: dict[str, list[Device]] = {}
    problems: list[str] = [f"GPU {lost.index} {lost.uuid} {lost.bus_id}: {lost.reason}" for lost in facts.lost]
    gpus = [gpu for gpu in facts.gpus if gpu.name not in DISPLAY_ONLY]
    single = _single_profile(gpus) if config.mig_strategy == "single" else ""
    for gpu in gpus:
        if not (gpu.mig_enabled and config.mig_strategy != "none"):
            _offer(found, _named(gpu.name, config.gpu_patterns, "gpu"), _whole(gpu))
            continue
        if not gpu.mig:
            problems.append(f"GPU {gpu.index} {gpu.uuid} is in MIG mode and has no MIG devices configured")
        for mig in gpu.mig:
            name, problem = _mig_resource(mig, config, single)
            if problem:
                problems.append(f"MIG device {mig.uuid} of GPU {gpu.index}: {problem}")
            else:
                _offer(found, name, _slice(gpu, mig))
    if config.mig_strategy == "single" and single:
        problems += _without_whole(found, gpus)
    if config.mps_active and any(device.mig for devices in found.values() for device in devices):
        problems.append("sharing using MPS is not supported for MIG devices: they are left out")
        found = {name: kept for name, devices in found.items() if (kept := [d for d in devices if not d.mig])}
    if config.sharing is not None:
        found = replicate(found, config.sharing)
    return Inventory(tuple(Resource(name, tuple(found[name])) for name in sorted(found)), tuple(problems))


def _offer(found: dict[str, list[Device]], name: str, device: Device) -> None:
    found.setdefault(name, []).append(device)


def _whole(gpu: Gpu) -> Device:
    return Device(gpu.uuid, gpu.uuid, str(gpu.index), gpu.index, gpu.uuid, (f"/dev/nvidia{gpu.minor}",),
                  gpu.numa, gpu.memory, gpu.arch)  # fmt: skip


def _slice(gpu: Gpu, mig: MigDevice) -> Device:
    caps = tuple(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (mig.gi_minor, mig.ci_minor) if minor >= 0)
    return Device(mig.uuid, mig.uuid, f"{gpu.index}:{mig.slot}", gpu.index, gpu.uuid,
                  (f"/dev/nvidia{gpu.minor}", *caps), gpu.numa, mig.memory, gpu.arch, mig.gi, mig.ci)  # fmt: skip


def _named(text: str, patterns: tuple[Pattern, ...], default: str) -> str:
    return next((row.name for row in patterns if row.matches(text)), PREFIX + default)


def _mig_resource(mig: MigDevice, config: Config, single: str) -> tuple[str, str]:
    """(resource, why it can't be offered)."""
    if config.mig_strategy == "single":
        if mig.profile != single:
            return "", f"profile {mig.profile} beside {single}; more than one MIG device type present on node"
        return _named(mig.profile, config.mig_patterns, "gpu"), ""
    if config.mig_strategy == "mixed" and "c." in mig.profile:
        return "", f"profile {mig.profile} is only part of a GPU instance; strategy as-is offers it"
    return _named(mig.profile, config.mig_patterns, f"mig-{mig.profile.replace('+', '.').replace(',', '.')}"), ""


def _single_profile(gpus: list[Gpu]) -> str:
    """The profile that strategy single offers: the one with the most devices, the first by name among equals."""
    profiles = [mig.profile for gpu in gpus if gpu.mig_enabled for mig in gpu.mig]
    return min(set(profiles), key=lambda profile: (-profiles.count(profile), profile), default="")


def _without_whole(found: dict[str, list[Device]], gpus: list[Gpu]) -> list[str]:
    """Take the whole GPUs out beside MIG devices: under one name a Pod couldn't tell which of the two it gets."""
    for name in list(found):
        found[name] = [device for device in found[name] if device.mig]
        if not found[name]:
            del found[name]
    return [
        f"GPU {gpu.index} {gpu.uuid} is not in MIG mode; all devices on the node must be configured with the same "
        "migEnabled value under strategy single"
        for gpu in gpus
        if not gpu.mig_enabled
    ]


CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


def control_nodes(dev_root: str) -> tuple[str, ...]:
    """The nodes every container with a GPU needs, as far as they are beneath `dev_root`."""
    return tuple(path for path in CONTROL_NODES if os.path.exists(dev_root.rstrip("/") + path))
