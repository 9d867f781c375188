"""Holds a YAML file that says what a node is against what a node can be: what people write by hand has slips in it.

Two forms: a profile, which says only what makes a machine special, and a whole description, as node.yaml has it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gpulet.errors import ConfigError, UsageError
from gpulet.sim.description import BRANDS, LEVELS, MAX_GPUS, Description, SimGpu

_VERSION = r"\d+(\.\d+)+"
_BUS = r"([0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_UUID = r"(GPU|MIG)-[0-9A-Za-z/-]+"  # older MIG UUIDs carry slashes
_MAX_MINOR = 253  # 254 and 255 are the driver's own (Documentation/admin-guide/devices.txt)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


class GpuRow(_Table):
    """A GPU of a profile."""

    bus: Annotated[str, Field(pattern=f"^{_BUS}$")]
    model: str | None = None
    numa: int = -1
    bridge: str = ""
    switch: str = ""
    minor: int | None = None


class NvLink(_Table):
    """How GPUs are joined: so many links of each to switches, or a mesh of "first-second" -> links."""

    switch: Annotated[int, Field(ge=1, le=36)] | None = None
    mesh: dict[Annotated[str, Field(pattern=r"^\d+-\d+$")], Annotated[int, Field(ge=1, le=36)]] = {}


class Fabric(_Table):
    """The NVLink domain that the node is part of."""

    cluster: str = ""
    clique: int = 0


class Profile(_Table):
    """A profile: see profiles/*.yaml."""

    driver: str
    cuda: str
    platform: Literal["discrete", "wsl", "tegra"] = "discrete"
    model: str | None = None
    gpus: Annotated[list[GpuRow], Field(max_length=MAX_GPUS)]
    nvlink: NvLink = NvLink()
    fabric: Fabric = Fabric()
    imex: list[Annotated[int, Field(ge=0, lt=2048)]] = []
    fabricmanager: bool = False
    nvswitches: Annotated[int, Field(ge=0, le=64)] = 0


def read_profile(name: str, data: dict[str, Any]) -> Profile:
    """A profile's content, checked field by field. ConfigError names the file and the first field that is wrong."""
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        raise _wrong(name, error) from error


def read_whole(name: str, data: dict[str, Any]) -> Description:
    """What `Description.to_data` gave, checked. ConfigError names the file and the first field that is wrong."""
    known = set(Description.__dataclass_fields__)
    for where, unknown in (("", set(data) - known), *_unknown_of_gpus(data)):
        if unknown:
            raise ConfigError(f"{name}: unknown field", seen=f"{where}{min(unknown)}")
    try:
        found: Description = TypeAdapter(Description).validate_python(data)
    except ValidationError as error:
        raise _wrong(name, error) from error
    return found


def _unknown_of_gpus(data: dict[str, Any]) -> Iterator[tuple[str, set[str]]]:
    known = set(SimGpu.__dataclass_fields__)
    gpus = data.get("gpus")
    for index, gpu in enumerate(gpus if isinstance(gpus, list) else []):
        if isinstance(gpu, dict):
            yield f"gpus.{index}.", set(gpu) - known


def _wrong(name: str, error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "the whole"
    if first["type"] == "missing":
        return ConfigError(f"{name}: {where} is missing")
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{name}: unknown field", seen=where)
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("String should match ")
    return ConfigError(f"{name}: {where}", seen=repr(first["input"])[:80], wanted=wanted)


def check(name: str, made: Description) -> None:
    """What no type says: forms of texts that become paths, and numbers that must be a GPU's own. ConfigError."""
    for where, value, pattern in _texts(made):
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"{name}: {where}", seen=repr(value), wanted=f"the form {pattern}")
    for what in ("bus_id", "uuid", "minor"):
        counts = Counter(getattr(gpu, what) for gpu in made.gpus)
        value, count = counts.most_common(1)[0] if counts else ("", 0)
        if count > 1:
            raise ConfigError(f"{name}: {count} GPUs with the same {what}", seen=value, wanted="one each")
    for index, gpu in enumerate(made.gpus):
        if gpu.index != index or not 0 <= gpu.minor <= _MAX_MINOR:
            number = f"index {gpu.index}, minor {gpu.minor}"
            raise ConfigError(f"{name}: gpus.{index}", seen=number, wanted=f"index {index}, minor 0 to {_MAX_MINOR}")
        _check_peers(f"{name}: gpus.{index}", gpu, len(made.gpus))


def _texts(made: Description) -> Iterator[tuple[str, str, str]]:
    yield "driver", made.driver, _VERSION
    yield "cuda", made.cuda, r"\d+\.\d+"
    yield "platform", made.platform, "discrete|wsl|tegra"
    for index, gpu in enumerate(made.gpus):
        yield f"gpus.{index}.bus_id", gpu.bus_id, f"0000{_BUS}"
        yield f"gpus.{index}.uuid", gpu.uuid, _UUID
        yield f"gpus.{index}.brand", gpu.brand, "|".join(BRANDS)
        yield f"gpus.{index}.arch", gpu.arch, r"\d+\.\d+"
        yield f"gpus.{index}.name", gpu.name, r"\S[^\n]*"
        yield f"gpus.{index}.serial", gpu.serial, r"\S*"


def _check_peers(where: str, gpu: SimGpu, count: int) -> None:
    for end in gpu.links:
        if end != "s" and not (end.isdigit() and int(end) < count):
            raise ConfigError(f"{where}.links", seen=repr(end), wanted=f"'s' for a switch, or a GPU below {count}")
    for level in gpu.levels:
        if level not in LEVELS.values():
            raise ConfigError(f"{where}.levels", seen=level, wanted=f"one of {', '.join(map(str, LEVELS.values()))}")


def cut(name: str, made: Description, count: int) -> Description:
    """The same node with its first GPUs alone, and nothing left that leads to the others. UsageError for too many."""
    if count > len(made.gpus):
        raise UsageError(f"{name} has too few GPUs", seen=count, wanted=f"at most {len(made.gpus)}")
    kept = tuple(
        replace(gpu, links=tuple(end for end in gpu.links if end == "s" or int(end) < count), levels=gpu.levels[:count])
        for gpu in made.gpus[:count]
    )
    return replace(made, gpus=kept)
