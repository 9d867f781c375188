"""Reading a manifest's fields: each knows the way to itself, so that an error names file, document and field.

What a manifest says is never echoed whole: values are cut, and what a terminal would act upon is escaped.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection, Iterator
from typing import Any

from gpulet.errors import ConfigError
from gpulet.sim.pods_names import Rule

LONGEST_SHOWN = 80


class Budget:
    """What a manifest may still cost, in characters, once aliases, replicas and $(NAMES) are written out."""

    def __init__(self, size: int = 8 << 20) -> None:
        self.size = self.left = size

    def take(self, amount: int) -> None:
        """Raises ConfigError when nothing is left."""
        self.left -= amount
        if self.left < 0:
            raise ConfigError(
                "manifest is too large once aliases, replicas and $(NAMES) are written out",
                wanted=f"at most some {self.size >> 20} million characters",
            )


def printable(text: str, longest: int = LONGEST_SHOWN) -> str:
    """One bounded line: control characters, bidirectional marks and the like escaped, the rest cut off."""
    cut = text[: longest + 1]
    line = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in cut)
    return line if len(line) <= longest else line[: longest - 3] + "..."


def shown(value: Any) -> str:
    """A value as an error shows it."""
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxlist, brief.maxdict = 2, 3, 3
    return printable(repr(value[: LONGEST_SHOWN + 1]) if isinstance(value, str) else brief.repr(value))


class Field:
    """One value of a manifest. place: file, document and Pod; path: the way from the document's root.

    null counts as absent, as in the API server. Every method raises ConfigError for a value of the wrong type.
    """

    def __init__(self, value: Any, place: str, path: str = "", *, budget: Budget) -> None:
        self.value = value
        self.place = place
        self.path = path
        self.budget = budget

    def __getitem__(self, key: str) -> Field:
        return self._below(self.map().get(key), f"{self.path}.{key}".lstrip("."))

    def _below(self, value: Any, path: str) -> Field:
        return Field(value, self.place, path, budget=self.budget)

    @property
    def given(self) -> bool:
        return self.value is not None

    def within(self, place: str) -> Field:
        """The same field of a place that has been told apart."""
        return Field(self.value, place, self.path, budget=self.budget)

    def wrong(self, wanted: str, *, seen: str = "", remedy: str = "") -> ConfigError:
        """The error about this field."""
        what = f"{self.place}: {self.path}" if self.path else self.place
        return ConfigError(what, seen=seen or shown(self.value), wanted=wanted, remedy=remedy)

    def map(self) -> dict[str, Any]:
        """The value as a map; nothing is an empty one."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self.wrong("a map")
        return self.value

    def known(self, names: Collection[str]) -> Field:
        """Itself. A key that isn't one of `names` is an error, as under the API server's strict validation."""
        for key in self.map():
            if key not in names:
                near = difflib.get_close_matches(key[:60], names, 1)
                raise self.wrong("a field that there is", seen=f"unknown field {shown(key)}",
                                 remedy=f"did you mean {near[0]}?" if near else "")  # fmt: skip
        return self

    def entries(self) -> Iterator[tuple[str, Field]]:
        """Keys and values of a map. The caller checks a key before it uses it."""
        for key, value in self.map().items():
            yield key, self._below(value, f"{self.path}[{shown(key)}]")

    def items(self) -> list[Field]:
        """A list's items; nothing is an empty list."""
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [self._below(item, f"{self.path}[{number}]") for number, item in enumerate(self.value)]

    def text(self, default: str = "") -> str:
        """Any text that can be a C string."""
        if self.value is None:
            return default
        if not isinstance(self.value, str):
            raise self.wrong("text", remedy="" if isinstance(self.value, (dict, list)) else "put it in quotes")
        if "\0" in self.value:
            raise self.wrong("text without NUL")
        return self.value

    def name(self, rule: Rule, default: str = "") -> str:
        """Text that keeps a rule; nothing and "" give the default."""
        text = self.text() or default
        if text and not rule.allows(text):
            raise self.wrong(rule.wanted)
        return text

    def needed(self, rule: Rule) -> str:
        """Text that must be there and keep a rule."""
        text = self.text()
        if not text or not rule.allows(text):
            raise self.wrong(rule.wanted)
        return text

    def choice(self, *words: str) -> str:
        """One of some words; the first where nothing is given."""
        text = self.text() or words[0]
        if text not in words:
            raise self.wrong(f"one of {', '.join(word for word in words if word)}")
        return text

    def flag(self) -> bool:
        if self.value is not None and not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return bool(self.value)

    def whole(self, highest: int = 2**31 - 1, *, lowest: int = 0) -> int | None:
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not lowest <= self.value <= highest:
            raise self.wrong(f"a whole number from {lowest} to {highest}")
        return self.value

    def cost(self) -> int:
        """What this value costs when it is written out once more."""
        total, waiting = 0, [self.value]
        while waiting:
            value = waiting.pop()
            total += 8
            if isinstance(value, str):
                total += len(value)
            elif isinstance(value, dict):
                waiting += [*value, *value.values()]
            elif isinstance(value, list):
                waiting += value
        return total
