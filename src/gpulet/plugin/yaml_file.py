"""The YAML file as plain data, read as the peer reads it; whatever is in it, the worst that comes out is a ConfigError.

Plain words are what the peer's parser takes them for (see goyaml.py), only the first document counts, and keys are text
always.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import yaml

from gpulet import goyaml
from gpulet.errors import ConfigError
from gpulet.plugin import files
from gpulet.plugin.document import Keys, Place, get

DEEPEST, MOST = 30, 20_000  # levels; values, aliases counted in full: a file of a few lines can stand for billions
_Loader: Any = goyaml.loader(yaml.SafeLoader)


def read(path: str) -> tuple[dict[str, Any], Place]:
    """The file's map, empty for an empty file, and its place, which knows the line of each key. Raises ConfigError."""
    try:
        loader = _Loader(files.read(path))
        node = loader.get_node() if loader.check_node() else None
        place = Place(path, partial(_line, node))
        document = loader.construct_document(node) if node else None
        document = _plain(document, place, iter(range(MOST)))
    except OSError as error:
        raise ConfigError(f"config file {path} can't be read", seen=error.strerror) from error
    except RecursionError as error:
        raise ConfigError(f"config file {path} is nested too deeply") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # the library's own, and what it stumbles over: text that is no UTF-8, a tagged value that is none
        raise ConfigError(f"config file {path} is no YAML", seen=error) from error
    if document is None:
        return {}, place
    if not isinstance(document, dict):
        raise ConfigError(f"config file {path}", seen=type(document).__name__, wanted="a map with version, flags, ...")
    if get(document, "kind") == "ConfigMap":
        keys = get(document, "data")
        which = " or ".join(map(str, keys)) if isinstance(keys, dict) and keys else "<key>"
        raise ConfigError(f"{place.at('kind')}: this is a ConfigMap's manifest",
                          wanted=f"what stands under its data.{which}")  # fmt: skip
    version = get(document, "version")
    if version not in (None, "", "v1"):
        raise ConfigError(f"{place.at('version')}: unknown version", seen=version, wanted="v1")
    return document, place


def _line(node: yaml.Node | None, keys: Keys) -> int:
    """The line, from 1, of what is at these keys, or of the nearest around it that is there. A map's last entry counts
    where there are several, and after the very key one that differs in case, as for `get`."""
    line = node.start_mark.line if node else 0
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            rows = [row for row in reversed(node.value) if str(row[0].value).lower() == str(key).lower()]
            rows.sort(key=lambda row: row[0].value != key)
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            rows = [(item, item) for item in node.value[key : key + 1]]
        else:
            break
        if not rows:
            break
        line, node = rows[0][0].start_mark.line, rows[0][1]
    return line + 1


def _plain(value: Any, place: Place, budget: Iterable[int]) -> Any:
    """The value with text as keys, as JSON has it. Raises ValueError for a document that is too large, ConfigError for
    a value that JSON has no form for."""
    if len(place.keys) >= DEEPEST or next(iter(budget), None) is None:
        raise ValueError(f"nested more than {DEEPEST} levels, or more than {MOST} values")
    if isinstance(value, dict):
        return {_key(key): _plain(item, place.at(_key(key)), budget) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, place.at(number), budget) for number, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(f"{place}: a {type(value).__name__} where text, a number, a list or a map is expected")


def _key(key: object) -> str:
    return str(key).lower() if isinstance(key, bool) else "null" if key is None else str(key)
