"""Hooks of the peer's in a bundle, which would give what the environment asks for: wherever they stand, under whatever
name, policy kubelet leaves none, and nobody who is served already is served twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.containers import CRIO, FORGED_SANDBOXES, UID, config, pod
from support.driver_tree import uuid
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"
STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
OTHER = {"path": "/bin/true", "args": ["true"]}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(params=["auto", "legacy", "cdi"])
def kubelet(machine: Machine, request: pytest.FixtureRequest) -> Machine:
    """The machine under policy kubelet in each mode, with a ledger that grants GPU 1 to the container `main`."""
    under_policy(machine, request.param)
    return machine


def under_policy(machine: Machine, mode: str, *, more: str = "") -> None:
    entry = {"PodUID": UID, "ContainerName": "main", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"-1": [uuid(1)]}}
    book = machine.folder / "book"
    book.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    policy = f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{book}'\n{more}"
    machine.configure(runtime=f"mode = '{mode}'", rest=policy)


def hooked(path: str, *stages: str, **more: Any) -> dict[str, Any]:
    """A container that sets `all`, with a hook of this path before another one, in each of the stages."""
    hook = {"path": path, "args": [Path(path).name, "prestart"]}
    return config(f"{V}=all", **more) | {"hooks": {stage: [hook, OTHER] for stage in stages or STAGES}}


def paths(config: dict[str, Any]) -> dict[str, list[str]]:
    return {stage: [hook["path"] for hook in hooks] for stage, hooks in config.get("hooks", {}).items()}


LEFT = {stage: [OTHER["path"]] for stage in STAGES}


@pytest.mark.parametrize(
    "name", ["nvidia-container-runtime-hook", "nvidia-container-runtime-hook.real", "nvidia-container-toolkit", "link"]
)
def test_in_no_stage_and_under_no_name(kubelet: Machine, name: str) -> None:
    path = kubelet.folder / "bin" / name
    if name == "link":
        real = path.with_name("nvidia-container-runtime-hook")
        real.write_text("#!/bin/sh\n")
        path.symlink_to(real)
    denied = hooked(str(path), annotations=pod(container="side"))
    assert kubelet.create(denied) == denied | {"hooks": {stage: [OTHER] for stage in STAGES}}


def test_a_link_that_cannot_be_read_is_nobodys(kubelet: Machine) -> None:
    thread = next((pid for pid in range(2, 400) if unreadable(pid)), 0)
    if not thread:
        pytest.skip("no kernel thread in sight")
    foreign = hooked(f"/proc/{thread}/exe", annotations=pod(container="side"))
    assert kubelet.create(foreign) == foreign
    named = hooked(f"/proc/{thread}/exe/nvidia-container-runtime-hook", annotations=pod(container="side"))
    assert kubelet.create(named) == named | {"hooks": {stage: [OTHER] for stage in STAGES}}


def unreadable(pid: int) -> bool:
    try:
        os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return os.path.lexists(f"/proc/{pid}/exe")
    return False


def test_nor_beside_a_granted_gpu(machine: Machine) -> None:
    asked = hooked("/usr/bin/nvidia-container-runtime-hook", annotations=pod())
    under_policy(machine, "auto")
    after = machine.create(asked)
    assert paths(after) == LEFT
    assert "/dev/nvidia1" in [node["path"] for node in after["linux"]["devices"]]
    under_policy(machine, "legacy")
    after = machine.create(asked)
    assert paths(after) == LEFT | {"prestart": ["/bin/true", f"{machine.folder}/bin/gpulet-hook"]}
    assert machine.create({}, again=True) == after


def test_nor_in_a_pause_container(kubelet: Machine) -> None:
    sandbox = hooked("/usr/bin/nvidia-container-runtime-hook", annotations=pod(kind="sandbox"))
    assert kubelet.create(sandbox) == sandbox | {"hooks": {stage: [OTHER] for stage in STAGES}}


@pytest.mark.parametrize("annotations", FORGED_SANDBOXES)
def test_nor_in_one_that_calls_itself_so(kubelet: Machine, annotations: dict[str, str]) -> None:
    forged = hooked("/usr/bin/nvidia-container-runtime-hook", annotations=annotations)
    assert kubelet.create(forged) == forged | {"hooks": {stage: [OTHER] for stage in STAGES}}
    assert "contradict" in (kubelet.folder / "log").read_text()


def test_whoever_calls_itself_so_is_refused_where_configured(machine: Machine) -> None:
    under_policy(machine, "auto", more="untrusted-env = 'deny'\n")
    path = machine.make(
        hooked(
            "/usr/bin/nvidia-container-runtime-hook", annotations=CRIO | {"io.kubernetes.cri.container-type": "sandbox"}
        )
    )
    before = path.read_bytes()
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert "no more than the kubelet allocated" in done.stderr
    assert machine.called("low") is None
    assert path.read_bytes() == before


@pytest.mark.parametrize("stage", STAGES)
def test_under_policy_env_who_is_served_by_a_hook_gets_no_second(machine: Machine, stage: str) -> None:
    served = hooked("/usr/bin/nvidia-container-runtime-hook", stage)
    machine.configure(runtime="mode = 'legacy'")
    after = machine.create(served)
    if stage in ("prestart", "createRuntime"):
        assert after == served
    else:  # there it finds no namespaces that are the container's, or not the host's files: it would serve nobody
        assert f"{machine.folder}/bin/gpulet-hook" in paths(after)["prestart"]
    machine.configure()
    assert paths(machine.create(served)) == {stage: ["/bin/true"]}, "served by the runtime itself"
    sandbox = hooked("/usr/bin/nvidia-container-runtime-hook", stage, annotations=pod(kind="sandbox"))
    assert machine.create(sandbox) == sandbox
