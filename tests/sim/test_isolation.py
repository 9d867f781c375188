"""What the demo says where root is not root enough."""

from __future__ import annotations

import pytest

from gpulet.sim.isolation import NEEDED, lacking

MACHINE = "         0          0 4294967295\n"
WHOLE = sum(1 << number for number in range(41))


def status(held: int) -> str:
    return f"Name:\tpython\nCapInh:\t0\nCapEff:\t{held:016x}\n"


def test_the_machines_root() -> None:
    assert lacking(status(WHOLE), MACHINE) == ""


def test_root_of_a_user_namespace() -> None:
    assert "user namespace" in lacking(status(WHOLE), "         0       1000          1\n")


@pytest.mark.parametrize("name", NEEDED)
def test_a_capability_taken_away(name: str) -> None:
    assert name in lacking(status(WHOLE & ~(1 << NEEDED[name])), MACHINE)


def test_the_resource_capability_is_not_needed() -> None:
    """Virtual machines and containers often lack CAP_SYS_RESOURCE (24): no value that we write lowers oom_score_adj."""
    assert lacking(status(WHOLE & ~(1 << 24)), MACHINE) == ""
