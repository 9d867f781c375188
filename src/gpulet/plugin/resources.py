"""From the node's facts to the resources that the kubelet is offered: pure.

A GPU whose MIG layout a strategy can't express is left out with a reason; the others are offered all the same.
"""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from gpulet.node.gpu import Gpu, Lost, MigDevice, NodeFacts
from gpulet.plugin.config import Config
from gpulet.plugin.sharing import PREFIX, Pattern, replicate

TEGRA = "tegra"  # the id of a Tegra's own GPU, which has no UUID
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
    """What is offered, and what was left out and why. layouts: those of the problems that are a GPU's MIG layout's."""

    resources: tuple[Resource, ...]
    problems: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()


def inventory(facts: NodeFacts, config: Config) -> Inventory:
    """The resources that this node offers under this configuration. Raises ConfigError where sharing can't be met."""
    found: dict[str, list[Device]] = {}
    problems: list[str] = [f"{lost.name}: {lost.reason}" for lost in facts.lost]
    gpus = [gpu for gpu in facts.gpus if gpu.name not in DISPLAY_ONLY and wanted(gpu, config.device_filter)]
    left_out = _inexpressible(gpus) if config.mig_strategy == "single" else {}
    layouts = list(left_out.values())
    for gpu in gpus:
        if gpu.index in left_out:
            continue
        if not gpu.mig_enabled or config.mig_strategy == "none":
            _offer(found, _named(gpu.name, config.gpu_patterns, "gpu"), _whole(gpu, facts.source))
        elif not gpu.mig:
            layouts.append(f"GPU {gpu.index} {gpu.uuid} is in MIG mode and has no MIG devices configured")
        for mig in gpu.mig if config.mig_strategy != "none" else ():
            if not mig.profile:
                layouts.append(f"MIG device {mig.uuid} of GPU {gpu.index}: NVML doesn't tell its profile; run "
                               "privileged or with NVIDIA_MIG_MONITOR_DEVICES=all")  # fmt: skip
            elif config.mig_strategy == "mixed" and "c." in mig.profile:
                layouts.append(f"MIG device {mig.uuid} of GPU {gpu.index}: profile {mig.profile} is only part of a "
                               "GPU instance; strategy as-is offers it")  # fmt: skip
            else:
                _offer(found, _mig_name(mig, config), _slice(gpu, mig))
    problems += layouts
    problems += _matching_nothing(config.gpu_patterns, {gpu.name for gpu in gpus}, found)
    if config.mig_strategy != "none":
        profiles = {mig.profile for gpu in gpus for mig in gpu.mig if mig.profile}
        problems += _matching_nothing(config.mig_patterns, profiles, found)
    if config.mps_active and any(device.mig for devices in found.values() for device in devices):
        problems.append("sharing using MPS is not supported for MIG devices: they are left out")
        found = {name: kept for name, devices in found.items() if (kept := [d for d in devices if not d.mig])}
    if config.sharing is not None:
        away = [*facts.lost, *(Lost(index, reason) for index, reason in left_out.items())]
        found, missing = replicate(found, config.sharing, partial(_absent, away))
        problems += missing
    resources = tuple(Resource(name, tuple(found[name])) for name in sorted(found))
    return Inventory(resources, tuple(problems), tuple(layouts))


def _absent(away: Sequence[Lost], ref: str) -> str:
    """Why a device by this index or UUID isn't offered, "" where none of those that are away can be it. "*": why there
    may be fewer devices than somebody counted."""
    for gpu in away:
        if ref in ("*", gpu.uuid) or ref.partition(":")[0] == str(gpu.index):
            return f"{gpu.name}: {gpu.reason}"
    if away and ref.startswith(("GPU-", "MIG-")):  # one that is lost can't be asked for its UUIDs
        return f"it may be, or be on, {away[0].name}: {away[0].reason}"
    return ""


def _offer(found: dict[str, list[Device]], name: str, device: Device) -> None:
    found.setdefault(name, []).append(device)


def wanted(gpu: Gpu, filters: tuple[str, ...]) -> bool:
    """Whether a GPU passes: no "!" filter that matches, and one of the others where there are any."""

    def matches(item: str) -> bool:
        key, _, value = item.removeprefix("!").partition("=")
        pci = value.lower() if len(value) > 12 else f"0000{value.lower()}"  # a bus id may leave half its domain out
        seen = {"uuid": gpu.uuid == value, "index": str(gpu.index) == value, "pci": gpu.bus_id == pci}
        return seen.get(key, Pattern(value, "").matches(gpu.name))

    only = [item for item in filters if not item.startswith("!")]
    without = [item for item in filters if item.startswith("!")]
    return not any(map(matches, without)) and (not only or any(map(matches, only)))


def _whole(gpu: Gpu, source: str) -> Device:
    if source == "wsl":  # one device stands for all GPUs: they can't be told apart inside a container
        return Device("all", "all", "all", 0, "all", ("/dev/dxg",))
    if source == "tegra":
        return Device(TEGRA, TEGRA, "0", 0, TEGRA, arch="0.0")
    nodes = (f"/dev/nvidia{gpu.minor}",) if gpu.minor >= 0 else ()  # a Tegra's own GPU has none of this kind
    return Device(gpu.uuid, gpu.uuid, str(gpu.index), gpu.index, gpu.uuid, nodes,
                  gpu.numa, gpu.memory, gpu.arch)  # fmt: skip


def _slice(gpu: Gpu, mig: MigDevice) -> Device:
    caps = tuple(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (mig.gi_minor, mig.ci_minor) if minor >= 0)
    return Device(mig.uuid, mig.uuid, f"{gpu.index}:{mig.slot}", gpu.index, gpu.uuid,
                  (f"/dev/nvidia{gpu.minor}", *caps), gpu.numa, mig.memory, gpu.arch, mig.gi, mig.ci)  # fmt: skip


def _named(text: str, patterns: tuple[Pattern, ...], default: str) -> str:
    return next((row.name for row in patterns if row.matches(text)), PREFIX + default)


def _matching_nothing(patterns: Sequence[Pattern], names: set[str], found: Container[str]) -> list[str]:
    """Patterns without any effect: they may be misspelt."""
    return [
        f"{row.name}: its pattern {row.pattern!r} matches none of {', '.join(sorted(names))}; capital letters count"
        for row in patterns
        if names and row.name not in found and not any(map(row.matches, names))
    ]


def _mig_name(mig: MigDevice, config: Config) -> str:
    own = f"mig-{mig.profile.replace('+', '.').replace(',', '.')}"
    return _named(mig.profile, config.mig_patterns, "gpu" if config.mig_strategy == "single" else own)


def _inexpressible(gpus: list[Gpu]) -> dict[int, str]:
    """GPUs that strategy single can't offer, index -> why. One name stands for one kind of device: the MIG profile
    that most GPUs consist of (the first by name among equals), or whole GPUs where none is partitioned so."""
    profiles = {gpu.index: sorted({mig.profile for mig in gpu.mig if mig.profile}) for gpu in gpus if gpu.mig_enabled}
    uniform = [own[0] for own in profiles.values() if len(own) == 1]
    kind = min(set(uniform), key=lambda profile: (-uniform.count(profile), profile), default="")
    reasons = {}
    for gpu in gpus:
        own = profiles.get(gpu.index, [])
        if own and own != [kind]:
            counts = ", ".join(f"{name}×{[mig.profile for mig in gpu.mig].count(name)}" for name in own)
            wanted = f"one, here {kind}" if kind else "one"
            reasons[gpu.index] = f"GPU {gpu.index} {gpu.uuid} has profiles {counts}; strategy single needs {wanted}"
        elif kind and not gpu.mig_enabled:
            reasons[gpu.index] = (
                f"GPU {gpu.index} {gpu.uuid} is not in MIG mode; all devices on the node must be configured with the "
                "same migEnabled value under strategy single"
            )
    return reasons


CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


def control_nodes(dev_root: str) -> tuple[str, ...]:
    """The nodes every container with a GPU needs, as far as they are beneath `dev_root`."""
    return tuple(path for path in CONTROL_NODES if os.path.exists(dev_root.rstrip("/") + path))
