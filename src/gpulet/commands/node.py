"""gpulet node: what this node has, and how we know."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from gpulet import settings as settings_file
from gpulet.commands.terminal import shown
from gpulet.errors import ConfigError, DriverNotFound, NodeError, NvmlError
from gpulet.injection import csv_files
from gpulet.node import devices, driver, nvml, platform, procfs, tegra
from gpulet.node.driver import DriverFiles
from gpulet.node.driver_files import lacking
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.node.paths import below
from gpulet.node.platform import Platform

_WIDEST = 160  # columns of a table, where the terminal has fewer
_LEVEL_MARKS = {
    "board": "BRD",
    "switch": "PIX",
    "switches": "PXB",
    "host-bridge": "PHB",
    "numa": "NODE",
    "system": "SYS",
}


def look(root: str, dev_root: str = "", source: str = "auto", search: Sequence[str] = ()) -> tuple[NodeFacts, str]:
    """(facts, why NVML could not be asked). source: "nvml", "procfs", or "auto": NVML, and procfs where it can't start,
    and a Tegra's own GPU where there is neither. search: more folders to look for NVML in.

    Raises NodeError where nobody knows anything.
    """
    if source == "procfs":
        return procfs.facts(root, dev_root), ""
    try:
        return nvml.facts(root, dev_root, search=search), ""
    except NvmlError as error:
        if source == "nvml":
            raise
        try:
            return procfs.facts(root, dev_root), str(error)
        except NodeError:
            if platform.detect(root).kind == "tegra":
                return tegra.facts(root, dev_root), ""  # most of them have no NVML: nothing is wrong
            raise error from None


def _files(root: str, facts: NodeFacts | None) -> tuple[DriverFiles | None, str]:
    if facts is not None and facts.source == "tegra":
        return None, ""  # its files have no common version; lists tell which they are
    try:
        return driver.find(root, version=facts.driver if facts else ""), ""
    except DriverNotFound as error:
        return None, str(error)


def _out_of_reach(root: str, dev_root: str, facts: NodeFacts | None) -> str:
    """Why NVML lists none of the GPUs that the driver serves, "" where it lists some or there are none."""
    if facts is None or facts.source != "nvml" or facts.gpus or facts.lost:
        return ""
    try:
        served = procfs.facts(root, dev_root, every=True)
    except NodeError:
        return ""
    if not served.gpus:
        return ""
    folder = below(devices.choose_dev_root(root, dev_root), "/dev")
    there = [gpu.minor for gpu in served.gpus if f"/dev/nvidia{gpu.minor}" in {node.path for node in served.nodes}]
    why = f"none of their nodes in {folder} may be opened" if there else f"no nodes in {folder}"
    mend = "" if there else f"; gpulet system create-device-nodes{_option(root)} makes them"
    count = len(served.gpus)
    return (
        f"{count} GPU{'s'[: count > 1]} in {below(procfs.proc_root(root), procfs.DRIVER)}, NVML lists none: {why}{mend}"
    )


def _option(root: str) -> str:
    return "" if root in ("", "/") else f" --driver-root {shlex.quote(root)}"


def _configuration() -> list[str]:
    """What of config.toml counts for nothing, a line for each, or why it can't be used at all."""
    try:
        settings = settings_file.load()
    except ConfigError as error:
        return [str(error)]
    found = []
    for key in settings.unknown:
        near = difflib.get_close_matches(key, settings_file.KEYS, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        found.append(f"{settings.source}: unknown key {key}, which counts for nothing{meant}")
    return found


def command(
    driver_root: Annotated[
        str, typer.Option("--driver-root", envvar="GPULET_DRIVER_ROOT", help="The tree that holds the driver.")
    ] = "/",
    dev_root: Annotated[str, typer.Option(help="The tree whose dev/ holds the nodes, where that is another.")] = "",
    source: Annotated[str, typer.Option(help="Whom to ask: auto, nvml or procfs.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    files: Annotated[bool, typer.Option("--files", help="List the driver's files too, and those missing.")] = False,
) -> None:
    """What this node has: GPUs, driver, platform, and the evidence."""
    if source not in ("auto", "nvml", "procfs"):
        raise typer.BadParameter(f"--source {source}: choose auto, nvml or procfs")
    facts, trouble = _try(driver_root, dev_root, source)
    kind = platform.detect(driver_root, gpu_names=[gpu.name for gpu in facts.gpus] if facts else [])
    found, no_files = _files(driver_root, facts)
    lacks = [f"{text} in this node's driver; install its package" for text in lacking(found)] if found else []
    unreachable = _out_of_reach(driver_root, dev_root, facts)
    troubles = [text for text in (trouble, unreachable, no_files, *lacks, *_configuration()) if text]
    if as_json:
        data: dict[str, Any] = {"root": driver_root, "platform": kind.to_data()}
        data["facts"] = facts.to_data() if facts else None
        data["files"] = found.to_data() if found else None
        data["trouble"] = troubles
        typer.echo(json.dumps(data))
    else:
        _show(driver_root, facts, kind, found, files, troubles)
    if facts is None or unreachable:
        raise typer.Exit(1)


def _try(root: str, dev_root: str, source: str) -> tuple[NodeFacts | None, str]:
    """As `look`, with no facts instead of an error: the platform and its evidence are worth telling all the same."""
    try:
        return look(root, dev_root, source)
    except NodeError as error:
        return None, str(error)


def _show(
    root: str,
    facts: NodeFacts | None,
    kind: Platform,
    found: DriverFiles | None,
    files: bool,
    troubles: Sequence[str],
) -> None:
    console = Console()
    _show_head(console, root, facts, kind, found)
    if facts:
        _show_gpus(console, facts)
        _show_links(console, facts)
    for text in troubles:
        console.print(f"[yellow]![/] {shown(text)}", soft_wrap=True)
    if files and found:
        _show_files(console, found)


def _put(console: Console, table: Table) -> None:
    """At the table's own width: rows that the terminal breaks are easier to read than squeezed columns. The two columns
    of a list can be squeezed, and for a file or a pipe needn't be."""
    if table.show_header or not console.is_terminal:
        natural = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
        console = Console(width=max(console.width, natural))
    console.print(table)


def _show_head(console: Console, root: str, facts: NodeFacts | None, kind: Platform, files: DriverFiles | None) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("platform", f"[bold]{kind.kind}[/]")
    table.add_row("evidence", "\n".join(map(shown, kind.evidence)))
    if facts and facts.source == "tegra":
        table.add_row("Linux for Tegra", shown(facts.driver) or "unknown")
        rows = csv_files.read(root)
        table.add_row("files", f"{len(rows)} listed in {csv_files.FOLDER}")
    elif facts:
        versions = f"{facts.driver or 'unknown'}, CUDA {facts.cuda or 'unknown'}"
        table.add_row("driver", shown(versions + (f", NVML {facts.nvml}" if facts.nvml else "")))
        table.add_row("asked", facts.source)
        table.add_row("majors", shown(", ".join(f"{name} {number}" for name, number in facts.majors)))
    if facts and facts.imex:
        table.add_row("IMEX channels", f"{len(facts.imex)}: {', '.join(map(str, facts.imex[:16]))}")
    if kind.vfio:
        table.add_row("virtual machines", "belong the GPUs " + shown(", ".join(kind.vfio)))
    if files:
        table.add_row(
            "driver files", f"{len(files.files)} in {shown(', '.join(files.folders))}, {len(files.missing)} not found"
        )
    _put(console, table)


def _show_gpus(console: Console, facts: NodeFacts) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("index", "minor", "uuid", "PCI", "name", "memory", "arch", "NUMA", "MIG"):
        right = title in ("index", "minor", "memory", "NUMA")
        table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=title in ("uuid", "PCI"))
    for gpu in facts.gpus:
        memory = f"{gpu.memory / 2**30:.0f} GiB" if gpu.memory else ""
        numa = str(gpu.numa) if gpu.numa >= 0 else "?"
        minor = str(gpu.minor) if gpu.minor >= 0 else ""
        row = (str(gpu.index), minor, gpu.uuid, gpu.bus_id, gpu.name, memory, gpu.arch, numa, _mig(gpu))
        table.add_row(*map(shown, row))
        for mig in gpu.mig:
            slot = f"{mig.gpu}:{mig.slot if mig.slot >= 0 else '?'}"
            instances = f"gi {mig.gi}, ci {mig.ci}, caps {mig.gi_minor}, {mig.ci_minor}"
            memory = f"{mig.memory / 2**30:.0f} GiB"
            row = (slot, "", mig.uuid, "", f"  {mig.profile or 'MIG'}", memory, "", "", instances)
            table.add_row(*map(shown, row))
    for lost in facts.lost:
        table.add_row(str(lost.index), "", shown(lost.uuid), lost.bus_id, f"[red]lost: {shown(lost.reason)}")
    _put(console, table)


def _mig(gpu: Gpu) -> str:
    if gpu.mig_enabled:
        return f"on, {len(gpu.mig)} devices"
    return "off" if gpu.mig_capable else ""


def _show_links(console: Console, facts: NodeFacts) -> None:
    if not any(gpu.links for gpu in facts.gpus):
        return
    table = Table(
        box=SIMPLE_HEAD, pad_edge=False, title="links: NVn is n NVLinks, else the PCIe level", title_justify="left"
    )
    table.add_column("")
    for gpu in facts.gpus:
        table.add_column(str(gpu.index))
    for gpu in facts.gpus:
        to = {
            link.peer: f"NV{link.nvlinks}" if link.nvlinks else _LEVEL_MARKS.get(link.level, "?") for link in gpu.links
        }
        table.add_row(str(gpu.index), *(to.get(peer.index, "") for peer in facts.gpus))
    _put(console, table)


def _show_files(console: Console, files: DriverFiles) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("file", "kind", "capability", "soname"):
        table.add_column(title, overflow="fold")
    for file in files.files:
        table.add_row(shown(file.path), file.kind, file.capability or "always", shown(file.soname))
    for missing in files.missing:
        looked = shown(" ".join(missing.looked))
        table.add_row(f"[dim]{shown(missing.name)}", "[yellow]not found", "", f"[dim]looked in {looked}")
    _put(console, table)
