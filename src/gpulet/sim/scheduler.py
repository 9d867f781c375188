"""Placing Pods on nodes by what they ask for, with the words of the scheduler that everybody reads in events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpulet.errors import GpuletError
from gpulet.sim.pods import Pod

GIB = 1 << 30
DEFAULT_REQUEST = {"cpu": 100, "memory": 200 << 20}  # what the scheduler's scoring assumes of a Pod that asks nothing


@dataclass
class Node:
    """A node. capacity, allocated: as in ContainerSpec.requests; taints: "key=value:effect" or "key:effect"."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    allocated: dict[str, int] = field(default_factory=dict)
    taints: tuple[str, ...] = ()

    def free(self, resource: str) -> int:
        """How much of a resource is left."""
        return self.capacity.get(resource, 0) - self.allocated.get(resource, 0)


@dataclass(frozen=True)
class Placement:
    """Where a Pod goes. node: None while nothing fits; message: the event's text."""

    node: str | None
    message: str


def schedule(pod: Pod, nodes: Sequence[Node]) -> Placement:
    """The best node for a Pod, without taking it (see `assign`). Equal nodes are told apart by name."""
    if pod.node_name:
        return _by_hand(pod, nodes)
    reasons: Counter[str] = Counter()
    fitting = []
    for node in nodes:
        against = _against(pod, node)
        reasons.update(against)
        if not against:
            fitting.append(node)
    if fitting:
        best = min(fitting, key=lambda node: (-_score(pod, node), node.name))
        return Placement(best.name, f"Successfully assigned {pod.namespace}/{pod.name} to {best.name}")
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
    return Placement(None, f"0/{len(nodes)} nodes are available: {listed}." if nodes else
                     "no nodes available to schedule pods")  # fmt: skip


def _by_hand(pod: Pod, nodes: Sequence[Node]) -> Placement:
    """A Pod whose manifest names its node: the scheduler isn't asked, and whether it fits is the kubelet's question."""
    if any(node.name == pod.node_name for node in nodes):
        return Placement(pod.node_name, f"spec.nodeName is {pod.node_name}: no scheduling")
    names = ", ".join(node.name for node in nodes) or "none"
    return Placement(None, f"spec.nodeName is {pod.node_name}, and there is no such node (nodes: {names})")


def assign(pod: Pod, nodes: Sequence[Node], name: str) -> None:
    """Take the Pod's requests from a node. Raises GpuletError for a node that isn't there."""
    _count(pod, nodes, name, 1)


def unassign(pod: Pod, nodes: Sequence[Node], name: str) -> None:
    """Give the Pod's requests back."""
    _count(pod, nodes, name, -1)


def _count(pod: Pod, nodes: Sequence[Node], name: str, sign: int) -> None:
    node = next((node for node in nodes if node.name == name), None)
    if node is None:
        raise GpuletError("no such node", seen=name, wanted=", ".join(node.name for node in nodes))
    for resource, amount in pod.requests().items():
        node.allocated[resource] = node.allocated.get(resource, 0) + sign * amount


def _against(pod: Pod, node: Node) -> list[str]:
    """Why a node can't take a Pod. As in the scheduler, the first kind of reason hides the later ones; of missing
    resources each counts."""
    taint = next((taint for taint in node.taints if not _tolerated(taint, pod.tolerations)), None)
    if taint is not None:
        key, _, value = taint.partition(":")[0].partition("=")
        return [f"node(s) had untolerated taint {{{key}: {value}}}"]
    if any(node.labels.get(key) != value for key, value in pod.node_selector.items()):
        return ["node(s) didn't match Pod's node affinity/selector"]
    requests = pod.requests()
    return [f"Insufficient {name}" for name, amount in requests.items() if amount > node.free(name) and amount > 0]


def _tolerated(taint: str, tolerations: Sequence[Mapping[str, Any]]) -> bool:
    pair, _, effect = taint.partition(":")
    key, _, value = pair.partition("=")
    if effect == "PreferNoSchedule":
        return True
    return any(
        toleration.get("effect", effect) in ("", effect)
        and toleration.get("key", key) in ("", key)
        and (toleration.get("operator", "Equal") == "Exists" or toleration.get("value", "") == value)
        for toleration in tolerations
    )


def _score(pod: Pod, node: Node) -> float:
    """Least allocated: the mean free share of cpu and memory once the Pod is there, 0 to 1."""
    shares = []
    for resource, assumed in DEFAULT_REQUEST.items():
        capacity = node.capacity.get(resource, 0)
        asked = pod.requests().get(resource, assumed)
        shares.append(max(0.0, (node.free(resource) - asked) / capacity) if capacity else 0.0)
    return sum(shares) / len(shares)


def default_nodes(gpus: int, *, resources: Mapping[str, int] | None = None, gpu_node: str = "gpu-free") -> list[Node]:
    """A small cluster: one node without GPUs, one whose GPUs are all taken, and last the free one, this machine.

    resources: what the free node offers, {"nvidia.com/gpu": gpus} unless given.
    """
    offered = dict(resources) if resources is not None else {"nvidia.com/gpu": gpus}
    size = {"cpu": 96_000, "memory": 768 * GIB}
    return [
        Node("cpu-0", _labels("cpu-0"), {"cpu": 32_000, "memory": 128 * GIB}, {"cpu": 24_000, "memory": 96 * GIB}),
        Node("gpu-busy", _labels("gpu-busy"), {**size, **offered}, {"cpu": 92_000, "memory": 700 * GIB, **offered}),
        Node(gpu_node, _labels(gpu_node), {**size, **offered}, {"cpu": 2_000, "memory": 8 * GIB}),
    ]


def _labels(name: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
