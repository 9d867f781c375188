"""errors.py: one line, of a length that a log can bear."""

from __future__ import annotations

import pytest

from gpulet.errors import GpuletError, RequestError, cut
from gpulet.request.requirements import Subject, check


def test_one_line_with_all_four_answers() -> None:
    error = GpuletError("what\nis", seen="seen", wanted="wanted", remedy="do this")
    assert str(error) == "what is: seen (wanted wanted); do this"


def test_what_is_short_stays_whole() -> None:
    path = "/x" * 400
    assert cut(path) == path


def test_of_what_is_long_both_ends_and_the_length_stay() -> None:
    text = "a" * 5000 + "b" * 5000
    seen = cut(text)
    assert len(seen) < 1000
    assert seen.startswith("aaa")
    assert seen.endswith("bbb")
    assert "(9200 characters)" in seen


@pytest.mark.parametrize(
    "expression",
    [
        "cuda>=99," + "driver>=1," * 2700,
        "driver<1 " * 3000,
        "cuda>=9" + "9" * 27000,
        "x" * 27000,
        ",".join(f"brand!=tesla{i}" for i in range(2000)) + ",brand=no",
    ],
)
def test_a_long_requirement_makes_no_long_message(expression: str) -> None:
    with pytest.raises(RequestError) as caught:
        check([expression], [Subject("12.8", "570.86.15", brand="nvidia")])
    assert len(str(caught.value)) < 2048
