"""Facts about the node through NVML, and the session that the daemon keeps for its health events.

Each error stays with the device that it concerns: a GPU that can't be asked becomes a Lost beside the healthy ones.
Not for the programs in launch/: initialising NVML takes seconds on a node whose driver isn't kept loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import pynvml

from gpulet.errors import NodeError, NvmlError
from gpulet.node import devices, nvml_errors, nvml_library
from gpulet.node.gpu import Gpu, Lost, MigDevice, NodeFacts
from gpulet.node.nvml_ask import ask, text
from gpulet.node.nvml_errors import told
from gpulet.node.nvml_links import all_links
from gpulet.node.nvml_mig import mig_devices
from gpulet.node.nvml_place import place
from gpulet.node.paths import below
from gpulet.node.procfs import CapMinors, nvml_bus_id, pci_name, proc_root, read_text, sys_root
from gpulet.value import Value

T = TypeVar("T")

ALL_INSTANCES = 0xFFFFFFFF  # an event that concerns no particular MIG instance

# nvmlBrandType_t, with the words that NVIDIA's container CLI prints and NVIDIA_REQUIRE_BRAND compares with
_BRANDS = {
    1: "Quadro", 2: "Tesla", 3: "NVS", 4: "GRID", 5: "GeForce", 6: "TITAN", 7: "VApps", 8: "VPC", 9: "VCS", 10: "VWS",
    11: "CloudGaming", 12: "QuadroRTX", 13: "NvidiaRTX", 14: "Nvidia", 15: "GeForceRTX", 16: "TitanRTX",
}  # fmt: skip


class Event(Value):
    """One NVML event. kind: nvmlEventType bits (8 is an Xid); data: the Xid's number; gi, ci: the MIG instances
    concerned, -1 where it concerns the whole GPU. uuid is the GPU's, "" where even that couldn't be had.
    """

    uuid: str
    kind: int
    data: int
    gi: int = -1
    ci: int = -1


def _if_told(default: T, function: Callable[..., T], *arguments: object) -> T:
    """What a GPU is offered or used without: `default` whatever keeps us from it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return default


def _arch(handle: Any) -> str:
    pair = ask(None, pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return f"{pair[0]}.{pair[1]}" if pair else ""


def _numa(sysfs: str, bus_id: str, handle: Any) -> int:
    text = (read_text(below(sysfs, f"/sys/bus/pci/devices/{pci_name(bus_id)}/numa_node")) or "").strip()
    if text.lstrip("-").isdigit():
        return max(int(text), -1)
    node: int = ask(-1, pynvml.nvmlDeviceGetNumaNodeId, handle)
    return node if 0 <= node < 1 << 16 else -1


def _memory(handle: Any) -> int:
    info = ask(None, pynvml.nvmlDeviceGetMemoryInfo, handle)
    return int(info.total) if info else 0


class _Look:
    """One look at all GPUs of one root."""

    def __init__(self, root: str, dev_root: str) -> None:
        self.sysfs, self.proc = sys_root(root), proc_root(root)
        self.dev = devices.choose_dev_root(root, dev_root)
        self.minors = CapMinors(self.proc)

    def gpu(self, index: int) -> tuple[Gpu, Any]:
        """One GPU and its handle. Raises NVMLError where it doesn't answer, NodeError where it can't be reached."""
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text(pynvml.nvmlDeviceGetUUID(handle))
        name = text(ask("", pynvml.nvmlDeviceGetName, handle))
        bus_id, minor = place(handle, name, self.proc, self.dev)
        mode = ask(None, pynvml.nvmlDeviceGetMigMode, handle)
        drm, drm_links = devices.drm_of(self.sysfs, self.dev, pci_name(bus_id))
        gpu = Gpu(
            index,
            minor,
            uuid,
            bus_id,
            name=name,
            brand=_BRANDS.get(ask(0, pynvml.nvmlDeviceGetBrand, handle), ""),
            arch=_arch(handle),
            memory=_memory(handle),
            numa=_numa(self.sysfs, bus_id, handle),
            serial=text(_if_told("", pynvml.nvmlDeviceGetSerial, handle)),
            mig_capable=mode is not None,
            mig_enabled=bool(mode and mode[0]),
            drm=drm,
            drm_links=drm_links,
            coherent=ask(0, pynvml.nvmlDeviceGetAddressingMode, handle) == pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS,
        )
        return gpu.replace(mig=self._mig(gpu, handle)), handle

    def _mig(self, gpu: Gpu, handle: Any) -> tuple[MigDevice, ...]:
        return mig_devices(gpu, handle, self.minors) if gpu.mig_enabled else ()

    def all(self) -> tuple[list[tuple[Gpu, Any]], list[Lost]]:
        found, lost = [], []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found.append(self.gpu(index))
            except pynvml.NVMLError as error:
                if error.value in nvml_errors.ABOUT_NVML:
                    raise
                lost.append(_lost(index, told(error.value, str(error))))
            except NodeError as error:
                lost.append(_lost(index, str(error)))
        return found, lost


def _lost(index: int, reason: str) -> Lost:
    """What can still be said of a GPU that can't be asked."""
    bus_id = uuid = ""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        bus_id = nvml_bus_id(text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
        uuid = text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError:
        pass  # then that is all there is
    return Lost(index, reason, bus_id, uuid)


def _word(error: pynvml.NVMLError) -> str:
    """NVML's word for why a GPU doesn't answer. Raises NvmlError where it isn't about this GPU but about NVML."""
    if error.value in nvml_errors.ABOUT_NVML:
        raise NvmlError("NVML can't be asked for a GPU", code=error.value, seen=str(error)) from error
    return told(error.value, str(error))


class Session:
    """NVML, initialised beneath one driver root until closed. Use as a context manager.

    search: more folders to look for the library in, as for `library_folders`. Raises NvmlError where it can't start:
    `code` is NVML's, 12 where the library isn't there.
    """

    def __init__(self, root: str = "/", search: Sequence[str] = ()) -> None:
        self.root, self.search = root or "/", tuple(search)
        self._events: Any = None
        self.library = self._use()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise nvml_errors.init_failed(error.value, str(error), self.root, self.library) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _use(self) -> str:
        return nvml_library.use(self.root, self.search)

    def _resume(self) -> None:
        """Have NVML's functions be this session's library's. Raises NvmlError where another driver's is there by now:
        that one knows nothing of this session and of its events."""
        if (used := self._use()) != self.library:
            raise NvmlError("the driver was replaced", code=nvml_errors.UNINITIALIZED, seen=used, wanted=self.library)

    def close(self) -> None:
        """Free the events and shut NVML down; the library stays loaded. Where that can't be used any more there is
        nothing to free, and the shutdown of another driver's would be somebody else's."""
        try:
            self._resume()
        except NvmlError:
            return  # whatever ends the session is the error to be told
        events, self._events = self._events, None
        for function, arguments in ((pynvml.nvmlEventSetFree, (events,)), (pynvml.nvmlShutdown, ())):
            if function is pynvml.nvmlShutdown or events is not None:
                try:
                    function(*arguments)
                except pynvml.NVMLError:
                    pass  # nothing is lost by a shutdown that fails

    def facts(self, dev_root: str = "", *, links: bool = True) -> NodeFacts:
        """What NVML knows now. links: also how GPUs reach each other, which takes a call for each pair."""
        self._resume()
        look = _Look(self.root, dev_root)
        try:
            found, lost = look.all()
        except pynvml.NVMLError as error:
            raise NvmlError("NVML can't list the GPUs", code=error.value, seen=str(error)) from error
        gpus = all_links(found) if links else [gpu for gpu, _handle in found]
        cuda: int = _if_told(0, pynvml.nvmlSystemGetCudaDriverVersion)
        return NodeFacts(
            tuple(gpus),
            "nvml",
            driver=text(_if_told("", pynvml.nvmlSystemGetDriverVersion)),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            lost=tuple(lost),
            majors=devices.parse_majors(read_text(below(look.proc, "/proc/devices")) or ""),
            imex=devices.imex_channels(look.dev),
            nodes=devices.scan(look.dev, [name for gpu in gpus for name in gpu.drm]),
            mig_minors=(look.minors.of("config"), look.minors.of("monitor")),
            dev_root=look.dev,
            nvml=text(_if_told("", pynvml.nvmlSystemGetNVMLVersion)),
        )

    # -- health --

    def watch(self, uuids: Iterable[str], mask: int = 8) -> dict[str, str]:
        """Have these GPUs' events delivered to `wait`. Gives, for each UUID that can't be watched, why.

        mask: nvmlEventType bits, by default critical Xids; of them each GPU's supported ones are registered. Raises
        NvmlError as `state`.
        """
        self._resume()
        if self._events is None:
            try:
                self._events = pynvml.nvmlEventSetCreate()
            except pynvml.NVMLError as error:
                raise NvmlError("NVML can't make an event set", code=error.value, seen=str(error)) from error
        refused = {}
        for uuid in uuids:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceRegisterEvents(
                    handle, mask & pynvml.nvmlDeviceGetSupportedEventTypes(handle), self._events
                )
            except pynvml.NVMLError as error:
                refused[uuid] = _word(error)
        return refused

    def wait(self, timeout_ms: int) -> Event | None:
        """The next event, None after `timeout_ms` without one. Raises NvmlError where NVML can't wait."""
        self._resume()
        if self._events is None:
            raise NodeError("no GPU is being watched", remedy="call watch() before wait()")
        try:
            data = pynvml.nvmlEventSetWait_v2(self._events, timeout_ms)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise NvmlError("NVML can't wait for events", code=error.value, seen=str(error)) from error
        try:
            uuid = text(pynvml.nvmlDeviceGetUUID(data.device))
        except pynvml.NVMLError:
            uuid = ""
        gi, ci = (-1 if number == ALL_INSTANCES else number for number in (data.gpuInstanceId, data.computeInstanceId))
        return Event(uuid, int(data.eventType), int(data.eventData), gi, ci)

    def state(self, uuid: str) -> str:
        """ "" where the GPU answers, else NVML's word for why it doesn't: for noticing that it is lost, or back.

        What that says of the GPU is told apart in nvml_errors. Raises NvmlError where it isn't about this GPU but about
        NVML."""
        self._resume()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            pynvml.nvmlDeviceGetMemoryInfo(handle)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return ""
            return _word(error)
        return ""

    def recovery(self, uuid: str) -> int:
        """The recovery action that the driver asks for (nvmlDeviceGpuRecoveryAction_t, 0 none), -1 where unknown."""
        self._resume()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        except pynvml.NVMLError:
            return -1
        return int(value.value.uiVal) if value.nvmlReturn == pynvml.NVML_SUCCESS else -1


def facts(root: str = "/", dev_root: str = "", *, links: bool = True, search: Sequence[str] = ()) -> NodeFacts:
    """Facts through NVML, initialised and shut down around them. Raises NvmlError where NVML can't start."""
    with Session(root, search) as session:
        return session.facts(dev_root, links=links)
