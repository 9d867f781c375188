"""Kubernetes quantities ("500m", "16Gi", "1e3") as whole numbers of the smallest unit that is counted."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from gpulet.errors import ConfigError

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+|)")
_DECIMAL = {"m": Fraction(1, 1000), "": Fraction(1)} | {
    letter: Fraction(1000**power) for power, letter in enumerate("kMGTPE", start=1)
}
_BINARY = {f"{letter}i": Fraction(1024**power) for power, letter in enumerate("KMGTPE", start=1)}


def parse_quantity(resource: str, value: Any, where: str) -> int:
    """cpu in thousandths of a core, everything else in units (bytes), rounded up as the API server does.

    Extended resources (with a domain) must be whole. Raises ConfigError.
    """
    match = None if isinstance(value, bool) else _QUANTITY.fullmatch(str(value))
    if match is None:
        raise ConfigError(f"{where} of {resource}", seen=repr(value), wanted="a quantity such as 2, 500m or 16Gi")
    number, suffix = match.groups()
    scale = _DECIMAL.get(suffix) or _BINARY.get(suffix) or Fraction(10) ** int(suffix[1:])
    amount = Fraction(number) * scale
    if amount < 0:
        raise ConfigError(f"{where} of {resource}", seen=repr(value), wanted="nothing below zero")
    if "/" in resource and amount.denominator != 1:
        raise ConfigError(f"{where} of {resource}", seen=repr(value), wanted="a whole number")
    if resource == "cpu":
        amount *= 1000
    return -(-amount.numerator // amount.denominator)
