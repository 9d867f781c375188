from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulet.errors import ConfigError
from gpulet.sim.quantity import parse_quantity


@pytest.mark.parametrize(
    ("resource", "text", "value"),
    [
        ("cpu", "500m", 500),
        ("cpu", 2, 2000),
        ("cpu", "0.1", 100),
        ("cpu", 0.1, 100),
        ("cpu", "100n", 1),
        ("cpu", "1500u", 2),
        ("memory", "16Gi", 16 << 30),
        ("memory", "1.5G", 1_500_000_000),
        ("memory", "1e3", 1000),
        ("memory", "1E3", 1000),
        ("memory", "1E", 10**18),
        ("memory", "+.5k", 500),
        ("memory", "100m", 1),
        ("memory", "1e-99", 1),
        ("memory", "9223372036854775807", 2**63 - 1),
        ("nvidia.com/gpu", "2", 2),
        ("nvidia.com/gpu", "2k", 2000),
        ("nvidia.com/gpu", "2000m", 2),
    ],
)
def test_quantities(resource, text, value):
    assert parse_quantity(resource, text, "here") == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1ki", True, None, "0x10", [], {}, "1e", "1e3k", "١", "1\n", "inf"])
def test_no_quantities(text):
    with pytest.raises(ConfigError, match=r"here of memory: .*wanted a quantity such as"):
        parse_quantity("memory", text, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e1000000000", "an exponent from -99 to 99"),
        ("1e9999999", "an exponent from -99 to 99"),
        ("1e-9999999", "an exponent from -99 to 99"),
        ("1e" + "9" * 5000, "a quantity such as"),
        ("9" * 5000, "a quantity such as"),
        ("1e19", "at most 9223372036854775807"),
        ("10E", "at most 9223372036854775807"),
        ("-1", "nothing below zero"),
    ],
)
def test_quantities_that_would_take_for_ever(text, message):
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=message) as caught:
        parse_quantity("memory", text, "here")
    assert time.perf_counter() - started < 1
    assert len(str(caught.value)) < 250


def test_extended_resources_are_whole():
    with pytest.raises(ConfigError, match=r"here of a\.com/b: '500m' \(wanted a whole number\)"):
        parse_quantity("a.com/b", "500m", "here")


@given(st.one_of(st.text(), st.floats(), st.integers(), st.from_regex(r"[-+.0-9]{1,9}([eE][-+]?[0-9]{1,9}|Ki|m)?")))
def test_any_value_is_a_quantity_or_an_error(value):
    try:
        assert 0 <= parse_quantity("cpu", value, "here") <= 1000 * 2**63
    except ConfigError as error:
        assert str(error).isprintable()
