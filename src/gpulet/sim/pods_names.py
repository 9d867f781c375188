"""The API server's rules for names (apimachinery's validation, 1.36). What keeps them can be part of a path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

_LABEL = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_WORD = "[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"


class Rule(NamedTuple):
    """allows: whether a text keeps the rule; wanted: the rule in words."""

    allows: Callable[[str], bool]
    wanted: str


def _rule(pattern: str, longest: int, wanted: str) -> Rule:
    compiled = re.compile(pattern)
    # length first: what is matched is short, whatever the pattern costs
    return Rule(lambda text: len(text) <= longest and bool(compiled.fullmatch(text)), f"{wanted}, at most {longest}")


LABEL = _rule(_LABEL, 63, "a name of a-z, 0-9 and -, with a letter or digit at both ends")
SUBDOMAIN = _rule(_SUBDOMAIN, 253, "a name of a-z, 0-9, - and ., with a letter or digit at the ends of each part")
PREFIX = Rule(
    # a dash at its end is fine, since letters follow
    lambda text: len(text) <= 253 and SUBDOMAIN.allows(f"{text[:-1]}a" if len(text) > 1 and text[-1] == "-" else text),
    "the beginning of a name of a-z, 0-9, - and .",
)
UID = _rule("[A-Za-z0-9-]+", 64, "a uid of letters, digits and -")
LABEL_VALUE = _rule(f"(?:{_WORD})?", 63, "letters, digits, -, _ and ., with a letter or digit at both ends")
ENV_NAME = Rule(
    lambda text: bool(text) and all(" " <= one <= "~" and one != "=" for one in text),
    "the name of a variable, of printable ASCII without =",
)
IMAGE = Rule(lambda text: text.isprintable() and " " not in text, "an image's name, without blanks")
_QUALIFIED = _rule(_WORD, 63, "")


def _qualified(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    return _QUALIFIED.allows(name) and (not slash or SUBDOMAIN.allows(prefix))


def _annotation(text: str) -> bool:
    prefix, slash, name = text.rpartition("/")
    return _qualified(f"{prefix.lower()}{slash}{name}")


def _resource(text: str) -> bool:
    """A container's resource: Kubernetes' own without a domain, or an extended one."""
    domain, slash, _name = text.rpartition("/")
    if not slash:
        return text in ("cpu", "memory", "ephemeral-storage") or (text.startswith("hugepages-") and _qualified(text))
    return _qualified(text) and not domain.startswith("requests.")


KEY = Rule(_qualified, "a key such as app or example.com/app, the part after / at most 63")
ANNOTATION = Rule(_annotation, KEY.wanted)
RESOURCE = Rule(_resource, "cpu, memory, ephemeral-storage, hugepages-<size> or domain/name")
