"""What a simulated node is: its GPUs, how they are joined, its driver. Read from a profile, kept as `node.yaml`.

A profile (profiles/*.yaml) says only what makes that machine special; what a model of GPU is comes from
profiles/models.yaml, and identities (UUID, serial) are derived from the profile's name and the GPU's number, so that
the same node comes out every time.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gpulet.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from gpulet.sim.profile_file import GpuRow, NvLink, Profile

PROFILES = Path(__file__).parent / "profiles"

# nvmlGpuTopologyLevel_t, in the words of node/gpu.py
LEVELS = {"board": 0, "switch": 10, "switches": 20, "host-bridge": 30, "numa": 40, "system": 50}
# nvmlBrandType_t
BRANDS = {"tesla": 2, "geforce": 5, "nvidiartx": 13, "nvidia": 14}
MAX_GPUS = 64


@dataclass(frozen=True)
class MigProfile:
    """A kind of GPU instance that a model offers. kind: nvml.h's number; id: the driver's; memory in MiB; size and
    starts in memory slices, of which a GPU has as many as its largest profile takes."""

    name: str
    kind: int
    id: int
    slices: int
    count: int
    sms: int
    copy: int
    decoders: int
    jpeg: int
    ofa: int
    memory: int
    size: int
    starts: tuple[int, ...]
    encoders: int = 0


@dataclass(frozen=True)
class Mig:
    """A MIG device: compute instance `ci` of GPU instance `gi`, the one in NVML's place `slot` on its GPU."""

    slot: int
    uuid: str
    profile: str
    gi: int
    ci: int
    ci_slices: int
    start: int


@dataclass(frozen=True)
class SimGpu:
    """One GPU. bus_id: NVML's form, "00000000:1b:00.0"; memory in MiB; bridge and switch name the PCIe host bridge
    and the PCIe switch above it, "" where it has none of its own, "top/leaf" where one switch hangs on another;
    links: the far end of each NVLink, the number of a GPU or "s" for an NVSwitch; levels: the topology level to every
    GPU, where it was seen and not worked out."""

    index: int
    minor: int
    uuid: str
    bus_id: str
    model: str
    name: str
    brand: str
    arch: str
    memory: int
    pci: tuple[str, str]
    serial: str
    numa: int = -1
    bridge: str = ""
    switch: str = ""
    links: tuple[str, ...] = ()
    mig_enabled: bool = False
    mig: tuple[Mig, ...] = ()
    lost: bool = False
    levels: tuple[int, ...] = ()

    @property
    def proc_name(self) -> str:
        """The GPU's folder in /proc/driver/nvidia/gpus: the PCI address with four digits for the domain."""
        return self.bus_id[4:]


@dataclass(frozen=True)
class Description:
    """One simulated node. platform: "discrete", "wsl" or "tegra"; nvswitches: how many the driver has nodes for;
    majors: /proc/devices name -> character major."""

    profile: str
    driver: str
    cuda: str
    platform: str
    gpus: tuple[SimGpu, ...]
    imex: tuple[int, ...] = ()
    cluster: str = ""
    clique: int = 0
    fabricmanager: bool = False
    nvswitches: int = 0
    majors: dict[str, int] = field(default_factory=dict)

    def level(self, first: SimGpu, second: SimGpu) -> int:
        """The level of two GPUs' nearest common point, as nvmlGpuTopologyLevel_t."""
        if first.index == second.index:
            return LEVELS["board"]
        if second.index < len(first.levels):
            return first.levels[second.index]
        if first.switch and first.switch == second.switch:
            return LEVELS["switch"]
        if first.switch and first.switch.partition("/")[0] == second.switch.partition("/")[0]:
            return LEVELS["switches"]
        if first.bridge and first.bridge == second.bridge:
            return LEVELS["host-bridge"]
        return LEVELS["numa"] if first.numa == second.numa else LEVELS["system"]

    def mig_profiles(self, gpu: SimGpu) -> dict[str, MigProfile]:
        """The MIG profiles that a GPU's model offers, by name; empty where it can't do MIG."""
        kinds = models().get(gpu.model, {}).get("mig", {})
        return {
            name: MigProfile(name=name, **{**facts, "starts": tuple(facts["starts"])}) for name, facts in kinds.items()
        }

    def to_data(self) -> dict[str, Any]:
        """Plain data for node.yaml."""
        data: dict[str, Any] = _plain(asdict(self))
        return data


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def to_yaml(description: Description) -> str:
    """The text of node.yaml; `load_profile` reads it. Innermost lists stand on one line."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(description.to_data(), Dumper=dumper, sort_keys=False, width=120, default_flow_style=None)
    return text


_models: dict[str, Any] = {}


def models() -> dict[str, Any]:
    """What each model of GPU is: profiles/models.yaml."""
    if not _models:
        _models.update(_read(PROFILES / "models.yaml"))
    return _models


def profiles() -> list[str]:
    """The names of the profiles that come with gpulet."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml") if path.stem != "models")


def summary(profile: str) -> str:
    """What a profile that comes with gpulet stands for: the comment at the top of its file."""
    lines = (PROFILES / f"{profile}.yaml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


def load_profile(profile: str, *, gpus: int | None = None, driver: str | None = None) -> Description:
    """The node that a profile describes: one of `profiles()`, or the path of a file of the same form, or of a
    node.yaml. gpus: how many to have, more than the profile's own repeat it on further PCI domains; driver: another
    version of it.
    """
    path = Path(profile) if profile.endswith((".yaml", ".yml")) else PROFILES / f"{profile}.yaml"
    if not path.is_file() or path.stem == "models":
        raise UsageError("unknown profile", seen=profile, wanted=f"one of {', '.join(profiles())}, or a YAML file")
    if gpus is not None and not 0 <= gpus <= MAX_GPUS:
        raise UsageError("number of GPUs out of range", seen=gpus, wanted=f"0 to {MAX_GPUS}")
    from gpulet.sim import profile_file  # here, since it builds on this module

    data = _read(path)
    if "profile" in data:  # a whole description, as in node.yaml or written by `gpulet sim capture`
        made = profile_file.read_whole(path.name, data)
        profile_file.check(path.name, made)
        if gpus is not None:
            made = profile_file.cut(path.name, made, gpus)
    else:
        made = _expand(path.stem, profile_file.read_profile(path.name, data), gpus)
    made = replace(made, driver=driver or made.driver)
    profile_file.check(path.name, made)
    return made


def _expand(name: str, profile: Profile, gpus: int | None) -> Description:
    rows = _rows(profile.gpus, gpus)
    return Description(
        profile=name,
        driver=profile.driver,
        cuda=profile.cuda,
        platform=profile.platform,
        gpus=tuple(_gpu(name, index, row, profile, len(rows)) for index, row in enumerate(rows)),
        imex=tuple(profile.imex),
        cluster=profile.fabric.cluster,
        clique=profile.fabric.clique,
        fabricmanager=profile.fabricmanager,
        nvswitches=profile.nvswitches,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read", seen=error) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is no node description", seen=type(data).__name__, wanted="a mapping")
    return data


def _rows(rows: list[GpuRow], wanted: int | None) -> list[GpuRow]:
    """So many rows: the profile's own, repeated where there are too few, with addresses and minors of their own."""
    if wanted is None or not rows:
        return rows
    minors = [index if row.minor is None else row.minor for index, row in enumerate(rows)]
    made = []
    for index in range(wanted):
        turn, place = divmod(index, len(rows))
        row = rows[place]
        if turn:
            tops = {what: f"{turn}.{name}" if (name := getattr(row, what)) else "" for what in ("bridge", "switch")}
            domain = int(row.bus[:-8], 16) if row.bus.count(":") == 2 else 0
            bus = f"{turn * 0x100 + domain:04x}:{row.bus[-7:]}"
            row = row.model_copy(update={"bus": bus, "minor": turn * (max(minors) + 1) + minors[place], **tops})
        made.append(row)
    return made


def _gpu(profile: str, index: int, row: GpuRow, whole: Profile, count: int) -> SimGpu:
    model = row.model or whole.model or ""
    facts = models().get(model)
    if facts is None:
        raise ConfigError(f"profile {profile}: unknown model", seen=model, wanted=f"one of {', '.join(models())}")
    return SimGpu(
        index=index,
        minor=index if row.minor is None else row.minor,
        uuid=f"GPU-{stable_uuid(profile, index)}",
        bus_id=f"0000{row.bus}" if row.bus.count(":") == 2 else f"00000000:{row.bus}",
        model=model,
        name=facts["name"],
        brand=facts["brand"],
        arch=facts["arch"],
        memory=facts["memory"],
        pci=tuple(facts["pci"]),
        serial=str(1650000000000 + int(hashlib.sha256(f"{profile}/{index}".encode()).hexdigest()[:8], 16)),
        numa=row.numa,
        bridge=row.bridge,
        switch=row.switch,
        links=_links(index, whole.nvlink, count),
    )


def _links(index: int, nvlink: NvLink, count: int) -> tuple[str, ...]:
    if nvlink.switch:
        return ("s",) * nvlink.switch
    ends: list[str] = []
    for pair, number in nvlink.mesh.items():
        first, second = (int(part) for part in pair.split("-"))
        if index in (first, second):
            other = second if index == first else first
            if other < count:
                ends += [str(other)] * number
    return tuple(ends)


def stable_uuid(*parts: object) -> str:
    """A UUID (version 4 by its looks) that is the same for the same parts on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))
