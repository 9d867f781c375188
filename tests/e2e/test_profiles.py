"""The main job on every kind of machine that NVIDIA's kernel driver serves: what each container saw, by GPU minor."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulet.sim import description
from gpulet.sim.description import Description

Report = dict[str, Any]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes, mounts and namespaces are root's"),
    pytest.mark.skipif(shutil.which("runc") is None, reason="needs runc"),
]

MACHINES = {
    name: one for name in description.profiles() if (one := description.load_profile(name)).platform == "discrete"
}
PODS = Path(__file__).parents[2] / "examples/pods"
TWO = str(PODS / "01-two-gpus.yaml")
WANTS = {"two-gpus": [2], "one-each": [1, 1], "no-gpu": [0], "legacy-guarded": [0], "nine-gpus": [9]}


@functools.cache  # each run starts containers: one report serves every question that it answers
def demo(profile: str, *arguments: str) -> Report:
    command = [str(Path(sys.executable).with_name("gpulet")), "demo", "--json", "--profile", profile, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr or json.loads(done.stdout)["wrong"]
    report: Report = json.loads(done.stdout)
    return report


def check_seen(machine: Description, container: Report, wanted: set[str]) -> None:
    """Holds one container's report against the machine's description: by uuid, by device node and by refusal."""
    minors = {gpu.uuid: gpu.minor for gpu in machine.gpus}
    seen = container["seen"]
    nodes = {int(found[1]) for name in seen["devices"] if (found := re.fullmatch(r"/dev/nvidia(\d+)", name))}
    assert set(seen["nvml"]) == wanted
    assert nodes == {minors[uuid] for uuid in wanted}
    assert set(seen["denied"]) == set(minors.values()) - nodes
    if wanted:
        assert "/dev/nvidiactl" in seen["devices"] and seen["libraries"]["libcuda.so.1"]
    assert not [name for name in seen["devices"] if re.search("nvswitch|imex|nvidia-cap", name)], (
        "nobody asked for them"
    )


def check_pods(machine: Description, report: Report) -> int:
    """Checks every Pod; gives how many containers ran."""
    uuids = {gpu.uuid for gpu in machine.gpus}
    assert set(report["node"]["gpus"]) == uuids
    taken: set[str] = set()
    ran = 0
    for pod in report["pods"]:
        counts = WANTS.get(pod["name"], [])
        fits = sum(counts) <= len(uuids) - len(taken)
        if pod["name"] == "fits-nowhere" or not fits:
            assert pod["phase"] == "Pending" and "Insufficient" in pod["message"]
            continue
        assert pod["phase"] == "Running", pod["message"]
        for number, container in enumerate(pod["containers"]):
            allocated = set(container["allocated"])
            everything = pod["name"] == "legacy-trap"  # the trap: nothing asked for, all of them seen
            check_seen(machine, container, uuids if everything else allocated)
            if not everything:
                assert len(allocated) == counts[number] and not allocated & taken
            taken |= allocated
            ran += 1
    return ran


@pytest.mark.parametrize("profile", MACHINES)
def test_the_examples_on_every_machine(profile: str) -> None:
    machine, report = MACHINES[profile], demo(profile)
    assert report["ok"] and len(report["pods"]) == len(list(PODS.glob("*.yaml")))
    assert report["node"]["driver"] == machine.driver
    ran = check_pods(machine, report)
    assert ran == (3 if len(machine.gpus) == 1 else 7 if len(machine.gpus) > 12 else 6)


@pytest.mark.parametrize(
    ("strategy", "path"), [*itertools.product(("envvar", "volume-mounts"), ("runtime", "hook")), ("cdi-cri", "runtime")]
)
def test_by_index_where_the_index_is_not_the_minor(strategy: str, path: str) -> None:
    report = demo("sparse", "--pod", TWO, "--identify", "index", "--strategy", strategy, "--path", path)
    assert check_pods(MACHINES["sparse"], report) == 1


def test_four_pci_domains_by_the_hook_too() -> None:
    """GPUs whose PCI addresses differ in the domain alone."""
    assert check_pods(MACHINES["gb200x4"], demo("gb200x4", "--pod", TWO, "--path", "hook")) == 1


def test_two_gpus_of_a_mesh_are_two_that_share_two_nvlinks() -> None:
    machine = MACHINES["dgx-1v"]
    pair = next(pod for pod in demo("dgx-1v")["pods"] if pod["name"] == "two-gpus")["containers"][0]["allocated"]
    first, second = (gpu for gpu in machine.gpus if gpu.uuid in pair)
    assert first.links.count(str(second.index)) == 2


def test_two_gpus_without_nvlink_are_two_below_one_switch() -> None:
    machine = MACHINES["rtxpro6000x8"]
    pair = next(pod for pod in demo("rtxpro6000x8")["pods"] if pod["name"] == "two-gpus")["containers"][0]["allocated"]
    first, second = (gpu for gpu in machine.gpus if gpu.uuid in pair)
    assert machine.level(first, second) == description.LEVELS["switch"]
