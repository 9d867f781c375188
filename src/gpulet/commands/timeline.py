"""Draws what the demo found, for people."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gpulet.errors import visible
from gpulet.sim.evidence import ranges

Report = dict[str, Any]

MARKS = {"Running": ("●", "green"), "Pending": ("○", "yellow"), "Failed": ("✗", "red")}
NUMBERS = {"discovery": "1", "scheduling": "2", "configuration": "3", "initialisation": "4", "mounting": "5"}


def show_node(console: Console, node: Report, settings: str) -> None:
    """The node's own part, at the head."""
    offers = ", ".join(
        f"{name} capacity {one['capacity']} allocatable {one['allocatable']}" for name, one in node["resources"].items()
    )
    models = " + ".join(node["models"]) or "GPU"
    gpus = f"{len(node['gpus'])} × {models}, driver {node['driver']}"
    console.print(
        Panel(
            f"{gpus}\n{offers}; registered in {node['ms']:.0f} ms\n{settings}",
            title=f"[bold]node {node['name']}",
            title_align="left",
            border_style="cyan",
            expand=False,
        )
    )


def show_pod(console: Console, pod: Report, order: dict[str, int]) -> None:
    """One Pod: each container's steps with evidence and time, then what it saw. order: UUID -> index."""
    mark, colour = MARKS.get(pod["phase"], ("?", "white"))
    head = Text.assemble((f"{mark} ", colour), (visible(pod["name"]), "bold"), f"  {pod['phase']}")
    if pod["node"]:
        head.append(f" on {pod['node']}", "dim")
    if pod["runtimeClass"] != "nvidia":
        head.append(f"  runtimeClass {visible(pod['runtimeClass'])}", "dim")
    console.print(head)
    if pod["message"] and not pod["node"]:
        console.print(Text(f"    {visible(pod['message'])}", "yellow"))
        return
    for note in pod["notes"]:
        console.print(Text(f"    {visible(note)}", "dim"))
    for container in pod["containers"]:
        _show_container(console, container, order)
    if pod["phase"] == "Failed":
        console.print(Text(f"    {visible(pod['message'])}", "red"))


def _show_container(console: Console, container: Report, order: dict[str, int]) -> None:
    asked = container["requested"]
    console.print(Text(f"    {visible(container['name'])}: asked for {asked or 'no'} GPU{'s' if asked > 1 else ''}"))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=6)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for step in container["steps"]:
        number = NUMBERS[step["step"]]
        table.add_row("", f"{number} {step['step']}", f"{step['ms']:.1f} ms", Text(_short(step["evidence"])))
    if container["reason"]:
        table.add_row("", "  why", "", Text(_short(container["reason"]), style="italic"))
    for note in container["notes"]:
        table.add_row("", "  note", "", Text(visible(note), style="dim"))
    console.print(table)
    seen = container["seen"]
    if seen is None:
        return
    indices = [order.get(uuid, -1) for uuid in seen["nvml"]]
    given = [order.get(uuid, -1) for uuid in container["allocated"]]
    if indices == given:
        text, style = f"      saw GPU {_list(indices)}: exactly what it was given", "green"
    else:
        text = f"      saw GPU {_list(indices)}, though the kubelet gave it {_list(given)}: policy kubelet stops that"
        style = "bold red"
    console.print(Text(text.replace("saw GPU none", "saw no GPU"), style))


def _short(text: str) -> str:
    """UUIDs by their first part, which tells eight GPUs apart; the data of --json has them whole."""
    return re.sub(r"((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", r"\1…", visible(text))


def _list(indices: list[int]) -> str:
    return ranges(indices) if indices else "none"
