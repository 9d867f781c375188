"""`gpulet explain` tells what the runtime does: the same object, and nothing is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulet.sim import node as sim
from support.containers import config, pod
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def explain(machine: Machine, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from gpulet.commands.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, "explain", *arguments, "--config", str(machine.config_file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def told(machine: Machine, spec: dict[str, Any]) -> dict[str, Any]:
    path = machine.make(spec)
    before = path.read_bytes()
    done = explain(machine, "bundle", str(machine.bundle), "--json")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == before
    assert not (machine.bundle / "rootfs/etc/ld.so.cache").exists()
    data: dict[str, Any] = json.loads(done.stdout)
    return data


@pytest.mark.parametrize(
    ("env", "mode"),
    [((f"{V}=1",), "auto"), (("CUDA_VERSION=11.0",), "auto"), (("A=1",), "auto"), ((f"{V}=all",), "legacy")],
)
def test_what_it_tells_is_what_the_runtime_does(machine: Machine, env: tuple[str, ...], mode: str) -> None:
    machine.configure(runtime=f"mode = '{mode}'")
    explained = told(machine, config(*env))
    assert explained["config_json"]["after"] == machine.create(config(*env))
    assert explained["config_json"]["changed"] is (env != ("A=1",))
    assert [rule["name"] for rule in explained["trace"]]


def test_the_plan_has_a_reason_for_every_item(machine: Machine) -> None:
    injection = told(machine, config(f"{V}=1"))["injection"]
    assert [item for item in (*injection["devices"], *injection["mounts"]) if not item["why"]] == []


@pytest.mark.root
def test_the_injection_told_is_what_the_runtime_carries_out(machine: Machine, tmp_path: Path) -> None:
    """Item by item: every node, mount and variable in config.json, every link and file beneath the root."""
    node = sim.create(tmp_path / "node", "h100x8", gpus=2)
    machine.root = node.root
    machine.configure(rest=f"[gpulet]\nstate-dir = '{tmp_path}/state'\n")
    spec = config(f"{V}=1", "NVIDIA_DRIVER_CAPABILITIES=all")
    spec["mounts"].append({"destination": "/dev", "type": "tmpfs", "source": "tmpfs"})
    explained = told(machine, spec)
    assert not (tmp_path / "state").exists()
    people = explain(machine, "bundle", str(machine.bundle)).stdout
    after = machine.create(spec)
    injection = explained["injection"]
    nodes = {entry["path"]: (entry["major"], entry["minor"]) for entry in after["linux"]["devices"]}
    assert nodes == {item["path"]: (item["major"], item["minor"]) for item in injection["devices"]}
    bound = {entry["destination"]: entry["source"] for entry in after["mounts"]}
    told_mounts = {item["path"]: item["source"] for item in injection["mounts"]}
    (laid,) = explained["laid"]
    others = {"/proc": "proc", "/dev": "tmpfs", "/dev/dri/by-path": laid["path"]}
    assert bound == told_mounts | others
    assert {name: os.readlink(f"{laid['path']}/{name}") for name in os.listdir(laid["path"])} == laid["links"]
    assert f"/dev/dri/by-path <- {laid['path']}" in people
    for name, value in injection["env"]:
        assert f"{name}={value}" in after["process"]["env"]
    root = machine.bundle / "rootfs"
    for link in explained["rootfs"]["links"]:
        assert os.readlink(root / link["path"].lstrip("/")) == link["target"]
        assert f"{link['path']} -> {link['target']}" in people
    assert "hooks" not in after


def test_people_read_the_rules_the_plan_and_the_trap(machine: Machine) -> None:
    machine.make(config("CUDA_VERSION=11.0", annotations=pod()))
    text = explain(machine, "bundle", str(machine.bundle)).stdout
    assert text.startswith("default/two/main: gets all")
    assert "legacy image: CUDA_VERSION=11.0  process.env[1]" in text
    assert "/dev/nvidia1 (c 195:1, rwm)  GPU 1" in text
    assert "The trap: this container asked for no GPU" in text
    assert 'grants = "kubelet"' in text


def test_a_container_left_alone(machine: Machine) -> None:
    machine.make(config("A=1"))
    text = explain(machine, "bundle", str(machine.bundle)).stdout
    assert "left alone (asks for no GPU)" in text
    assert "Nothing is changed" in text
    assert "trap" not in text


def test_what_fails_in_the_runtime_fails_here(machine: Machine) -> None:
    machine.make(config(f"{V}=9"))
    done = explain(machine, "bundle", str(machine.bundle))
    assert done.returncode == 1
    assert "NVIDIA_VISIBLE_DEVICES=9" in done.stdout
    assert len(done.stderr.splitlines()) == 1


def test_requirements_clause_by_clause(machine: Machine, tmp_path: Path) -> None:
    done = explain(machine, "require", "cuda>=99 driver>=570,driver<571", "--json")
    assert done.returncode == 0, done.stderr
    clauses = json.loads(done.stdout)["expressions"][0]["clauses"]
    assert [(c["text"], c["holds"]) for c in clauses] == [
        ("cuda>=99", False),
        ("driver>=570", True),
        ("driver<571", True),
    ]
    env = tmp_path / "env"
    env.write_text("PATH=/bin\nNVIDIA_REQUIRE_CUDA=cuda>=99\n")
    done = explain(machine, "require", "--image-env", str(env))
    assert done.returncode == 1
    assert "does not hold" in done.stdout
    assert explain(machine, "require").returncode == 2
    env.write_bytes(b"A=\xff\n")
    done = explain(machine, "require", "--image-env", str(env))
    assert f"no NVIDIA_REQUIRE_* in {env}" in done.stderr
