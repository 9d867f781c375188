"""Sharing: what the YAML file says of replicas and names, and the replicas made of a resource's devices.

A replica's id is `<device id>::<n>`. Time-slicing configures nothing on the GPU; MPS adds environment and mounts to
Allocate's answers (allocate.py). The schema is the peer's; unlike it, `rename` and `devices` are honoured.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpulet.errors import ConfigError

if TYPE_CHECKING:
    from gpulet.plugin.document import Place
    from gpulet.plugin.resources import Device

PREFIX = "nvidia.com/"
MOST_DEVICES = 40_000  # of one resource: the kubelet's gRPC takes lists of 4 MiB, a replica's entry is some 80 bytes
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_UUID = r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_DEVICE = re.compile(rf"[0-9]+(:[0-9]+)?|GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A resource's name for the GPUs (or MIG profiles) whose name matches; `*` matches any run of characters."""

    pattern: str
    name: str

    def matches(self, text: str) -> bool:
        """Whether the whole of `text` matches."""
        return re.fullmatch(".*".join(map(re.escape, self.pattern.split("*"))), text) is not None


@dataclass(frozen=True, slots=True)
class Shared:
    """One entry of sharing.*.resources. devices: "all", a count, or GPU indices, MIG indices and UUIDs as text;
    where: its place in the config file, for people."""

    name: str
    replicas: int
    rename: str = ""
    devices: str | int | tuple[str, ...] = "all"
    where: str = field(default="", compare=False, repr=False)

    @property
    def title(self) -> str:
        """What a refusal of this entry begins with."""
        return f"{self.where or 'sharing'} of {self.name}"


@dataclass(frozen=True, slots=True)
class Sharing:
    """sharing.timeSlicing or sharing.mps."""

    resources: tuple[Shared, ...]
    fail_above_one: bool = False

    @property
    def active(self) -> bool:
        """Whether any resource is replicated."""
        return any(item.replicas > 1 for item in self.resources)


def resource_name(text: str, where: str = "") -> str:
    """A resource's full name, `nvidia.com/` put before it where missing. where: what a ConfigError begins with."""
    where = where and f"{where}: "
    if "/" in text and not text.startswith(PREFIX):
        raise ConfigError(f"{where}incorrect format for resource name", seen=repr(text),
                          wanted=f"a name that begins with {PREFIX}, or one without a domain")  # fmt: skip
    full = text if text.startswith(PREFIX) else PREFIX + text
    if len(full) > 63:
        raise ConfigError(f"{where}fully-qualified resource name must be 63 characters or less", seen=full)
    if not _SUBDOMAIN.fullmatch(full.removeprefix(PREFIX)):
        raise ConfigError(f"{where}incorrect format for resource name", seen=repr(text),
                          wanted="a lower-case DNS subdomain")  # fmt: skip
    return full


def read_patterns(value: Any, where: Place) -> tuple[Pattern, ...]:
    """resources.gpus or resources.mig: a list of {pattern, name}. Raises ConfigError."""
    patterns = []
    for number, entry in enumerate(_list(value or [], where)):
        place = where.at(number)
        for key in ("pattern", "name"):
            if not isinstance(entry, dict) or not entry.get(key):
                raise ConfigError(f"{place}: resources must have a '{key}' field set", seen=repr(entry))
        patterns.append(Pattern(_text(entry["pattern"]), resource_name(_text(entry["name"]), str(place.at("name")))))
    return tuple(patterns)


def read_sharing(value: Any, where: Place, *, fail_above_one: bool) -> Sharing:
    """A sharing section. Raises ConfigError naming the key."""
    entries = value.get("resources") if isinstance(value, dict) else None
    if not entries:
        raise ConfigError(f"{where}: no resources specified", wanted="a list of {name, replicas}")
    rename = value.get("renameByDefault", False)
    fail = value.get("failRequestsGreaterThanOne")
    for key, flag in (("renameByDefault", rename), ("failRequestsGreaterThanOne", fail)):
        if not isinstance(flag, bool | None):
            raise ConfigError(str(where.at(key)), seen=repr(flag), wanted="true or false")
    items = tuple(
        _shared(entry, where.at("resources", number), bool(rename))
        for number, entry in enumerate(_list(entries, where.at("resources")))
    )
    twice = {item.name for item in items if [other.name for other in items].count(item.name) > 1}
    if twice:
        raise ConfigError(f"{where.at('resources')} names a resource twice", seen=", ".join(sorted(twice)))
    return Sharing(items, fail_above_one if fail is None else fail)


def _text(value: object) -> str:
    """A scalar where text is wanted, as the peer's decoder puts it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list(value: Any, where: Place) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(str(where), seen=repr(value), wanted="a list")
    return value


def _shared(entry: Any, where: Place, rename_by_default: bool) -> Shared:
    if not isinstance(entry, dict) or not entry.get("name"):
        raise ConfigError(f"{where}: no resource name specified")
    name = resource_name(_text(entry["name"]), str(where.at("name")))
    devices = _devices(entry.get("devices", "all"), where.at("devices"))
    if entry.get("replicas") is None:
        raise ConfigError(f"{where}: no replicas specified")
    replicas = entry["replicas"]
    if isinstance(replicas, float) and replicas.is_integer():
        replicas = int(replicas)
    if isinstance(replicas, str):
        raise ConfigError(f"{where.at('replicas')}: number of replicas is text", seen=repr(replicas),
                          wanted="a number, 2 or more, without quotes")  # fmt: skip
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 2:
        raise ConfigError(f"{where.at('replicas')}: number of replicas must be >= 2", seen=repr(entry["replicas"]))
    rename = entry.get("rename") or (f"{name}.shared" if rename_by_default else "")
    new_name = resource_name(_text(rename), str(where.at("rename"))) if rename else ""
    return Shared(name, replicas, new_name, devices, str(where))


def _devices(value: Any, where: Place) -> str | int | tuple[str, ...]:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        if value != "all":
            raise ConfigError(f"{where}: devices set as '{value}' but the only valid string input is 'all'")
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise ConfigError(f"{where}: devices set as '{value}' but a count of devices must be > 0")
        return value
    if not isinstance(value, list):
        raise ConfigError(f"{where}: unrecognized type for devices spec", seen=repr(value))
    refs = tuple(str(item) for item in value)
    for item, ref in zip(value, refs, strict=True):
        if isinstance(item, bool) or not _DEVICE.fullmatch(ref):
            raise ConfigError(f"{where}: unsupported device in devices list", seen=repr(item),
                              wanted="an index, a MIG index (gpu:slot) or a UUID")  # fmt: skip
    return refs


def replicate(
    resources: dict[str, list[Device]], sharing: Sharing, absent: Callable[[str], str]
) -> tuple[dict[str, list[Device]], list[str]]:
    """The resources with the named ones' devices replaced by replicas, and what couldn't be shared and why.

    absent: why a device that an entry names isn't offered though this node knows of it, "" where it doesn't; with "*":
    why there may be fewer devices than a count says. Only what it doesn't know of is a ConfigError: one GPU that breaks
    must not take the others from the kubelet. Replicas are made of the node's devices alone, never of replicas, so no
    id can come out twice.
    """
    named = {item.name for item in sharing.resources}
    result = {name: list(devices) for name, devices in resources.items() if name not in named}
    problems = []
    made = {item.rename for item in sharing.resources if item.name in resources}
    for item in sharing.resources:
        if item.name not in resources:
            why = "only sharing makes it, and replicas aren't shared again" if item.name in made else (
                "sharing names it, and this node doesn't have it")  # fmt: skip
            problems.append(f"{item.name}: {why}")
            continue
        devices, target = resources[item.name], item.rename or item.name
        chosen, missing = _chosen(devices, item, absent)
        problems += [f"{target}: {text}" for text in missing]
        if len(result.get(target, ())) + len(chosen) * item.replicas > MOST_DEVICES:
            raise ConfigError(f"{item.title}: {len(chosen)} devices with {item.replicas} replicas each",
                              wanted=f"{MOST_DEVICES} in all, the longest list that a kubelet takes",
                              remedy="lower the replicas")  # fmt: skip
        kept = [device for device in devices if device.id not in chosen]
        copies = [
            device.replica(number, item.replicas)
            for device in devices
            if device.id in chosen
            for number in range(item.replicas)
        ]
        for name, share in ((item.name, kept), (target, copies)):
            if share:
                result.setdefault(name, []).extend(share)
    return result, problems


def _chosen(devices: list[Device], item: Shared, absent: Callable[[str], str]) -> tuple[set[str], list[str]]:
    """The ids of the devices that an entry names, and which of them aren't there and why."""
    if item.devices == "all":
        return {device.id for device in devices}, []
    if isinstance(item.devices, int):
        problem = f"requested {item.devices} devices to be replicated, but only {len(devices)} devices available"
        few = item.devices > len(devices)
        if few and not absent("*"):
            raise ConfigError(f"{item.title}: {problem}")
        return {device.id for device in devices[: item.devices]}, [f"{problem}: {absent('*')}"] if few else []
    known = {key: device.id for device in devices for key in (device.id, device.index)}
    away = {ref: absent(ref) for ref in item.devices if ref not in known}
    for ref, why in away.items():
        if not why:
            raise ConfigError(f"{item.title}: no matching device", seen=ref,
                              wanted="an index or UUID on this node")  # fmt: skip
    return {known[ref] for ref in item.devices if ref in known}, [
        f"device {ref} can't be shared: {why}" for ref, why in away.items()
    ]
