"""Kubernetes quantities ("500m", "16Gi", "1e3") as whole numbers of the smallest unit that is counted."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from gpulet.errors import ConfigError
from gpulet.sim.pods_fields import shown

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))([num]|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+|)")
_LONGEST = 64  # characters of a number; a quantity has 19 digits before the point and 9 behind it at most
_LARGEST = 2**63 - 1
_FARTHEST = 99  # exponents beyond are never computed: 10**1000000000 takes hours
_DECIMAL = {letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)} | {
    letter: Fraction(1000**power) for power, letter in enumerate(("", *"kMGTPE"))
}
_BINARY = {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)}


def parse_quantity(resource: str, value: Any, where: str) -> int:
    """cpu in thousandths of a core, everything else in units (bytes), rounded up as the API server does.

    Extended resources (with a domain) must be whole. Raises ConfigError.
    """
    what = f"{where} of {resource}"
    text = str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else ""
    match = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ConfigError(what, seen=shown(value), wanted="a quantity such as 2, 500m or 16Gi")
    number, suffix = match.groups()
    scale = _DECIMAL.get(suffix) or _BINARY.get(suffix) or _power(suffix)
    if scale is None:
        raise ConfigError(what, seen=shown(value), wanted=f"an exponent from -{_FARTHEST} to {_FARTHEST}")
    amount = Fraction(number) * scale
    if amount < 0:
        raise ConfigError(what, seen=shown(value), wanted="nothing below zero")
    if "/" in resource and amount.denominator != 1:
        raise ConfigError(what, seen=shown(value), wanted="a whole number")
    if amount > _LARGEST:
        raise ConfigError(what, seen=shown(value), wanted=f"at most {_LARGEST}")
    if resource == "cpu":
        amount *= 1000
    return -(-amount.numerator // amount.denominator)


def _power(suffix: str) -> Fraction | None:
    """Ten to the exponent of "e3", or None where it is too far."""
    sign, digits = suffix[1:2], suffix[1:].lstrip("+-").lstrip("0") or "0"
    if len(digits) > 2:
        return None
    return Fraction(10) ** (-int(digits) if sign == "-" else int(digits))
