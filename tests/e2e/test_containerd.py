"""gpulet-runtime in a real containerd that is spoken to as the kubelet does (CRI), on a simulated node."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpulet.engines.launchers import write_launchers
from gpulet.sim import node as sim
from gpulet.sim import rootfs
from gpulet.sim.containerd import Containerd, Pod, image_file
from gpulet.sim.node import SimNode

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.skipif(not (shutil.which("containerd") and shutil.which("runc")), reason="needs containerd and runc"),
]
V = "NVIDIA_VISIBLE_DEVICES"
UID = "50aa85bb-982e-49cd-b949-24046615e118"
SLEEP = ["sleep", "1000"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, node: SimNode) -> Path:
    """The folder with the programs, config.toml and the ledger, in which GPU 5 is the container `given`'s."""
    folder = tmp_path_factory.mktemp("engine")
    write_launchers(folder / "bin")
    entry = {
        "PodUID": UID,
        "ContainerName": "given",
        "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": {"0": [node.gpus[5].uuid]},
    }
    (folder / "ledger").write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    common = f"[nvidia-container-cli]\nroot = '{node.root}'\n[nvidia-container-runtime]\ndebug = '{folder}/log'\n"
    common += f"[gpulet]\nstate-dir = '{folder}/state'\n"
    for name, policy in (
        ("env", ""),
        ("kubelet", f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{folder}/ledger'\n"),
    ):
        (folder / f"{name}.toml").write_text(common + policy)
        program = folder / f"bin/with-{name}"
        program.write_text(f'#!/bin/sh\nGPULET_CONFIG={folder}/{name}.toml exec {folder}/bin/gpulet-runtime "$@"\n')
        program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def engine(place: Path) -> Iterator[Containerd]:
    root = rootfs.create(place / "rootfs")
    with Containerd({name: place / f"bin/with-{name}" for name in ("env", "kubelet")}) as daemon:
        daemon.load(image_file(place, root))
        yield daemon


@pytest.fixture
def pod(engine: Containerd, request: pytest.FixtureRequest) -> Iterator[Pod]:
    one = engine.pod("two", UID, request.param)
    yield one
    one.remove()


def gpus(seen: dict[str, Any]) -> list[str]:
    return sorted(name for name in seen["devices"] if name.removeprefix("/dev/nvidia").isdigit())


def probe(pod: Pod, container: str) -> dict[str, Any]:
    code, text = pod.run(container, rootfs.PROBE)
    assert code == 0, text
    seen: dict[str, Any] = json.loads(text)
    return seen


@pytest.mark.parametrize("pod", ["env"], indirect=True)
def test_a_container_has_the_gpus_that_it_asks_for(pod: Pod, node: SimNode, place: Path) -> None:
    two, none = (pod.create(name, SLEEP, env) for name, env in (("two", {V: "1,3"}), ("none", {})))
    pod.start(two)
    pod.start(none)
    seen = probe(pod, two)
    assert gpus(seen) == ["/dev/nvidia1", "/dev/nvidia3"]
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[1].uuid, node.gpus[3].uuid]
    assert seen["denied"][:4] == [0, 2, 4, 5]
    assert "/etc/ld.so.cache" not in {file["path"] for file in seen["files"]}, "it is written beneath the root"
    assert (gpus(probe(pod, none)), probe(pod, none)["nvml"]) == ([], [])
    lines = [json.loads(line) for line in (place / "log").read_text().splitlines()]
    told = [line for line in lines if line.get("container") == "two"]
    assert (told[-1]["pod"], told[-1]["devices"]) == ("default/two", "1,3")


@pytest.mark.parametrize("pod", ["env"], indirect=True)
def test_new_limits_take_no_gpu_away(pod: Pod) -> None:
    """The kubelet's CPU manager has an engine write a container's control groups anew."""
    one = pod.create("one", SLEEP, {V: "2"})
    pod.start(one)
    pod.limit(one, shares=512)
    assert probe(pod, one)["opened"] == [2]


@pytest.mark.parametrize("pod", ["kubelet"], indirect=True)
def test_the_kubelets_ledger_knows_the_container_by_the_engines_word(pod: Pod, node: SimNode, place: Path) -> None:
    given, other = (pod.create(name, SLEEP, {V: "all"}) for name in ("given", "other"))
    pod.start(given)
    pod.start(other)
    seen = probe(pod, given)
    assert (gpus(seen), [gpu["uuid"] for gpu in seen["nvml"]]) == (["/dev/nvidia5"], [node.gpus[5].uuid])
    assert gpus(probe(pod, other)) == []
    assert "no GPU: the kubelet allocated no GPU to it" in (place / "log").read_text()


@pytest.mark.parametrize("pod", ["env"], indirect=True)
def test_the_reason_of_a_failure_reaches_the_kubelet(pod: Pod) -> None:
    one = pod.create("one", SLEEP, {V: "99"})
    with pytest.raises(grpc.RpcError) as failed:
        pod.start(one)
    assert "unknown device: '99'" in failed.value.details()
