"""Plays Pods through all five steps on a stage, and reports what the process inside each container saw.

Two things are kept apart on purpose. What a container *is to see* comes from the request's rules (`request/decide.py`)
applied to the bundle that the engine wrote; what it *saw* comes from the probe that runs inside. A container is right
when the two are the same.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpulet import settings as settings_file
from gpulet.errors import GpuletError
from gpulet.injection import build
from gpulet.injection.select import select
from gpulet.node import driver, procfs
from gpulet.node.gpu import NodeFacts
from gpulet.request import decide, policy
from gpulet.request.bundle import Container
from gpulet.request.model import Request
from gpulet.sim import scheduler
from gpulet.sim.allocation import Allocation
from gpulet.sim.engine import RunningContainer, cdi_names
from gpulet.sim.kubelet import AdmissionError
from gpulet.sim.pods import ContainerSpec, Pod
from gpulet.sim.stage import Stage

PROBE = "/usr/bin/gpulet-probe"
Report = dict[str, Any]


class Demo:
    """One performance. `run` gives the whole report; `tell` is called with each Pod's part as it is done.

    privileged: whether containers are really started (needs root and a low-level runtime); without it steps 5 and 6
    are planned and not done.
    """

    def __init__(self, stage: Stage, *, privileged: bool, tell: Callable[[Report], None] = lambda pod: None) -> None:
        self._stage = stage
        self._privileged = privileged
        self.tell = tell
        self.facts: NodeFacts = procfs.facts(str(stage.root))
        self._nodes = scheduler.default_nodes(len(self.facts.gpus))
        self._here = self._nodes[-1].name
        self.wrong: list[str] = []

    def node(self) -> Report:
        """What discovery brought."""
        status = self._stage.kubelet.resources()
        return {
            "name": self._here,
            "driver": self.facts.driver,
            "gpus": [gpu.uuid for gpu in self.facts.gpus],
            "models": sorted({gpu.name for gpu in self.facts.gpus}),
            "resources": {
                name: {"capacity": one.capacity, "allocatable": one.allocatable} for name, one in status.items()
            },
            "ms": round(self._stage.discovery_ms, 1),
        }

    def run(self, pods: Sequence[Pod]) -> Report:
        """Plays every Pod. Started containers go on until the stage is closed."""
        told = []
        for pod in pods:
            part = self._play(pod)
            told.append(part)
            self.tell(part)
        return {"ok": not self.wrong, "node": self.node(), "pods": told, "wrong": self.wrong}

    def _play(self, pod: Pod) -> Report:
        started = time.perf_counter()
        placement = scheduler.schedule(pod, self._nodes)
        scheduling = _step("scheduling", started, placement.message)
        part: Report = {"name": pod.name, "namespace": pod.namespace, "phase": "Pending", "node": placement.node}
        part |= {"message": placement.message, "runtimeClass": pod.runtime_class or "nvidia", "containers": []}
        for spec in (*pod.init_containers, *pod.containers):
            container = {"name": spec.name, "image": spec.image, "requested": _gpus(spec), "allocated": []}
            container |= {"grant": "none", "reason": "", "seen": None, "steps": [self._discovery(), scheduling]}
            part["containers"].append(container)
        if placement.node is None:
            return part
        scheduler.assign(pod, self._nodes, placement.node)
        if placement.node != self._here:
            part["message"] = f"placed on {placement.node}; only {self._here} is played here"
            return part
        try:
            allocations = self._configure(pod, part)
            part["phase"], part["message"] = self._start(pod, allocations, part)
        except GpuletError as error:
            part["phase"], part["message"] = "Failed", str(error)
            self.wrong.append(f"{pod.name}: {error}")
        return part

    def _discovery(self) -> Report:
        status = self._stage.kubelet.resources()
        texts = [f"{one.allocatable} of {one.capacity} {name} allocatable" for name, one in sorted(status.items())]
        evidence = f"{', '.join(texts)} on {self._here} (driver {self.facts.driver})"
        return {"step": "discovery", "ms": round(self._stage.discovery_ms, 1), "evidence": evidence}

    def _configure(self, pod: Pod, part: Report) -> dict[str, Allocation]:
        """Step 3: at the Pod's admission the kubelet asks the plugin, one Allocate for each container that wants
        something; what is given stands in its ledger. The time is the whole admission's."""
        started = time.perf_counter()
        try:
            allocations = self._stage.kubelet.admit(pod)
        except AdmissionError as error:
            for told in part["containers"]:
                told["steps"].append(_step("configuration", started, str(error)))
            raise
        for told in part["containers"]:
            allocation = allocations[told["name"]]
            evidence = _answer(allocation) if allocation.device_ids else "nothing asked for: the plugin is not called"
            told["allocated"] = self._uuids(allocation)
            told["steps"].append(_step("configuration", started, evidence))
        return allocations

    def _uuids(self, allocation: Allocation) -> list[str]:
        """The devices of an allocation in index order; replica suffixes are dropped."""
        ids = {one.partition("::")[0] for ids in allocation.device_ids.values() for one in ids}
        order = {gpu.uuid: gpu.index for gpu in self.facts.gpus}
        return sorted(ids, key=lambda uuid: (order.get(uuid, len(order)), uuid))

    def _start(self, pod: Pod, allocations: dict[str, Allocation], part: Report) -> tuple[str, str]:
        """Steps 4 and 5: init containers one after another, each to its end; then the others, which go on."""
        if self._privileged:
            self._stage.engine.run_sandbox(pod)
        told = {one["name"]: one for one in part["containers"]}
        for spec in pod.init_containers:
            container = self._container(pod, spec, allocations[spec.name], told[spec.name])
            if self._privileged:
                self._stage.engine.remove(container)
        for spec in pod.containers:
            self._container(pod, spec, allocations[spec.name], told[spec.name])
        return ("Running", "") if self._privileged else ("Pending", "planned: steps 4 and 5 need root and a runtime")

    def _container(self, pod: Pod, spec: ContainerSpec, allocation: Allocation, told: Report) -> RunningContainer:
        started = time.perf_counter()
        engine = self._stage.engine
        minors = sorted(gpu.minor for gpu in self.facts.gpus)
        arguments = [PROBE, "--hold", "--minors", f"{minors[0]}-{minors[-1]}"]
        container = engine.prepare(pod, spec, allocation, args=arguments)
        request = self._request(container)
        cdi = cdi_names(allocation)
        told["grant"] = self._stage.options.strategies[-1] if cdi else request.source or "none"
        told["reason"] = f"the engine applied {', '.join(cdi)}" if cdi else request.reason
        due = told["allocated"] if cdi else self._due(request)
        if not self._privileged:
            told["plan"] = self._plan(container, request)
            told["steps"].append(_step("initialisation", started, f"planned: {told['plan']['summary']}"))
            told["steps"].append(
                {"step": "mounting", "ms": 0.0, "evidence": "planned: " + shlex.join(told["plan"]["commands"][-1])}
            )
            return container
        with self._timed(told, "initialisation") as step:
            engine.create(container)
            step["evidence"] = changes(container.before, container.after)
        with self._timed(told, "mounting") as step:
            engine.start(container)
            seen = json.loads(engine.first_line(container))
            for what in ("opened", "denied"):  # the probe tried a range, which may hold numbers that no GPU has
                seen[what] = [minor for minor in seen[what] if minor in minors]
            told["seen"] = _seen(seen)
            step["evidence"] = _evidence(seen)
        self._judge(f"{pod.name}/{spec.name}", due, seen)
        return container

    def _request(self, container: RunningContainer) -> Request:
        """What the rules say of this bundle."""
        settings = settings_file.load(str(container.handler.config))
        ledger = policy.read_ledger(settings.policy_checkpoint) if settings.policy_grants == "kubelet" else None
        seen = Container.from_config(container.before, str(container.bundle))
        return decide.decide(seen, settings, ledger).request

    def _due(self, request: Request) -> list[str]:
        """The GPUs that a request is to bring, in index order."""
        if not request.devices:
            return []
        return [gpu.uuid for gpu in select(self.facts, request.devices).gpus]

    def _plan(self, container: RunningContainer, request: Request) -> Report:
        """What the runtime would do: the commands, and the Injection itself."""
        engine = self._stage.engine
        files = driver.find(str(self._stage.root), version=self.facts.driver)
        injection = build.build(self.facts, files, request, dev_root=str(self._stage.root))
        commands = [
            engine.command(container, ["create", "--bundle", str(container.bundle), container.id]),
            engine.command(container, ["start", container.id]),
        ]
        summary = f"{len(injection.devices)} device nodes, {len(injection.mounts)} mounts"
        return {"summary": summary, "commands": commands, "injection": injection.to_data()}

    def _judge(self, name: str, due: Sequence[str], seen: Report) -> None:
        """Holds what the probe saw against what the container was to see."""
        minors = {gpu.uuid: gpu.minor for gpu in self.facts.gpus}
        wanted = sorted(minors[uuid] for uuid in due)
        checks = {
            "NVML's GPUs": (sorted(one["uuid"] for one in seen["nvml"]), sorted(due)),
            "GPU nodes": (sorted(_gpu_nodes(seen["devices"])), wanted),
            "GPUs that open": (sorted(seen["opened"]), wanted),
            "GPUs refused": (sorted(seen["denied"]), sorted(set(minors.values()) - set(wanted))),
        }
        for what, (got, expected) in checks.items():
            if got != expected:
                self.wrong.append(f"{name}: {what}: {got} (wanted {expected}; NVML says: {seen['nvml_error']})")

    @contextmanager
    def _timed(self, told: Report, name: str) -> Iterator[Report]:
        started = time.perf_counter()
        step: Report = {"step": name, "ms": 0.0, "evidence": ""}
        told["steps"].append(step)
        try:
            yield step
        except GpuletError as error:
            step["evidence"] = str(error)
            raise
        finally:
            step["ms"] = round((time.perf_counter() - started) * 1e3, 1)


def changes(before: Report, after: Report) -> str:
    """What the runtime did to config.json, in words."""
    words = []
    for what, path in (("device nodes", ("linux", "devices")), ("mounts", ("mounts",))):
        old = _at(before, path)
        added = sum(one not in old for one in _at(after, path))
        if added:
            words.append(f"+{added} {what}")
    words += _variables(_at(before, ("process", "env")), _at(after, ("process", "env")))
    old_hooks, new_hooks = before.get("hooks") or {}, after.get("hooks") or {}
    for stage in sorted({*old_hooks, *new_hooks}):
        difference = len(new_hooks.get(stage) or ()) - len(old_hooks.get(stage) or ())
        if difference:
            words.append(f"{difference:+d} {stage} hook" + ("s" if abs(difference) > 1 else ""))
    return ", ".join(words) if words else "config.json left as it was"


def _variables(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Variables that changed, as they stand afterwards; those that went as "NAME unset"."""
    names = {entry.partition("=")[0] for entry in after}
    gone = dict.fromkeys(entry.partition("=")[0] for entry in before)
    return [entry for entry in after if entry not in before] + [f"{name} unset" for name in gone if name not in names]


def _at(config: Report, path: Sequence[str]) -> list[Any]:
    found: Any = config
    for key in path:
        found = found.get(key) or {}
    return list(found)


def _step(name: str, started: float, evidence: str) -> Report:
    return {"step": name, "ms": round((time.perf_counter() - started) * 1e3, 1), "evidence": evidence}


def _gpus(spec: ContainerSpec) -> int:
    return sum(count for name, count in spec.limits.items() if name.startswith("nvidia.com/"))


def _answer(allocation: Allocation) -> str:
    """The plugin's answer in one line."""
    words = [f"{name}={value}" for name, value in sorted(allocation.envs.items())]
    words += [f"mount {mount.container_path}" for mount in allocation.mounts]
    words += [f"device {device.container_path}" for device in allocation.devices]
    words += [f"annotation {key}={value}" for key, value in sorted(allocation.annotations.items())]
    words += [f"CDI {name}" for name in allocation.cdi_devices]
    return "; ".join(words)


def _gpu_nodes(devices: Sequence[str]) -> list[int]:
    names = [device.removeprefix("/dev/nvidia") for device in devices]
    return [int(name) for name in names if name.isdigit()]


def _seen(probe: Report) -> Report:
    return {
        "devices": probe["devices"],
        "nvml": [one["uuid"] for one in probe["nvml"]],
        "denied": probe["denied"],
        "files": probe["files"],
        "libraries": probe["libraries"],
        "env": probe["env"],
    }


def _evidence(probe: Report) -> str:
    """The probe's report in one line."""
    if probe["nvml_error"] and not probe["devices"]:
        return f"no /dev/nvidia*, no driver library ({probe['nvml_error']}); {len(probe['denied'])} GPUs refused"
    names = " ".join(device.removeprefix("/dev/") for device in probe["devices"])
    read_only = sum("ro" in one["flags"] for one in probe["files"])
    library = probe["libraries"].get("libnvidia-ml.so.1") or "libnvidia-ml.so.1 not found"
    return (
        f"NVML lists {len(probe['nvml'])} through {library}; {names}; "
        f"{len(probe['files'])} driver mounts ({read_only} read-only); {len(probe['denied'])} other GPUs refused"
    )
