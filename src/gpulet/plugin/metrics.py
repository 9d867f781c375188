"""What the daemon tells Prometheus. Counters count from the process's start; gauges are taken when asked.

Loaded only where an address is configured.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpulet.errors import NodeError, NvmlError
from gpulet.node.gpu import NodeFacts
from gpulet.plugin import drift
from gpulet.plugin.access import AccessLost
from gpulet.plugin.allocate import CDI_VENDOR
from gpulet.plugin.config import Config
from gpulet.plugin.health import Notice, XidSeen
from gpulet.plugin.holders import Holder
from gpulet.plugin.kubelet import Identity
from gpulet.plugin.lean import SERVING, without_tls
from gpulet.plugin.xid import CATALOGUE

with without_tls(*SERVING):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    from gpulet.plugin.injections import Injections

if TYPE_CHECKING:
    from gpulet.plugin.daemon import Daemon
    from gpulet.plugin.generation import Generation

RPC_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)


class Metrics:
    """All metrics of one daemon."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.rpc = Histogram("dp_rpc_duration_seconds", "Time to answer the kubelet", ["rpc"], registry=registry,
                             buckets=RPC_SECONDS)  # fmt: skip
        self.rpc_errors = Counter("dp_rpc_errors", "Refused calls of the kubelet", ["rpc", "code"], registry=registry)
        self.registrations = Counter("dp_registrations", "Registrations by outcome", ["resource", "outcome"],
                                     registry=registry)  # fmt: skip
        self.transitions = Counter("gpu_health_transitions", "Health changes", ["uuid", "to"], registry=registry)
        self.xids = Counter("gpu_xid", "Xids seen", ["uuid", "xid", "class", "action"], registry=registry)
        self.xid_time = Gauge("gpu_xid_last_timestamp_seconds", "When the last Xid came", ["uuid"], registry=registry)
        self.expected = Gauge("gpu_expected", "GPUs that are or were there", registry=registry)
        self.enumerated = Gauge("gpu_enumerated", "GPUs that answered the last look", registry=registry)
        self.health = Gauge("gpu_health", "1 healthy, 0 not", ["uuid", "pci", "serial", "reason", "xid"],
                            registry=registry)  # fmt: skip
        self.recovery = Gauge("gpu_recovery_action", "nvmlDeviceGpuRecoveryAction_t; -1 unknown", ["uuid"],
                              registry=registry)  # fmt: skip
        self.access = Gauge("container_gpu_access_lost", "1; its device cgroup refuses the GPU that it was given",
                            ["namespace", "pod", "container", "uuid"], registry=registry)  # fmt: skip
        self.devices = Gauge("dp_devices", "Devices offered", ["resource", "health"], registry=registry)
        self.registered = Gauge("dp_registered", "1 while the kubelet knows it", ["resource"], registry=registry)
        self.streams = Gauge("dp_stream_connected", "ListAndWatch streams", ["resource"], registry=registry)
        self.restarts = Counter("dp_kubelet_restarts_seen", "New kubelets after the first", registry=registry)
        self.nvml = Counter("dp_nvml_calls", "Steps done with NVML", ["fn", "rc"], registry=registry)
        self.checked = Gauge("dp_last_health_check_timestamp_seconds", "When health was last heard of",
                             registry=registry)  # fmt: skip
        self.config = Gauge("dp_config_info", "1; the configuration in force", ["hash", "key"], registry=registry)
        self.driver = Gauge("driver_info", "1; the driver in force", ["module_version", "lib_version", "cuda"],
                            registry=registry)  # fmt: skip
        self.mismatch = Gauge("driver_mismatch", "1 where the library isn't the module's", registry=registry)
        self.specs = Gauge("cdi_spec_info", "1; a CDI specification of ours", ["file", "driver", "fingerprint"],
                           registry=registry)  # fmt: skip
        self.stale = Gauge("cdi_spec_stale", "1 where the node has changed since it was written", ["file"],
                           registry=registry)  # fmt: skip
        self.broken = Gauge("cdi_spec_errors", "Unusable files in the CDI folder", registry=registry)
        self.injections = Injections()
        registry.register(self.injections)
        # without samples, and the last: _holders' lines come after it
        self.held = Gauge("gpu_allocation_info", "1; a container has this device", ["uuid"], registry=registry)
        self._kubelet: Identity | None = None

    def observe(self, rpc: str, code: str, seconds: float) -> None:
        """A call was answered."""
        self.rpc.labels(rpc).observe(seconds)
        if code != "OK":
            self.rpc_errors.labels(rpc, code).inc()

    def told(self, news: Notice | XidSeen) -> None:
        """Health had news."""
        if isinstance(news, Notice):
            self.transitions.labels(news.uuid, news.kind).inc()
            return
        row = CATALOGUE.get(news.number)
        kind, action = (row.kind, row.action) if row else ("", "")
        self.xids.labels(news.uuid, str(news.number), kind, action).inc()
        self.xid_time.labels(news.uuid).set_to_current_time()

    def notify(self, resource: str, outcome: str, kubelet: Identity | None = None) -> None:
        """A registration came out so. kubelet: the socket of the one that took us."""
        self.registrations.labels(resource, outcome).inc()
        if kubelet and kubelet != self._kubelet:
            if self._kubelet:
                self.restarts.inc()
            self._kubelet = kubelet

    def counted(self, fn: str, step: Callable[..., Any], *arguments: Any) -> Any:
        """What a step with NVML gives; counted with NVML's return value, which some steps give as text."""
        code = 0
        try:
            result = step(*arguments)
            told = re.search(r"\(NVML (\d+)\)", result) if isinstance(result, str) else None
            code = int(told[1]) if told else 0
            return result
        except NodeError as error:
            code = error.code if isinstance(error, NvmlError) else -1
            raise
        finally:
            self.nvml.labels(fn, str(code)).inc()

    def text(self, daemon: Daemon, held: Sequence[Holder] = ()) -> bytes:
        """Everything in Prometheus' text form. held: who has which device."""
        for gauge in (self.health, self.recovery, self.access, self.devices, self.registered, self.streams,
                      self.config, self.driver, self.specs, self.stale):  # fmt: skip
            gauge.clear()
        self.checked.set(daemon.wellness.heard)
        for name, agent in tuple(daemon.agents.items()):  # this is not the loop's thread
            self.registered.labels(name).set(1 if agent.state.registered else 0)
            self.streams.labels(name).set(agent.streams)
        current = daemon.generation
        if current:
            self.injections.folder = current.config.runtime_state_dir
            self._gpus(daemon, current)
            self._offers(current)
            self._access(daemon.news.access.lost, held)
            self._specs(current, daemon.looked)
            self._driver(current.config, current.facts)
        return generate_latest(self.registry) + (_holders(current, held) if current else b"")

    def _gpus(self, daemon: Daemon, current: Generation) -> None:
        self.expected.set(len(current.facts.gpus) + sum(not lost.uuid for lost in current.facts.lost))
        self.enumerated.set(len(current.facts.gpus) - len(current.kept))
        for gpu in current.facts.gpus:
            fault = next((fault for fault in daemon.wellness.health.faults if fault.uuid == gpu.uuid), None)
            reason = fault.reason if fault else daemon.wellness.health.problem
            xid = str(fault.xid) if fault and fault.xid else ""
            self.health.labels(gpu.uuid, gpu.bus_id, gpu.serial, reason, xid).set(0 if reason else 1)
            self.recovery.labels(gpu.uuid).set(daemon.wellness.recovery.get(gpu.uuid, -1))

    def _offers(self, current: Generation) -> None:
        for name, offer in current.offers.items():
            sick = sum(device.base in offer.sick for device in offer.resource.devices)
            self.devices.labels(name, "Unhealthy").set(sick)
            self.devices.labels(name, "Healthy").set(len(offer.resource.devices) - sick)

    def _access(self, lost: Iterable[AccessLost], held: Sequence[Holder]) -> None:
        for one in lost:
            named = one.named(held)
            self.access.labels(named.namespace, named.pod, named.container, one.gpu).set(1)

    def _specs(self, current: Generation, looked: NodeFacts | None) -> None:
        """Our files in the CDI folder. Stale is what was written for other facts than the last look found."""
        from gpulet.injection.cdi_fingerprint import fingerprint
        from gpulet.injection.cdi_registry import Registry

        config, facts = current.config, current.facts
        if not config.cdi:
            return
        digest = _digest(sorted(fingerprint(facts).items()))
        stale = bool(drift.stale_specs(current, looked))
        registry = Registry([config.cdi_spec_dir]).load()
        self.broken.set(len(registry.errors))
        for spec in registry.specs:
            name = os.path.basename(spec.path)
            if name.startswith(CDI_VENDOR):
                self.specs.labels(name, facts.driver, digest).set(1)
                self.stale.labels(name).set(stale)

    def _driver(self, config: Config, facts: NodeFacts) -> None:
        key = os.path.basename(os.path.realpath(config.config_file)) if config.config_file else ""
        self.config.labels(_digest(config), key).set(1)
        module, library = drift.driver_versions(config.lookup_root)
        self.driver.labels(module or facts.driver, library, facts.cuda).set(1)
        self.mismatch.set(bool(drift.mismatch((module, library))))


class _Quoted(dict[str, str]):
    """Text as Prometheus' labels have it, worked out once for each: names recur thousands of times."""

    def __missing__(self, text: str) -> str:
        quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return self.setdefault(text, quoted)


def _holders(current: Generation, held: Sequence[Holder]) -> bytes:
    """The samples of gpu_allocation_info. prometheus_client takes ten times as long, and thousands of devices are
    held on a node that shares its GPUs."""
    quoted = _Quoted()
    lines: dict[str, None] = {}  # a sample that comes twice would make all of the answer unreadable
    for one in held:
        offered = current.offers.get(one.resource)  # a reload may have taken it while the kubelet was asked
        device = offered.resource.by_id.get(one.device) if offered else None
        base, _, replica = one.device.partition("::")
        gpu = device.gpu_uuid if device else base  # not offered any more, and still somebody's
        mig = base if base.startswith("MIG-") else ""
        lines[
            f'gpu_allocation_info{{container="{quoted[one.container]}",mig="{quoted[mig]}",'
            f'namespace="{quoted[one.namespace]}",pod="{quoted[one.pod]}",replica="{quoted[replica]}",'
            f'uuid="{quoted[gpu]}"}} 1.0\n'
        ] = None
    return "".join(lines).encode(errors="replace")  # a checkpoint may have anything


def _digest(value: object) -> str:
    """A short name for one state of something; the same as long as it is the same."""
    return f"{zlib.crc32(repr(value).encode()):08x}"
