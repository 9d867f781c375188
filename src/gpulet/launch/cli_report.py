"""What gpulet-container-cli's `info` and `list` print, to the byte as nvidia-container-cli does."""

from __future__ import annotations

import os
import sys

from gpulet.errors import DriverNotFound, NodeError, UnknownDevice
from gpulet.launch.container_cli import Failure
from gpulet.launch.start import put
from gpulet.node import devices, driver, driver_table, procfs
from gpulet.node.paths import below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gpulet.injection.select import Selection
    from gpulet.launch.container_cli import Call
    from gpulet.node.gpu import Gpu, MigDevice, NodeFacts

LARGEST_CHANNEL = (1 << 20) - 1  # a Linux device minor has 20 bits
LABELS = ("Device Index", "Device Minor", "Model", "Brand", "GPU UUID", "Bus Location", "Architecture")
CAPABILITIES = "/proc/driver/nvidia/capabilities"


# -- facts, as all three commands take them


def node_facts(call: Call, ids: Iterable[str], *, nvml: bool = False) -> NodeFacts:
    """The node's facts; NVML is asked only where ids, or the caller, need what it alone knows."""
    root = call.last("root", "/")
    load = call.given("load-kmods")
    facts = None
    try:
        facts = procfs.facts(root) if load or not nvml else None
    except NodeError as error:
        if not load:
            raise Failure("initialization error", error) from error
    if load:
        from gpulet.launch import kmods

        wanted = () if call.given("no-create-imex-channels") else channels(call)
        facts = kmods.prepare(root, facts, wanted, call.tell)
        if facts is None and not nvml:
            raise Failure("initialization error", "no NVIDIA kernel module, and it can't be loaded")
    if facts is not None and not nvml and not procfs.needs_nvml(facts, ids):
        return facts
    from gpulet.launch import nvml_child

    user = call.user() or nvml_child.default_user()
    try:
        answer = nvml_child.facts(root, user, driver.cached_folders(root, call.last("ldcache")))
    except NodeError as error:
        raise Failure("initialization error", error) from error
    if facts is not None and facts.gpus and not answer.gpus:  # a container must not start without its GPUs
        raise Failure("initialization error", f"NVML shows no GPU to user {user[0]}, group {user[1]}; correct --user")
    return answer


def driver_files(root: str, ldcache: str, version: str, drop: tuple[str, ...] = ()) -> driver.DriverFiles:
    """The driver's files beneath root. ldcache: the --ldcache option, a path beneath root; drop: kinds not wanted."""
    if ldcache and not os.path.exists(below(root, ldcache)):
        raise Failure("detection error", f"open failed: {below(root, ldcache)}: no such file or directory")
    try:
        return driver.find(root, version=version, ldcache=ldcache, drop=drop)
    except DriverNotFound as error:
        raise Failure("detection error", error) from error


def selected(facts: NodeFacts, ids: list[str]) -> Selection:
    """The devices that ids name. Without any GPU on the node nothing is looked at, as the peer does."""
    from gpulet.injection.select import Selection, select

    if not facts.gpus:
        return Selection()
    for name in ids:
        if name.lower() in ("none", "void"):  # the hook filters these; here they name nothing
            raise Failure("device error", f"{name}: unknown device")
        if name.lower() == "all":
            break
    try:
        return select(facts, ids)
    except UnknownDevice as error:
        name = next((item for item in ids if not _known(facts, item)), ",".join(ids))
        raise Failure("device error", f"{name}: unknown device ({error.wanted})") from error


def _known(facts: NodeFacts, name: str) -> bool:
    from gpulet.injection.select import find_device

    try:
        find_device(facts, name)
    except UnknownDevice:
        return False
    return True


def check_mig(call: Call, selection: Selection, ids: list[str]) -> None:
    """--mig-config and --mig-monitor know `all` alone, and no chosen MIG devices beside them."""
    for name in ("mig-config", "mig-monitor"):
        for item in call.joined(name):
            if item.lower() != "all":
                raise Failure(f"{name} error", f"{item}: only 'all' devices are currently supported")
        if call.joined(name) and selection.migs and "all" not in [item.lower() for item in ids]:
            raise Failure(f"{name} error", f"cannot enable {name} with specific MIG devices selected")


def channels(call: Call) -> list[str]:
    """The IMEX channels asked for, as numbers in text."""
    found = call.joined("imex-channel")
    for channel in found:
        if not (channel.isascii() and channel.isdigit() and len(channel) < 10 and int(channel) <= LARGEST_CHANNEL):
            raise Failure("error parsing IMEX info", f"unsupported IMEX channel value: {channel}")
    return [str(int(channel)) for channel in found]


def dropped(call: Call, path: str, kind: str) -> bool:
    """Whether an option says to leave a driver file out."""
    return (
        (kind == "firmware" and call.given("no-gsp-firmware"))
        or (path.endswith("/nvidia-persistenced/socket") and call.given("no-persistenced"))
        or (path.endswith("/nvidia-fabricmanager/socket") and call.given("no-fabricmanager"))
    )


# -- info


def info(call: Call) -> int:
    """The driver, CUDA, and seven facts of each GPU."""
    facts = node_facts(call, (), nvml=True)
    rows = [_facts_of(gpu) for gpu in facts.gpus]
    if call.given("csv"):
        lines = ["NVRM version,CUDA version", f"{facts.driver},{facts.cuda}", "", ",".join(LABELS)]
        lines += [",".join(row) for row in rows]
    else:
        lines = [_labelled("NVRM version", facts.driver), _labelled("CUDA version", facts.cuda)]
        for row in rows:
            lines += ["", *(_labelled(label, value) for label, value in zip(LABELS, row, strict=True))]
    put("".join(f"{line}\n" for line in lines))
    for lost in facts.lost:
        print(f"{lost.name} is left out: {lost.reason}", file=sys.stderr)
    return 0


def _facts_of(gpu: Gpu) -> tuple[str, ...]:
    bus = procfs.nvml_bus_id(gpu.bus_id)
    return str(gpu.index), str(gpu.minor), gpu.name, gpu.brand or "Unknown", gpu.uuid, bus, gpu.arch


def _labelled(label: str, value: str) -> str:
    return f"{label + ':':<15} {value}"


# -- list


def show(call: Call) -> int:
    """The paths of what a container would get, one a line."""
    put("".join(f"{path}\n" for path in paths(call)))
    return 0


def paths(call: Call) -> list[str]:
    """The same as a list."""
    root = call.last("root", "/")
    asked = channels(call)
    everything = not call.tokens or (len(call.tokens) == 1 and call.tokens[0].startswith("--imex-channel="))
    ids = ["all"] if everything else call.joined("device")
    facts = node_facts(call, ids)
    selection = selected(facts, ids)
    check_mig(call, selection, ids)
    found: list[str] = []
    if everything or call.given("device"):
        found += _device_paths(facts, selection, management=call.given("mig-config") or call.given("mig-monitor"))
    found += [f"{devices.IMEX_FOLDER}/channel{channel}" for channel in asked]
    found += _management_paths(call, root, facts, selection)
    if everything or any(call.given(name) for name in ("binaries", "libraries", "ipcs", "firmwares")):
        found += _file_paths(call, root, facts.driver, everything)
    return found


def _device_paths(facts: NodeFacts, selection: Selection, *, management: bool) -> Iterator[str]:
    there = {node.path for node in facts.nodes}
    yield "/dev/nvidiactl"
    for name in ("/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"):
        if name in there:
            yield name
    parents = [mig.gpu_minor for mig in selection.migs]
    for minor in dict.fromkeys([*(gpu.minor for gpu in selection.gpus), *parents]):
        yield f"/dev/nvidia{minor}"
    for mig in () if management else selection.migs:
        instance = f"{CAPABILITIES}/gpu{mig.gpu_minor}/mig/gi{mig.gi}"
        yield f"{instance}/access"
        yield f"{instance}/ci{mig.ci}/access"
        yield from _caps(facts, mig)


def _caps(facts: NodeFacts, mig: MigDevice) -> Iterator[str]:
    if facts.major("nvidia-caps") >= 0:
        for minor in (mig.gi_minor, mig.ci_minor):
            if minor >= 0:
                yield f"{devices.CAPS_FOLDER}/nvidia-cap{minor}"


def _management_paths(call: Call, root: str, facts: NodeFacts, selection: Selection) -> Iterator[str]:
    gpus = mig_capable(root, selection)
    for name, minor in zip(("config", "monitor"), facts.mig_minors, strict=True):
        if not call.joined(f"mig-{name}") or not gpus:
            continue
        yield f"{CAPABILITIES}/mig/{name}"
        if minor >= 0:
            yield f"{devices.CAPS_FOLDER}/nvidia-cap{minor}"
        for gpu in gpus:
            yield f"{CAPABILITIES}/gpu{gpu.minor}"
            if facts.major("nvidia-caps") >= 0:
                yield devices.CAPS_FOLDER
                yield from (f"{devices.CAPS_FOLDER}/nvidia-cap{minor}" for minor in cap_minors(root, gpu))


def mig_capable(root: str, selection: Selection) -> list[Gpu]:
    """The selected GPUs that can be partitioned: the driver has a capabilities folder for each of them."""
    proc = procfs.proc_root(root)
    return [gpu for gpu in selection.gpus if os.path.isdir(below(proc, f"{CAPABILITIES}/gpu{gpu.minor}"))]


def cap_minors(root: str, gpu: Gpu) -> list[int]:
    """The minors of a GPU's instances, those that don't exist yet too: who partitions it must open them at once."""
    text = procfs.read_text(below(procfs.proc_root(root), procfs.MIG_MINORS)) or ""
    rows = [line.split() for line in text.splitlines() if line.startswith(f"gpu{gpu.minor}/")]
    return [int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()]


def _file_paths(call: Call, root: str, version: str, everything: bool) -> Iterator[str]:
    files = driver_files(root, call.last("ldcache"), version)
    order = {name: place for place, name in enumerate(driver_table.CAPABILITY_OF_LIBRARY)}

    def of(kind: str) -> list[str]:
        return [
            file.path
            for file in files.files
            if file.kind == kind
            and file.capability != driver_table.EVERYTHING  # no option of configure asks for these
            and not dropped(call, file.path, kind)
        ]

    def place(path: str) -> int:
        return order.get(path.rpartition("/")[2].partition(".so")[0], len(order))

    if everything or call.given("binaries"):
        yield from of("binary")
    if everything or call.given("libraries"):
        yield from sorted(of("library"), key=place)
        if everything or call.given("compat32"):
            yield from sorted(of("library32"), key=place)
    if everything or call.given("ipcs"):
        yield from of("socket")
    if everything or call.given("firmwares"):
        yield from of("firmware")
