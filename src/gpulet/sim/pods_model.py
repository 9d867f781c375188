"""Pods as far as this project cares: what the scheduler, the kubelet and the engine are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ContainerSpec:
    """A container. limits, requests: extended resources in whole numbers, cpu in thousandths of a core, memory and
    storage in bytes; restart_always: an init container that goes on beside the others (a "native sidecar"); notes:
    what of the manifest was passed over."""

    name: str
    image: str = ""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[str, int] = field(default_factory=dict)
    privileged: bool = False
    run_as_user: int | None = None
    notes: tuple[str, ...] = ()
    restart_always: bool = False


@dataclass(frozen=True)
class Pod:
    """A Pod. tolerations: as in the manifest, without empty fields; node_name: the node it was put on by hand; notes:
    what of the manifest was passed over, beside what its containers say."""

    name: str
    containers: tuple[ContainerSpec, ...] = ()
    init_containers: tuple[ContainerSpec, ...] = ()
    namespace: str = "default"
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    runtime_class: str = ""
    restart_policy: str = "Always"
    tolerations: tuple[Mapping[str, Any], ...] = ()
    node_name: str = ""
    notes: tuple[str, ...] = ()

    def requests(self) -> dict[str, int]:
        """What the scheduler counts: the most that runs at once. That is the containers and the init containers that
        go on; or, before, an init container and those of them that were started earlier."""
        names = dict.fromkeys(name for one in (*self.containers, *self.init_containers) for name in one.requests)
        return {name: self._most(name) for name in names}

    def _most(self, resource: str) -> int:
        going_on = most = 0
        for container in self.init_containers:
            amount = container.requests.get(resource, 0)
            most = max(most, going_on + amount)
            if container.restart_always:
                going_on += amount
        return max(most, going_on + sum(container.requests.get(resource, 0) for container in self.containers))
