"""The spec that `gpulet cdi generate` writes, for each mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

from gpulet.commands.node import look
from gpulet.errors import CdiError, NodeError, UsageError
from gpulet.injection import cdi, cdi_fingerprint, cdi_modes, cdi_targets, csv_files
from gpulet.injection.build import GATED
from gpulet.injection.model import RootfsWork
from gpulet.node import driver, platform
from gpulet.node.gpu import NodeFacts

MODES = ("auto", "nvml", "procfs", "wsl", "csv", "management", "imex", *GATED)
FLAGS = (
    "no-additional-gids-for-device-nodes",
    "disable-ipc-discoverer",
)  # of the peer's, those that mean something here


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
    hook_path: str = "/usr/bin/gpulet-cdi-hook"
    csv_files: tuple[str, ...] = ()
    csv_ignore: tuple[str, ...] = ()
    csv_compat: str = ""
    all_device: bool = True
    flags: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    target: str = ""

    def kind(self, vendor: str, cls: str) -> Kind:
        """vendor and class as keywords, the mode's own where none was asked for."""
        return {"vendor": self.vendor or vendor, "cls": self.cls or cls}


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
    facts, _trouble = look(options.root, options.dev_root, mode if mode in ("nvml", "procfs") else "auto")
    stamp = cdi_fingerprint.fingerprint(facts)
    highest = cdi_targets.limit(options.target) if options.target else ""
    spec = _spec(mode, options, facts, stamp)
    if highest and cdi_targets.above(spec, highest):
        spec = _lower(mode, options, facts, highest)
    return spec, facts


def _lower(mode: str, options: Options, facts: NodeFacts, highest: str) -> dict[str, Any]:
    """The spec with younger features given up until the target reads it: the stamp or the groups, both, then names
    that begin with a digit. Raises CdiError where that isn't enough.
    """
    stamp = cdi_fingerprint.fingerprint(facts)
    groups: dict[str, Any] = {"flags": (*options.flags, FLAGS[0])}
    names = {"names": _older(options.names)}
    for made_of, change in ((stamp, groups), ({}, {}), ({}, groups), ({}, groups | names)):
        spec = _spec(mode, replace(options, **change), facts, made_of)
        left = cdi_targets.above(spec, highest)
        if not left:
            return spec
    raise CdiError(
        f"{options.target} can't read this node's spec", seen="; ".join(left), wanted=f"CDI {highest} at most"
    )


def _older(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that begin with a letter: "gpu0" for "0"."""
    return tuple(dict.fromkeys("type-index" if name == "index" else name for name in names))


def _spec(mode: str, options: Options, facts: NodeFacts, stamp: dict[str, str]) -> dict[str, Any]:
    if mode in GATED:
        return cdi_modes.gated_spec(facts, mode, root=options.root, **options.kind("nvidia.com", mode))
    if mode == "imex":
        return cdi.channel_spec(facts, **options.kind("nvidia.com", "imex-channel"))
    files = driver.find(options.root, version=facts.driver, search=options.search)
    if mode == "wsl":
        return cdi_modes.wsl_spec(
            facts, files, hook_path=options.hook_path, annotations=stamp, **options.kind("nvidia.com", "gpu")
        )
    if mode == "management":
        kind = options.kind("management.nvidia.com", "gpu")
        return cdi_modes.management_spec(facts, files, hook_path=options.hook_path, annotations=stamp, **kind)
    return cdi.make_spec(
        facts,
        files,
        names=options.names,
        hook_path=options.hook_path,
        all_device=options.all_device,
        host_root=options.host_root,
        annotations=stamp,
        gids=FLAGS[0] not in options.flags,
        sockets=FLAGS[1] not in options.flags,
        ids=options.ids,
        without=options.without,
        **options.kind("nvidia.com", "gpu"),
    )


def _csv(options: Options) -> dict[str, Any]:
    rows = csv_files.read(options.root, options.csv_files)
    if not rows:
        raise NodeError("no file lists of a Tegra", seen=f"*.csv in {csv_files.FOLDER} beneath {options.root}")
    found = csv_files.injection(
        rows,
        options.root,
        dev_root=options.dev_root,
        ignore=options.csv_ignore,
        compat_folder=options.csv_compat or RootfsWork.compat_folder,
    )
    return csv_files.spec(found, hook_path=options.hook_path, **options.kind("nvidia.com", "gpu"))


def gaps(facts: NodeFacts | None, mode: str) -> list[str]:
    """What the spec lacks that containers will miss, each with its remedy."""
    if facts is None or mode not in ("auto", "nvml", "procfs", "management"):
        return []
    present = {node.path for node in facts.nodes}
    if "/dev/dxg" in present:
        return []
    found = [f"GPU {lost.index} is left out: {lost.reason}" for lost in facts.lost]
    if "/dev/nvidia-uvm" not in present:
        found.append("CUDA won't work: no /dev/nvidia-uvm; run: modprobe nvidia_uvm && nvidia-modprobe -u -c 0")
    if "/dev/nvidiactl" not in present:
        found.append("no /dev/nvidiactl; run: nvidia-modprobe -c 0")
    found += [f"no /dev/nvidia{gpu.minor}" for gpu in facts.gpus if f"/dev/nvidia{gpu.minor}" not in present]
    return found
