"""What the runtime leaves for the metrics: one count for each container that asks for GPUs, also where it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulet.injection import tally
from support.containers import config, pod
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"


def counts(machine: Machine) -> dict[tuple[str, str], int]:
    return {key: total[1] for key, total in tally.read(f"{machine.folder}/state").items()}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.configure(rest=f"[gpulet]\nstate-dir = '{tmp_path}/state'\n")
    return machine


def test_each_outcome_has_its_count(machine: Machine) -> None:
    machine.create(config(f"{V}=0"))
    machine.create(config(f"{V}=1"))
    machine.create(config())  # asks for nothing
    machine.run("gpulet-runtime", "delete", "x")
    assert counts(machine) == {("jit-cdi", "ok"): 2}
    assert 0 < tally.read(f"{machine.folder}/state")["jit-cdi", "ok"][0] < 20_000_000
    machine.make(config(f"{V}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99.0"))
    assert machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x").returncode == 1
    (machine.bundle / "config.json").write_text("no JSON")
    assert machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x").returncode == 1
    assert counts(machine) == {("jit-cdi", "ok"): 2, ("auto", "refused"): 1, ("auto", "error"): 1}


def test_gpus_that_the_policy_keeps_back(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text('{"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}}')
    rest = f"[gpulet]\nstate-dir = '{tmp_path}/state'\n[gpulet.policy]\ngrants = 'kubelet'\n"
    machine.configure(rest=rest + f"checkpoint = '{tmp_path}/checkpoint'\n")
    machine.create(config(f"{V}=all", annotations=pod()))
    assert counts(machine) == {("jit-cdi", "denied"): 1}
