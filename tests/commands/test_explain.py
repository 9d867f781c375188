"""`gpulet explain` tells what the runtime does: the same object, and nothing is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpulet.commands import explain_ahead
from gpulet.errors import UsageError
from gpulet.launch import programs
from gpulet.launch.beside import Laid
from gpulet.sim import node as sim
from support import driver_tree
from support.containers import config, pod
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def explain(machine: Machine, *arguments: str, around: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    program = "import sys; from gpulet.commands.main import main; sys.exit(main())"
    return subprocess.run(
        [*around, sys.executable, "-c", program, "explain", *arguments, "--config", str(machine.config_file)],
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


@pytest.mark.root
@pytest.mark.parametrize("inside", [0, 9])
def test_a_nodes_group_in_a_user_namespace_that_has_it_as_another_or_lacks_it(machine: Machine, inside: int) -> None:
    os.chown(machine.root / "dev/nvidia1", 0, 44)
    (machine.root / "dev/nvidia1").chmod(0o660)
    spec = config(f"{V}=1")
    spans = [{"containerID": inside, "hostID": 44, "size": 1}] if inside else []
    spec["linux"] |= {"namespaces": [{"type": "user"}], "gidMappings": spans}
    machine.make(spec)
    shown = explain(machine, "bundle", str(machine.bundle)).stdout
    assert ("group   9  opens a device node\n" in shown) is bool(inside)
    assert ("lacking group 44, which opens a device node  the container's user namespace" in shown) is (not inside)
    user = machine.create(spec)["process"].get("user", {})
    assert user.get("additionalGids", []) == ([inside] if inside else [])
    told = "group 44, which opens a device node, is left out" in (machine.folder / "log").read_text()
    assert told is (not inside)


def test_what_an_engine_brought_and_nobody_asked_for_is_told(machine: Machine) -> None:
    encode = f"/usr/lib/x86_64-linux-gnu/libnvidia-encode.so.{driver_tree.VERSION}"
    spec = config(f"{V}=void")
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    spec["mounts"].append({"destination": encode, "source": f"{machine.root}{encode}", "options": options})
    hook = {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib"]}
    spec["hooks"] = {"createContainer": [hook]}
    machine.make(spec)
    shown = explain(machine, "bundle", str(machine.bundle)).stdout
    assert f"less    mount {encode}  capabilities compute,utility" in shown


@pytest.mark.root
@pytest.mark.parametrize(("load", "said"), [("true", "the runtime first loads"), ("false", "CUDA won't work")])
def test_a_node_that_is_not_ready_for_cuda(machine: Machine, load: str, said: str) -> None:
    (machine.root / "dev/nvidia-uvm").unlink()
    machine.configure(cli=f"load-kmods = {load}")
    (note,) = told(machine, config(f"{V}=1"))["notes"]
    assert said in note
    assert "/dev/nvidia-uvm" in note
    assert not (machine.root / "dev/nvidia-uvm").exists()
    (machine.root / "proc/driver").rename(machine.folder / "driver")
    data = json.loads(explain(machine, "bundle", str(machine.bundle), "--json").stdout)
    assert "no NVIDIA kernel module" in data["refused"]
    assert bool(data["notes"]) is (load == "true")


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


DEV = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}


def foreseen(machine: Machine, spec: dict[str, Any], *around: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What explain tells, and config.json after the runtime. around: a command that both are started by."""
    runtime = machine.folder / "bin/gpulet-runtime"
    path = machine.make(spec)
    explained = explain(
        machine, "bundle", str(machine.bundle), "--json", "--runtime", str(runtime), around=around
    )  # fmt: skip
    assert explained.returncode == 0, explained.stderr
    environ = {"PATH": os.environ["PATH"], "GPULET_CONFIG": str(machine.config_file)}
    created = subprocess.run(
        [*around, str(runtime), "create", "--bundle", str(machine.bundle), "x"],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert created.returncode == 0, created.stderr
    return json.loads(explained.stdout), json.loads(path.read_text())


@pytest.mark.root
@pytest.mark.parametrize("state", ["/proc/nope", "/sys/nope", "{}/file/below", "{}/state"])
@pytest.mark.parametrize("covered", [False, True])
def test_the_ways_round_are_foreseen(machine: Machine, tmp_path: Path, state: str, covered: bool) -> None:
    """With a state folder that can't be made, and with a mount over the place: the same hooks, by the same paths."""
    (tmp_path / "file").touch()
    machine.root = sim.create(tmp_path / "node", "h100x8", gpus=2).root
    machine.configure(rest=f"[gpulet]\nstate-dir = '{state.format(tmp_path)}'\n")
    spec = config(f"{V}=1", "NVIDIA_DRIVER_CAPABILITIES=all")
    spec["mounts"] += [DEV, *([{"destination": "/etc", "source": str(tmp_path), "type": "bind"}] if covered else [])]
    explained, after = foreseen(machine, spec)
    assert explained["config_json"]["after"] == after
    hooked = covered or not state.endswith("/state")
    assert [hook["path"] for hook in after.get("hooks", {}).get("createContainer", [])] == (
        [f"{tmp_path}/bin/gpulet-cdi-hook"] if hooked else []
    )
    assert [str(tmp_path) not in note and "state folder" in note for note in explained["notes"]] == (
        [] if state.endswith("/state") else [state.startswith("/")]
    )


@pytest.mark.root
@pytest.mark.parametrize("cache", [True, False])
def test_a_root_that_is_read_only_is_foreseen(machine: Machine, tmp_path: Path, cache: bool) -> None:
    machine.configure(rest=f"[gpulet]\nstate-dir = '{tmp_path}/state'\n")
    spec = config(f"{V}=1")
    machine.make(spec)
    root = machine.bundle / "rootfs"
    if cache:
        subprocess.run(["/sbin/ldconfig", "-r", str(root), "-C", "/etc/ld.so.cache", "-X", "/usr/lib"], check=True)
    script = f'mount --bind {root} {root} && mount -o remount,ro,bind {root} && exec "$@"'
    explained, after = foreseen(machine, spec, "unshare", "--mount", "sh", "-c", script, "sh")
    assert explained["config_json"]["after"] == after
    assert len(explained["laid"]) == int(cache)
    assert ("hooks" in after) is not cache
    (note,) = explained["notes"]
    assert "Read-only file system" in note
    assert note.endswith("a cache for the loader is mounted" if cache else "left to a hook")


def test_only_what_can_lie_in_the_state_folder_is_said_to(tmp_path: Path) -> None:
    links = (("a", "../b"),)
    (tmp_path / "state/links/taken").mkdir(parents=True)
    (tmp_path / "state/file").touch()
    before = sorted(tmp_path.rglob("*"))
    for path, can in (
        ("new/links/x", True),
        ("state/links/x", True),
        ("state/links/taken", False),
        ("state/file/x", False),
    ):
        assert explain_ahead.can_lie(Laid(f"{tmp_path}/{path}", links=links)) is can
    assert not explain_ahead.can_lie(Laid("/proc/nope/params/x", b"data"))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_programs_named_are_those_beside_a_launcher(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A console script of the same name, as an environment's bin folder has one, isn't what engines start."""
    scripts = tmp_path / "venv"
    scripts.mkdir()
    for name in ("gpulet-runtime", "gpulet-cdi-hook"):
        (scripts / name).write_text("#!/bin/sh\n")
        (scripts / name).chmod(0o755)
    monkeypatch.setattr(sys, "argv", [f"{scripts}/gpulet", "explain"])
    monkeypatch.setenv("PATH", f"{scripts}:{tmp_path}/bin")
    monkeypatch.setattr(programs, "DEFAULT_PATH", ())
    with explain_ahead.in_place_of(None):
        assert programs.cdi_hook() == f"{tmp_path}/bin/gpulet-cdi-hook" != f"{scripts}/gpulet-cdi-hook"
    assert sys.argv[0] == f"{scripts}/gpulet"
    with pytest.raises(UsageError, match="--runtime"), explain_ahead.in_place_of(tmp_path / "none"):
        pass


def test_people_read_the_rules_the_plan_and_the_trap(machine: Machine) -> None:
    machine.make(config("CUDA_VERSION=11.0", annotations=pod()))
    text = explain(machine, "bundle", str(machine.bundle)).stdout
    assert text.startswith("default/two/main: gets all")
    assert "legacy image: CUDA_VERSION=11.0  process.env[1]" in text
    assert "/dev/nvidia1 (c 195:1, rwm)  GPU 1" in text
    assert "The trap: this container asked for no GPU" in text
    assert 'grants = "kubelet"' in text


def test_a_mount_without_a_destination_is_the_engines_and_no_bug_of_ours(machine: Machine) -> None:
    machine.make(config(f"{V}=1") | {"mounts": [{"source": "proc"}, {"source": "sysfs"}]})
    done = explain(machine, "bundle", str(machine.bundle))
    assert (done.returncode, done.stderr) == (0, "")
    assert "What goes in" in done.stdout


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
    env.write_text("\ufeffNVIDIA_REQUIRE_CUDA=cuda>=99\n")
    assert "does not hold" in explain(machine, "require", "--image-env", str(env)).stdout
    env.write_bytes(b"A=\xff\n")
    done = explain(machine, "require", "--image-env", str(env))
    assert f"no NVIDIA_REQUIRE_* in {env}" in done.stderr
