"""Plays Pods through all five steps on a stage, and reports what the process inside each container saw."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpulet.errors import EngineError, GpuletError
from gpulet.injection import build
from gpulet.injection.model import Injection
from gpulet.node import driver, procfs
from gpulet.node.gpu import CharDevice, NodeFacts
from gpulet.request.model import Request
from gpulet.sim import devices, evidence, judge, scheduler
from gpulet.sim.allocation import Allocation
from gpulet.sim.engine import RunningContainer, cdi_names
from gpulet.sim.kubelet import AdmissionError
from gpulet.sim.pods import ContainerSpec, Pod
from gpulet.sim.stage import Stage

PROBE = "/usr/bin/gpulet-probe"
PATIENCE = 10.0  # seconds that a Pod which fits waits for a plugin that is just coming back
Report = dict[str, Any]


class Demo:
    """One performance. `run` gives the whole report; `tell` is called with each Pod's part as it is done.

    privileged: whether containers are really started (needs root and a low-level runtime); without it steps 4 and 5
    are planned and not done.
    """

    def __init__(self, stage: Stage, *, privileged: bool, tell: Callable[[Report], None] = lambda pod: None) -> None:
        self._stage = stage
        self._privileged = privileged
        self.tell = tell
        self.facts = _facts(stage)
        if not self.facts.gpus:
            raise EngineError(
                "the demo needs GPUs", seen=f"none below {stage.root}", remedy="see what there is: gpulet node"
            )
        offered = {name: one.capacity for name, one in stage.kubelet.resources().items()}
        self._nodes = scheduler.default_nodes(len(self.facts.gpus), resources=offered)
        self._here = self._nodes[-1]
        self.wrong: list[str] = []

    def node(self) -> Report:
        """What discovery brought."""
        status = self._stage.kubelet.resources()
        return {
            "name": self._here.name,
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
        placement = self._schedule(pod)
        scheduling = _step("scheduling", started, placement.message)
        part: Report = {"name": pod.name, "namespace": pod.namespace, "phase": "Pending", "node": placement.node}
        part |= {"message": placement.message, "runtimeClass": pod.runtime_class or "nvidia", "notes": list(pod.notes)}
        part["containers"] = []
        for spec in (*pod.init_containers, *pod.containers):
            container = {"name": spec.name, "image": spec.image, "requested": _gpus(spec), "allocated": []}
            container |= {"grant": "none", "reason": "", "seen": None, "beyond": [], "notes": list(spec.notes)}
            part["containers"].append(container | {"steps": [self._discovery(), scheduling]})
        if placement.node is None:
            return part
        scheduler.assign(pod, self._nodes, placement.node)
        if placement.node != self._here.name:
            part["message"] = f"placed on {placement.node}; only {self._here.name} is played here"
            return part
        try:
            allocations = self._configure(pod, part)
            part["phase"], part["message"] = self._start(pod, allocations, part)
        except AdmissionError as error:
            scheduler.unassign(pod, self._nodes, placement.node)
            self._failed(part, error)
        except GpuletError as error:
            self._failed(part, error)
        return part

    def _failed(self, part: Report, error: GpuletError) -> None:
        part["phase"], part["message"] = "Failed", str(error)
        self.wrong.append(f"{part['name']}: {error}")

    def _schedule(self, pod: Pod) -> scheduler.Placement:
        """Step 2, by what the kubelet publishes now. While the plugin is away its devices aren't allocatable: a Pod
        that would fit waits for it, as Pending Pods do."""
        deadline = time.monotonic() + PATIENCE
        while True:
            status = self._stage.kubelet.resources()
            self._here.capacity.update({name: one.allocatable for name, one in status.items()})
            placement = scheduler.schedule(pod, self._nodes)
            away = any(one.allocatable < one.capacity for one in status.values())
            if placement.node is not None or not away or time.monotonic() > deadline:
                return placement
            time.sleep(0.02)

    def _discovery(self) -> Report:
        status = self._stage.kubelet.resources()
        texts = [f"{one.allocatable} of {one.capacity} {name} allocatable" for name, one in sorted(status.items())]
        text = f"{', '.join(texts)} on {self._here.name} (driver {self.facts.driver})"
        return {"step": "discovery", "ms": round(self._stage.discovery_ms, 1), "evidence": text}

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
            asked = bool(allocation.device_ids)
            text = evidence.answer(allocation) if asked else "nothing asked for: the plugin is not called"
            told["allocated"] = self._uuids(allocation)
            told["steps"].append(_step("configuration", started, text))
        return allocations

    def _uuids(self, allocation: Allocation) -> list[str]:
        """The devices of an allocation in index order; replica suffixes are dropped."""
        ids = {one.partition("::")[0] for ids in allocation.device_ids.values() for one in ids}
        order = {gpu.uuid: gpu.index for gpu in self.facts.gpus}
        return sorted(ids, key=lambda uuid: (order.get(uuid, len(order)), uuid))

    def _start(self, pod: Pod, allocations: dict[str, Allocation], part: Report) -> tuple[str, str]:
        """Steps 4 and 5: init containers one after another, each to its end, native sidecars apart; then the others,
        which go on."""
        if self._privileged:
            self._stage.engine.run_sandbox(pod)
        told = {one["name"]: one for one in part["containers"]}
        for spec in pod.init_containers:
            container = self._container(pod, spec, allocations[spec.name], told[spec.name])
            if self._privileged and not spec.restart_always:
                self._stage.engine.remove(container)
        for spec in pod.containers:
            self._container(pod, spec, allocations[spec.name], told[spec.name])
        return ("Running", "") if self._privileged else ("Pending", "planned: steps 4 and 5 were not done")

    def _container(self, pod: Pod, spec: ContainerSpec, allocation: Allocation, told: Report) -> RunningContainer:
        started = time.perf_counter()
        engine = self._stage.engine
        minors = sorted(gpu.minor for gpu in self.facts.gpus)
        arguments = [PROBE, "--hold", "--minors", f"{minors[0]}-{minors[-1]}"]
        container = engine.prepare(pod, spec, allocation, args=arguments, cdi=self._privileged)
        request = judge.request_of(container)
        cdi = cdi_names(allocation)
        told["grant"] = self._stage.options.strategies[-1] if cdi else request.source or "none"
        told["reason"] = f"the engine applies {', '.join(cdi)}" if cdi else request.reason
        if cdi:
            request = Request(source="cdi", devices=tuple(told["allocated"]), capabilities=("all",))
        if not self._privileged:
            self._plan(container, request, told, started)
            return container
        with self._timed(told, "initialisation") as step:
            engine.create(container)
            step["evidence"] = evidence.changes(container.before, container.after)
        with self._timed(told, "mounting") as step:
            engine.start(container)
            probe = json.loads(engine.first_line(container))
            for what in ("opened", "denied"):  # the probe tried a range, which may hold numbers that no GPU has
                probe[what] = [minor for minor in probe[what] if minor in minors]
            told["seen"] = evidence.seen(probe)
            told["beyond"] = [uuid for uuid in told["seen"]["nvml"] if uuid not in told["allocated"]]
            step["evidence"] = evidence.inside(probe)
        due = judge.due(self.facts, request.devices, capabilities=request.capabilities, privileged=spec.privileged)
        self.wrong += [f"{pod.name}/{spec.name}: {one}" for one in judge.verdict(self.facts, due, probe)]
        return container

    def _plan(self, container: RunningContainer, request: Request, told: Report, started: float) -> None:
        """What the runtime would do: the commands, and the Injection itself."""
        engine = self._stage.engine
        injection = Injection()
        if request:
            files = driver.find(str(self._stage.root), version=self.facts.driver)
            injection = build.build(self.facts, files, request, dev_root=str(self._stage.root))
        create = engine.command(container, ["create", "--bundle", str(container.bundle), container.id])
        start = engine.command(container, ["start", container.id])
        told["plan"] = {"commands": [create, start], "injection": injection.to_data()}
        nodes = ", ".join(device.path for device in injection.devices) or "no device node"
        counts = f"{len(injection.mounts)} mounts, {len(injection.rootfs.links)} links"
        told["steps"].append(_step("initialisation", started, f"planned: {shlex.join(create)}: {nodes}; {counts}"))
        mounts = " ".join(mount.path for mount in injection.mounts) or "nothing to mount"
        told["steps"].append({"step": "mounting", "ms": 0.0, "evidence": f"planned: {shlex.join(start)}: {mounts}"})

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


def _facts(stage: Stage) -> NodeFacts:
    """The node's facts. Who isn't root can't make device nodes: what would stand in their places is known all the
    same, so the plan that is printed is the one that root would carry out."""
    facts = procfs.facts(str(stage.root))
    if stage.simulated is None or not stage.simulated.placeholders:
        return facts
    nodes = tuple(
        CharDevice(f"/dev/{name}", f"{stage.root}/dev/{name}", major, minor)
        for name, major, minor in devices.nodes(stage.simulated.description)
        if not name.startswith("nvidia-caps-imex-channels/")
    )
    return facts.replace(nodes=nodes)


def _step(name: str, started: float, text: str) -> Report:
    return {"step": name, "ms": round((time.perf_counter() - started) * 1e3, 1), "evidence": text}


def _gpus(spec: ContainerSpec) -> int:
    return sum(count for name, count in spec.limits.items() if name.startswith("nvidia.com/"))
