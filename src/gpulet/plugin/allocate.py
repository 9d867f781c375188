"""What a container gets for the devices that the kubelet chose: the pure part of Allocate.

Names, values and order are the peer's; its error texts too, but with gRPC codes that say whose fault it is.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpulet.errors import GpuletError
from gpulet.plugin.config import Config
from gpulet.plugin.resources import Device, Resource

VOLUME_ROOT = "/var/run/nvidia-container-devices"
CDI_VENDOR = "k8s.device-plugin.nvidia.com"


class AllocationRefused(GpuletError):
    """A request can't be met. code: the gRPC status code's name, for whoever asked."""

    def __init__(self, what: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(what)
        self.code = code


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What else of the node an answer depends on, found once per generation.

    control_nodes: paths under dev/ that every container with a GPU needs; imex: channel numbers that exist;
    cdi_classes: of "gdrcopy", "gds", "mofed", those whose CDI spec has something in it.
    """

    control_nodes: tuple[str, ...] = ()
    imex: tuple[int, ...] = ()
    cdi_classes: tuple[str, ...] = ()


@dataclass(slots=True)
class Answer:
    """One container's answer. mounts: (container path, host path, read only); devices: (container path, host path,
    permissions)."""

    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str, bool]] = field(default_factory=list)
    devices: list[tuple[str, str, str]] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi: list[str] = field(default_factory=list)


def allocate(
    ids: Sequence[str],
    resource: Resource,
    config: Config,
    surroundings: Surroundings,
    sick: Mapping[str, str],
    token: Callable[[], object] = uuid.uuid4,
) -> Answer:
    """The answer for one container.

    ids: as the kubelet was told them; sick: base id -> why it is unhealthy; token: makes the annotation's key unique.
    Raises AllocationRefused.
    """
    devices = _validated(ids, resource, config, sick)
    names = list(dict.fromkeys(_identify(devices, config)))
    answer = Answer()
    if config.cdi:
        _add_cdi(answer, names, config, surroundings, token)
    if config.mps_active and any(device.replicas for device in devices):
        _add_mps(answer, resource.name, config)
    for wanted, name in (
        (config.gdrcopy_enabled, "GDRCOPY"),
        (config.gds_enabled, "GDS"),
        (config.mofed_enabled, "MOFED"),
    ):
        if wanted:
            answer.envs[f"NVIDIA_{name}"] = "enabled"
    channels = [str(channel) for channel in surroundings.imex]
    if "envvar" in config.device_list_strategy:
        answer.envs[config.device_list_envvar] = ",".join(names)
        if channels:
            answer.envs["NVIDIA_IMEX_CHANNELS"] = ",".join(channels)
    if "volume-mounts" in config.device_list_strategy:
        answer.envs[config.device_list_envvar] = VOLUME_ROOT
        for name in [*names, *(f"imex/{channel}" for channel in channels)]:
            answer.mounts.append((f"{VOLUME_ROOT}/{name}", "/dev/null", False))
    if config.pass_device_specs and not all(name.startswith("cdi-") for name in config.device_list_strategy):
        _add_device_nodes(answer, devices, config, surroundings)
    return answer


def _validated(ids: Sequence[str], resource: Resource, config: Config, sick: Mapping[str, str]) -> list[Device]:
    prefix = f'invalid allocation request for "{resource.name}"'
    for device_id in ids:
        if device_id not in resource.by_id:
            raise AllocationRefused(f"{prefix}: invalid request: unknown device: {device_id}")
    devices = [resource.by_id[device_id] for device_id in ids]
    sharing = config.sharing
    if sharing and sharing.fail_above_one and len(ids) > 1 and any(device.replicas for device in devices):
        raise AllocationRefused(
            f"{prefix}: invalid request: maximum request size for shared resources is 1; found {len(ids)}"
        )
    for device in devices:
        if device.base in sick:
            raise AllocationRefused(
                f"{prefix}: invalid request: unhealthy device: {device.id}: {sick[device.base]}", "FAILED_PRECONDITION"
            )
    too_few = spread_problem(devices, len(ids), config)
    if too_few:
        raise AllocationRefused(f"{prefix}: invalid request: {too_few}", "FAILED_PRECONDITION")
    return devices


def spread_problem(devices: Iterable[Device], size: int, config: Config) -> str:
    """Why these shared devices or MIG devices, of which `size` are wanted, are on too few GPUs; "" where they aren't.

    A minimum of 3 means that 2 devices are on 2 GPUs, and 3 and more on at least 3.
    """
    gpus = {device.gpu_uuid for device in devices if device.replicas or device.mig}
    wanted = min(config.spread_minimum, size)
    if not gpus or len(gpus) >= wanted:
        return ""
    return f"{wanted} different GPUs are wanted for {size} devices (spread-minimum), and there are {len(gpus)}"


def _identify(devices: Iterable[Device], config: Config) -> list[str]:
    """UUIDs in the order of the request; indices in the node's order, so that CUDA's ordinals don't change between
    starts (the kubelet's order is random)."""
    if config.device_id_strategy == "uuid":
        return [device.base for device in devices]
    return [device.index for device in sorted(devices, key=_node_order)]


def _node_order(device: Device) -> tuple[int, int]:
    return device.gpu, int(device.index.partition(":")[2] or 0)


def _add_cdi(
    answer: Answer, names: Sequence[str], config: Config, surroundings: Surroundings, token: Callable[[], object]
) -> None:
    qualified = [
        *(f"{CDI_VENDOR}/gpu={name}" for name in names),
        *(f"{CDI_VENDOR}/imex-channel={channel}" for channel in surroundings.imex),
        *(f"{CDI_VENDOR}/{name}=all" for name in surroundings.cdi_classes),
    ]
    if not qualified:
        return
    if "cdi-annotations" in config.device_list_strategy:
        for name in names:  # a MIG UUID of the old kind, MIG-GPU-.../3/0, is no CDI device name
            if not name.replace("-", "a").replace("_", "a").replace(".", "a").replace(":", "a").isalnum():
                raise AllocationRefused(
                    f"failed to add CDI annotations: {name} is no CDI device name; use --device-id-strategy=index",
                    "FAILED_PRECONDITION",
                )
        key = f"{config.cdi_annotation_prefix}nvidia-device-plugin_{token()}"
        answer.annotations[key] = ",".join(qualified)
    if "cdi-cri" in config.device_list_strategy:
        answer.cdi.extend(qualified)


def _add_mps(answer: Answer, resource: str, config: Config) -> None:
    pipe = f"/mps/{resource}/pipe"
    answer.envs["CUDA_MPS_PIPE_DIRECTORY"] = pipe
    answer.mounts.append((pipe, os.path.join(config.mps_root, resource, "pipe"), False))
    answer.mounts.append(("/dev/shm", os.path.join(config.mps_root, "shm"), False))


def _add_device_nodes(answer: Answer, devices: Iterable[Device], config: Config, surroundings: Surroundings) -> None:
    channels = [f"/dev/nvidia-caps-imex-channels/channel{channel}" for channel in surroundings.imex]
    own = [path for device in devices for path in device.paths]
    for path in dict.fromkeys([*surroundings.control_nodes, *own, *channels]):
        answer.devices.append((path, os.path.join(config.dev_root, path.lstrip("/")), "rw"))
