"""Keys of the YAML file's document: where a value stands, and which keys nobody reads.

As in the peer, whose decoder is Go's for JSON, the keys of fixed structs match in any case, an exact match before
others; those inside a sharing section match as they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from gpulet.errors import ConfigError

ITEM_KEYS = {"name", "replicas", "rename", "devices"}
SHARING_KEYS = {"renameByDefault", "failRequestsGreaterThanOne", "resources"}


def get(place: Mapping[str, Any], name: str) -> Any:
    """The value under a struct's key, None without one: the very key, else one that differs in case alone."""
    if name in place:
        return place[name]
    return next((place[key] for key in place if key.lower() == name.lower()), None)


def has(place: Mapping[str, Any], name: str) -> bool:
    """Whether a struct's key is there, be its value null."""
    return any(key.lower() == name.lower() for key in place)


def section(place: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The map under a struct's key, empty without one. Raises ConfigError."""
    value = get(place, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(name, seen=repr(value), wanted="a map")
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
