from __future__ import annotations

import pytest

from gpulet.errors import GpuletError
from gpulet.sim.pods import ContainerSpec, Pod
from gpulet.sim.scheduler import Node, assign, default_nodes, schedule, unassign

GPU = "nvidia.com/gpu"


def pod(requests=None, **fields) -> Pod:
    return Pod("p", (ContainerSpec("c", requests=requests or {}),), **fields)


@pytest.mark.parametrize("requests", [{}, {GPU: 1}, {GPU: 8}, {"cpu": 1000}])
def test_the_free_node_wins(requests):
    placement = schedule(pod(requests), default_nodes(8))
    assert (placement.node, placement.message) == ("gpu-free", "Successfully assigned default/p to gpu-free")


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ({GPU: 9}, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
        ({"nvidia.com/mig-1g.10gb": 1}, "0/3 nodes are available: 3 Insufficient nvidia.com/mig-1g.10gb."),
        (
            {GPU: 1, "cpu": 95_000},
            "0/3 nodes are available: 2 Insufficient nvidia.com/gpu, 3 Insufficient cpu.",
        ),
    ],
)
def test_what_fits_nowhere(requests, message):
    placement = schedule(pod(requests), default_nodes(8))
    assert (placement.node, placement.message) == (None, message)


def test_reasons_are_counted_and_sorted():
    nodes = [
        Node("a", {"zone": "1"}, {"cpu": 1000}),
        Node("b", {"zone": "2"}, {"cpu": 1000}),
        Node("c", {"zone": "1"}, {"cpu": 1000}, taints=("gpu=yes:NoSchedule",)),
        Node("d", {"zone": "1"}, {"cpu": 1000}, taints=("down:NoExecute",)),
    ]
    placement = schedule(pod({"cpu": 2000}, node_selector={"zone": "1"}), nodes)
    assert placement.message == (
        "0/4 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's node affinity/selector, "
        "1 node(s) had untolerated taint {down: }, 1 node(s) had untolerated taint {gpu: yes}."
    )
    assert schedule(pod(), []).message == "no nodes available to schedule pods"


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations(toleration, fits):
    nodes = [Node("a", taints=("gpu=yes:NoSchedule",)), Node("z", taints=("x=y:NoSchedule",))]
    assert (schedule(pod(tolerations=(toleration,)), nodes).node == "a") is fits


def test_a_preference_keeps_nobody_away():
    assert schedule(pod(), [Node("a", taints=("x:PreferNoSchedule",))]).node == "a"


def test_least_allocated_then_the_name():
    size = {"cpu": 1000, "memory": 1 << 30}
    nodes = [Node("c", {}, size), Node("b", {}, size), Node("a", {}, size, {"cpu": 500})]
    assert schedule(pod(), nodes).node == "b"


def test_assigning_takes_and_gives_back():
    nodes = default_nodes(2)
    two = pod({GPU: 2})
    assign(two, nodes, "gpu-free")
    assert schedule(two, nodes).node is None
    unassign(two, nodes, "gpu-free")
    assert schedule(two, nodes).node == "gpu-free"
    with pytest.raises(GpuletError, match="no such node: x"):
        assign(two, nodes, "x")
