"""The spec that `gpulet cdi generate` writes, for each mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

from gpulet.commands.node import look
from gpulet.errors import CdiError, NodeError, NvmlError, UsageError
from gpulet.injection import cdi, cdi_fingerprint, cdi_modes, cdi_rules, cdi_targets, csv_files
from gpulet.injection.build import GATED
from gpulet.injection.cdi_calls import HookCalls
from gpulet.injection.cdi_spec import HostPaths
from gpulet.injection.model import RootfsWork
from gpulet.injection.nodes import NO_UVM, UVM
from gpulet.injection.select import select
from gpulet.node import driver, nvml, platform, tegra
from gpulet.node.devices import kernel_major
from gpulet.node.driver_files import DriverFiles, lacking
from gpulet.node.gpu import NodeFacts

MODES = ("auto", "nvml", "procfs", "wsl", "csv", "management", "imex", *GATED)
NO_GIDS = "no-additional-gids-for-device-nodes"
NO_SOCKETS = "disable-ipc-discoverer"
COHERENT = "enable-coherent-annotations"
ONE_CSV_DEVICE = "disable-multiple-csv-devices"
NEUTRAL = "enable-explicit-driver-libraries"
# About a library that the peer asks for links beside device nodes; here sysfs and /dev are looked at.
WITHOUT_MEANING = ("disable-nvsandboxutils", "disable-nvsandbox-utils", "enable-nvsandboxutils")
FLAGS = (NO_GIDS, NO_SOCKETS, COHERENT, ONE_CSV_DEVICE, NEUTRAL, *WITHOUT_MEANING)
_ORIN_COMPAT = "/usr/local/cuda/compat_orin"  # where images keep compatibility libraries for the Tegra of this name


class Kind(TypedDict):
    """The two halves of a spec's kind."""

    vendor: str
    cls: str


@dataclass(frozen=True)
class Options:
    """What the command line asks for. "" for vendor and class means the mode's own."""

    mode: str = "auto"
    root: str = "/"
    dev_root: str = ""
    host_root: str = ""
    names: tuple[str, ...] = ("index", "uuid")
    ids: tuple[str, ...] = ("all",)
    vendor: str = ""
    cls: str = ""
    search: tuple[str, ...] = ()
    hook_path: str = HookCalls.path
    ldconfig: str = ""
    csv_files: tuple[str, ...] = ()
    csv_ignore: tuple[str, ...] = ()
    csv_compat: str = ""
    all_device: bool = True
    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    more_hooks: tuple[str, ...] = ()
    config_search: tuple[str, ...] = ()
    target: str = ""

    def kind(self, vendor: str, cls: str) -> Kind:
        """vendor and class as keywords, the mode's own where none was asked for."""
        return {"vendor": self.vendor or vendor, "cls": self.cls or cls}

    def calls(self) -> HookCalls:
        """The hooks that do the work in a container's root file system."""
        return HookCalls(self.hook_path, self.without, self.ldconfig)


def _resolve_mode(options: Options) -> str:
    if options.mode not in MODES:
        raise UsageError("--mode", seen=options.mode, wanted=", ".join(MODES))
    if options.mode != "auto":
        return options.mode
    kind = platform.detect(options.root).kind
    return {"wsl": "wsl", "tegra": "csv"}.get(kind, "nvml")


def generate_spec(options: Options) -> tuple[dict[str, Any], NodeFacts | None]:
    """(spec, the facts it was made from). Raises UsageError, NodeError, CdiError."""
    mode = _resolve_mode(options)
    if mode == "csv":
        return _csv(options), None
    facts, _trouble = look(
        options.root, options.dev_root, mode if mode in ("nvml", "procfs") else "auto", options.search
    )
    return _readable(mode, options, facts), facts


def coherence_specs(options: Options, facts: NodeFacts | None) -> dict[str, dict[str, Any]]:
    """With the flag for it: "coherent" and "noncoherent" -> a spec of the whole GPUs that are so, its class being named
    for that. A spec that would have no GPU is left out.
    """
    mode = _resolve_mode(options)
    if COHERENT not in options.flags or facts is None or mode not in ("nvml", "procfs"):
        return {}
    wanted = [gpu for gpu in select(facts, options.ids).gpus if not gpu.mig_enabled]
    out = {}
    for word, is_so in (("coherent", True), ("noncoherent", False)):
        ids = tuple(str(gpu.index) for gpu in wanted if gpu.coherent == is_so)
        if ids:
            out[word] = _readable(mode, replace(options, ids=ids, cls=f"{options.cls or 'gpu'}.{word}"), facts)
    return out


def _readable(mode: str, options: Options, facts: NodeFacts) -> dict[str, Any]:
    """The spec, with younger features given up until the target reads it: the stamp or the groups, both, then names
    that begin with a digit. Raises CdiError where that isn't enough.
    """
    stamp = cdi_fingerprint.fingerprint(facts, gpus=mode not in ("imex", *GATED))
    highest = cdi_targets.limit(options.target) if options.target else cdi_rules.VERSIONS[-1]
    groups: dict[str, Any] = {"flags": (*options.flags, NO_GIDS)}
    names = {"names": _older(options.names)}
    left: list[str] = []
    if options.more_hooks and options.more_hooks != ("chmod",):
        raise UsageError(
            "--enable-hook", seen=",".join(options.more_hooks), wanted="chmod, the others are always there"
        )
    for made_of, change in ((stamp, {}), (stamp, groups), ({}, {}), ({}, groups), ({}, groups | names)):
        spec = _spec(mode, replace(options, **change), facts, made_of)
        left = cdi_targets.above(spec, highest)
        if not left:
            return _with_chmod(spec, options.calls()) if options.more_hooks else spec
    raise _unreadable(options, left, highest)


def _with_chmod(spec: dict[str, Any], calls: HookCalls) -> dict[str, Any]:
    """With a hook for engines that make the folders of device nodes for root alone (old versions of crun)."""
    hook = calls.record("chmod", "--mode", "755", "--path", "/dev/dri", "--path", "/dev/nvidia-caps")
    common = spec["containerEdits"]
    return {**spec, "containerEdits": {**common, "hooks": [*common.get("hooks", ()), hook]}}


def _older(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that begin with a letter: "gpu0" for "0"."""
    return tuple(dict.fromkeys("type-index" if name == "index" else name for name in names))


def _paths(options: Options, dev_root: str) -> HostPaths:
    """The device nodes are elsewhere on the host too where they lie in the driver root."""
    in_root = dev_root.rstrip("/") == options.root.rstrip("/")
    return HostPaths(options.root, options.host_root, dev_root, options.host_root if in_root else "")


def _spec(mode: str, options: Options, facts: NodeFacts, stamp: dict[str, str]) -> dict[str, Any]:
    paths = _paths(options, facts.dev_root)
    if mode in GATED:
        kind = options.kind("nvidia.com", mode)
        return cdi_modes.gated_spec(facts, mode, root=options.root, paths=paths, annotations=stamp, **kind)
    if mode == "imex":
        kind = options.kind("nvidia.com", "imex-channel")
        return cdi.channel_spec(facts, paths=paths, annotations=stamp, **kind)
    files = _driver_files(options, facts)
    if mode == "wsl":
        kind = options.kind("nvidia.com", "gpu")
        return cdi_modes.wsl_spec(facts, files, calls=options.calls(), annotations=stamp, paths=paths, **kind)
    if mode == "management":
        kind = options.kind("management.nvidia.com", "gpu")
        return cdi_modes.management_spec(facts, files, calls=options.calls(), annotations=stamp, paths=paths, **kind)
    return cdi.make_spec(
        facts,
        files,
        names=options.names,
        calls=options.calls(),
        all_device=options.all_device,
        paths=paths,
        annotations=stamp,
        gids=NO_GIDS not in options.flags,
        sockets=NO_SOCKETS not in options.flags,
        ids=options.ids,
        **options.kind("nvidia.com", "gpu"),
    )


def _driver_files(options: Options, facts: NodeFacts) -> DriverFiles:
    return driver.find(
        options.root,
        version=facts.driver,
        search=options.search,
        neutral=NEUTRAL in options.flags,
        config_search=options.config_search,
    )


def _csv(options: Options) -> dict[str, Any]:
    rows = csv_files.read(options.root, options.csv_files)
    if not rows:
        looked = " ".join(options.csv_files) or f"*.csv in {csv_files.FOLDER} beneath {options.root}"
        raise NodeError("no file lists of a Tegra", seen=looked, wanted="lines such as 'dev, /dev/nvmap'")
    facts = _tegra(options)
    orin = any("Orin (nvgpu)" in gpu.name for gpu in facts.gpus)
    found = csv_files.injection(
        rows,
        options.root,
        dev_root=options.dev_root,
        ignore=options.csv_ignore,
        cuda=facts.cuda,
        compat_folder=options.csv_compat or (_ORIN_COMPAT if orin else RootfsWork.compat_folder),
    )
    highest = cdi_targets.limit(options.target) if options.target else cdi_rules.VERSIONS[-1]
    left: list[str] = []
    for stamp in (cdi_fingerprint.fingerprint(facts), {}):
        spec = csv_files.spec(
            found,
            facts if ONE_CSV_DEVICE not in options.flags else None,
            names=options.names,
            calls=options.calls(),
            annotations=stamp,
            all_device=options.all_device,
            paths=_paths(options, facts.dev_root),
            **options.kind("nvidia.com", "gpu"),
        )
        left = cdi_targets.above(spec, highest)
        if not left:
            return spec
    raise _unreadable(options, left, highest)


def _unreadable(options: Options, left: list[str], highest: str) -> CdiError:
    return CdiError(
        f"{options.target} can't read this node's spec", seen="; ".join(left), wanted=f"CDI {highest} at most"
    )


def _tegra(options: Options) -> NodeFacts:
    """What NVML says where a Tegra has it, as the newer ones do; the lists are enough without."""
    try:
        return nvml.facts(options.root, options.dev_root, links=False, search=options.search)
    except NvmlError:
        return tegra.facts(options.root, options.dev_root)


def gaps(facts: NodeFacts | None, options: Options) -> list[str]:
    """What the spec lacks that containers will miss, each with its remedy."""
    if facts is None or options.mode not in ("auto", "nvml", "procfs", "management"):
        return []
    present = {node.path for node in facts.nodes}
    if "/dev/dxg" in present:
        return []
    found = [f"{lost.name} is left out: {lost.reason}" for lost in facts.lost]
    if UVM not in present:
        found.append(NO_UVM)
    if "/dev/nvidiactl" not in present:
        found.append("no /dev/nvidiactl; run: nvidia-modprobe -c 0")
    missing = lacking(_driver_files(options, facts))
    found += [f"{text} of this driver; install it, or name its folder with --library-search-path" for text in missing]
    minors = [gpu.minor for gpu in facts.gpus if gpu.minor >= 0]  # an integrated GPU has none
    found += [f"no /dev/nvidia{minor}" for minor in minors if f"/dev/nvidia{minor}" not in present]
    for node in facts.nodes:
        now = kernel_major(facts, node.path)
        if now >= 0 and now != node.major:
            found.append(
                f"{node.path} has major {node.major}, its driver {now}; remove it and run: nvidia-modprobe -u -c 0"
            )
    return found
