"""NVML asked by a child that gave up its privileges."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulet.errors import GpuletError, NodeError, NvmlError
from gpulet.launch import nvml_child
from gpulet.node import nvml
from gpulet.sim import node as sim
from gpulet.sim.node import SimNode

NOBODY = (65534, 65534)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "t4x1")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0:0", (0, 0)), ("1000:44", (1000, 44)), ("root", (0, 0)), ("0", (0, 0)), ("7:root", (7, 0)), ("root:7", (0, 7))],
)
def test_users_by_number_and_name(text: str, wanted: tuple[int, int]) -> None:
    assert nvml_child.parse_user(text) == wanted


def test_no_name_is_who_we_are() -> None:
    assert nvml_child.parse_user("") == (os.geteuid(), os.getegid())


@pytest.mark.parametrize("text", ["nosuchuser", "nobody:nosuchgroup", "4000111222"])
def test_unknown_users(text: str) -> None:
    with pytest.raises(KeyError):
        nvml_child.parse_user(text)


def _seen(user: tuple[int, int], keep: int) -> dict[str, str]:
    """The identities and capabilities of a process that became a user."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            nvml_child.become(user, keep)
            os.write(writing, Path("/proc/self/status").read_bytes())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.root
@pytest.mark.parametrize("user", [NOBODY, (0, 0)])
@pytest.mark.parametrize("keep", [0, 1 << nvml_child.CAP_DAC_READ_SEARCH])
def test_nothing_is_left_of_roots_rights(user: tuple[int, int], keep: int) -> None:
    seen = _seen(user, keep)
    assert set(seen["Uid"].split()) == {str(user[0])}
    assert set(seen["Gid"].split()) == {str(user[1])}
    assert user == (0, 0) or not seen["Groups"]
    assert (seen["CapPrm"], seen["CapEff"], seen["CapInh"]) == (f"{keep:016x}", f"{keep:016x}", f"{0:016x}")
    assert seen["NoNewPrivs"] == "1"


@pytest.mark.root
def test_the_child_answers_what_nvml_says_and_can_open_what_its_user_can(node: SimNode) -> None:
    assert nvml_child.facts(str(node.root), NOBODY) == nvml.facts(str(node.root), links=False)
    device = node.root / "dev/nvidia0"
    device.chmod(0o600)
    try:
        assert nvml_child.facts(str(node.root), NOBODY).gpus == ()
        assert len(nvml_child.facts(str(node.root), (0, 0)).gpus) == 1
    finally:
        device.chmod(0o666)


@pytest.mark.root
def test_errors_reach_us_whole(tmp_path: Path) -> None:
    with pytest.raises(NvmlError, match=r"libnvidia-ml") as caught:
        nvml_child.facts(str(tmp_path), NOBODY)
    assert caught.value.code == 12


def test_a_child_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> GpuletError:
        os._exit(9)

    monkeypatch.setattr(nvml_child, "_answer", die)
    with pytest.raises(NodeError, match="exit code 9"):
        nvml_child.facts("/", NOBODY)
