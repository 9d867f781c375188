"""What a container was given by the device plugins, as one value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mount:
    """A bind mount that a plugin asked for."""

    container_path: str
    host_path: str
    read_only: bool = False


@dataclass(frozen=True)
class DeviceSpec:
    """A device node that a plugin asked for. permissions: letters out of "rwm"."""

    container_path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True)
class Allocation:
    """One container's part. device_ids: resource -> ids, with their replica suffix where they are shared."""

    device_ids: dict[str, tuple[str, ...]] = field(default_factory=dict)
    envs: dict[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceSpec, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def merge(answers: Iterable[tuple[str, tuple[str, ...], Any]]) -> Allocation:
    """Several (resource, ids, ContainerAllocateResponse) as one: the first to say something about a name or a
    container path wins, as in the kubelet; CDI names once each."""
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    mounts: dict[str, Mount] = {}
    nodes: dict[str, DeviceSpec] = {}
    names: dict[str, None] = {}
    device_ids = {}
    for resource, ids, answer in answers:
        device_ids[resource] = ids
        envs = {**answer.envs, **envs}
        annotations = {**answer.annotations, **annotations}
        for mount in answer.mounts:
            mounts.setdefault(mount.container_path, Mount(mount.container_path, mount.host_path, mount.read_only))
        for node in answer.devices:
            nodes.setdefault(node.container_path, DeviceSpec(node.container_path, node.host_path, node.permissions))
        names.update(dict.fromkeys(device.name for device in answer.cdi_devices))
    return Allocation(device_ids, envs, tuple(mounts.values()), tuple(nodes.values()), annotations, tuple(names))
