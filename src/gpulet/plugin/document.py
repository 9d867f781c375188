"""Keys of the YAML file's document: where a value stands, and which keys nobody reads.

As in the peer, whose decoder is Go's for JSON, the keys of fixed structs match in any case, an exact match before
others; those inside a sharing section match as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from gpulet.errors import ConfigError

ITEM_KEYS = {"name", "replicas", "rename", "devices"}
SHARING_KEYS = {"renameByDefault", "failRequestsGreaterThanOne", "resources"}


Keys = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands in the config file; its text is what a refusal begins with. find: the line of a path."""

    file: str
    find: Callable[[Keys], int]
    keys: Keys = ()

    def at(self, *keys: str | int) -> Place:
        """The place further in: a map's key, a list's number."""
        return replace(self, keys=self.keys + keys)

    def __str__(self) -> str:
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)
        return f"config file {self.file}, line {self.find(self.keys)}: {path.removeprefix('.')}"


def get(place: Mapping[str, Any], name: str) -> Any:
    """The value under a struct's key, None without one: the very key, else one that differs in case alone."""
    if name in place:
        return place[name]
    return next((place[key] for key in place if key.lower() == name.lower()), None)


def has(place: Mapping[str, Any], name: str) -> bool:
    """Whether a struct's key is there, be its value null."""
    return any(key.lower() == name.lower() for key in place)


def section(place: Mapping[str, Any], name: str, where: Place | None = None) -> dict[str, Any]:
    """The map under a struct's key, empty without one. where: the place of the key. Raises ConfigError."""
    value = get(place, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(str(where or name), seen=repr(value), wanted="a map")
    return value


def unknown_keys(document: dict[str, Any], known: set[str]) -> list[str]:
    """The paths of keys that nobody reads. known: the paths of struct keys, in lower case."""
    known = known | {"version", "flags", "imex", "resources", "resources.gpus", "resources.mig", "sharing"}
    known |= {"sharing.timeslicing", "sharing.mps"}
    seen = list(document)
    for top in ("flags", "imex", "resources", "sharing"):
        seen += [f"{top}.{key}" for key in section(document, top)]
    seen += [f"flags.plugin.{key}" for key in section(section(document, "flags"), "plugin")]
    found = [key for key in seen if key.lower() not in known]
    for way in ("timeSlicing", "mps"):
        place = section(section(document, "sharing"), way)
        found += [f"sharing.{way}.{key}" for key in place if key not in SHARING_KEYS]
        found += _items(place.get("resources"), f"sharing.{way}.resources", ITEM_KEYS)
    for way in ("gpus", "mig"):
        found += _items(get(section(document, "resources"), way), f"resources.{way}", {"pattern", "name"})
    return found


def _items(entries: Any, where: str, known: set[str]) -> Iterable[str]:
    maps = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return dict.fromkeys(f"{where}[].{key}" for key in chain.from_iterable(maps) if key not in known)
