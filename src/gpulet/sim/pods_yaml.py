"""A manifest's text as plain data, within bounds: what a file of a few lines can be made to cost is known beforehand.

Scalars are read as kubectl reads them, which isn't quite YAML 1.1: dates and "10:20" are text, "1e3" is a number, keys
are always text, and only what JSON has comes out: dict, list, str, int, float, bool, None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from gpulet.errors import ConfigError
from gpulet.sim.pods_fields import Budget, printable

_CParser: Any
try:
    from yaml import cyaml
except ImportError:  # PyYAML built without libyaml
    _CParser = None
else:
    _CParser = cyaml.CParser  # type: ignore[attr-defined]


class PythonParser(Reader, Scanner, Parser):
    """libyaml's events in Python: a tenth as fast, and no JSON that is indented by tabs."""

    def __init__(self, stream: bytes) -> None:
        Reader.__init__(self, stream)
        Scanner.__init__(self)
        Parser.__init__(self)


DEEPEST = 100  # levels; schemas of custom resources reach some 60
NODE_COST = 8  # what any value costs beside its text, so that a million of empty ones is the most there can be
_LONGEST_NUMBER = 40  # characters; beyond, it is text: Python's own limits are farther, and errors of another kind
_TAG = "tag:yaml.org,2002:"


class Composing(Composer, SafeConstructor, Resolver):
    """The half of a loader above the parser's events; `budget` pays for every value, aliases counted in full."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (none of PyYAML's own; typed as the stubs have it)
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def __init__(self, budget: Budget) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._budget = budget
        self._depth = 0
        self._costs: dict[yaml.Node, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias = self.check_event(yaml.AliasEvent)  # type: ignore[attr-defined]
        event = self.peek_event()  # type: ignore[attr-defined]
        if self._depth == DEEPEST:
            raise ComposerError(None, None, f"more than {DEEPEST} levels, one in the other", event.start_mark)
        left = self._budget.left
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return node
        if alias:
            if node not in self._costs:
                raise ComposerError(None, None, f"alias {event.anchor!r} contains itself", event.start_mark)
            self._budget.take(self._costs[node])
            return node
        self._budget.take(NODE_COST + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0))
        self._costs[node] = left - self._budget.left
        return node


def documents(data: bytes, where: str, budget: Budget, parser: Any = _CParser or PythonParser) -> Iterator[Any]:
    """The documents of a YAML or JSON file, one after another; empty ones are None. Raises ConfigError."""
    loader_type: Any = type("Loader", (Composing, parser), {})
    number = 1
    try:
        loader = loader_type.__new__(loader_type, data)
        parser.__init__(loader, data)
        Composing.__init__(loader, budget)
        while loader.check_data():
            yield loader.get_data()
            number += 1
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter two: an escape that is no character
        raise ConfigError(f"{where}, document {number} is no YAML", seen=_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, ReaderError):
        return printable(f"{error.reason} at position {error.position}", 160)
    if not isinstance(error, yaml.MarkedYAMLError):
        return printable(str(error), 160)
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + printable(error.problem or error.context or "it can't be read", 120)


def _map(loader: Composing, node: Any) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise ConstructorError(None, None, "a map was expected", node.start_mark)
    loader.flatten_mapping(node)  # the merge key, "<<"
    return {_key(loader, key): loader.construct_object(value, deep=True) for key, value in node.value}


def _key(loader: Composing, node: Any) -> str:
    key = loader.construct_object(node, deep=True)
    if isinstance(key, bool):
        return str(key).lower()
    if not isinstance(key, (str, int, float)):
        raise ConstructorError(None, None, "a key must be text", node.start_mark)
    return str(key)


def _sequence(loader: Composing, node: Any) -> list[Any]:
    if not isinstance(node, yaml.SequenceNode):
        raise ConstructorError(None, None, "a list was expected", node.start_mark)
    return [loader.construct_object(item, deep=True) for item in node.value]


def _text(loader: Composing, node: Any) -> str:
    text: str = loader.construct_scalar(node)
    text.encode()  # half of a surrogate pair is no text; ValueError
    return text


def _flag(loader: Composing, node: Any) -> bool:
    word = loader.construct_scalar(node).lower()
    if word not in SafeConstructor.bool_values:
        raise ConstructorError(None, None, "true or false was expected", node.start_mark)
    return bool(SafeConstructor.bool_values[word])


def _number(loader: Composing, node: Any) -> int | float | str:
    """Whole numbers in any base, others where they are finite; what is neither stays text."""
    text: str = loader.construct_scalar(node)
    digits = text.replace("_", "").lower()
    if len(digits) > _LONGEST_NUMBER:
        return text
    bare = digits.lstrip("+-")
    octal = len(bare) > 1 and bare.isdigit() and bare[0] == "0" and not set(bare) & set("89")
    try:
        return int(digits, 8 if octal else 0)
    except ValueError:
        pass
    try:
        value = float(digits)
    except ValueError:
        return text
    if not math.isfinite(value):
        return text
    return int(value) if value.is_integer() and abs(value) < 1e21 else value  # as JSON writes it


def _nothing(_loader: Composing, _node: Any) -> None:
    return None


for _name, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", "[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
):
    Composing.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _first)

_constructing: Any = Composing  # the stubs know only functions for all of PyYAML's loaders
for _name, _construct in {
    "map": _map,
    "seq": _sequence,
    "str": _text,
    "bool": _flag,
    "int": _number,
    "float": _number,
    "null": _nothing,
}.items():
    _constructing.add_constructor(_TAG + _name, _construct)
_constructing.add_constructor(None, SafeConstructor.construct_undefined)
