"""`gpulet demo`: from Pod manifests to GPUs inside real containers, on this machine, with one command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gpulet.commands.timeline import show_node, show_pod
from gpulet.errors import GpuletError, UsageError
from gpulet.sim import isolation, pods
from gpulet.sim.demo import Demo
from gpulet.sim.description import MAX_GPUS
from gpulet.sim.stage import STRATEGIES, Options, Stage
from gpulet.sim.workplace import workplace

KNOWN = ("runc", "crun")  # where one of these isn't installed, the rest is planned
CHOICES = {
    "strategy": STRATEGIES,
    "identify": ("uuid", "index"),
    "path": ("runtime", "hook"),
    "policy": ("env", "kubelet"),
    "node": ("simulated", "host"),
}


def command(
    pod: Annotated[
        list[Path] | None,
        typer.Option("--pod", help="A manifest to play (- is standard input), repeatable; without it the examples."),
    ] = None,
    profile: Annotated[str, typer.Option(help="The simulated node's kind: see `gpulet sim profiles`.")] = "h100x8",
    gpus: Annotated[int | None, typer.Option(min=1, max=MAX_GPUS, help="How many GPUs of the profile's.")] = None,
    node: Annotated[str, typer.Option(help="simulated, or host: this machine's own GPUs.")] = "simulated",
    strategy: Annotated[
        str,
        typer.Option(help="How the plugin names devices: envvar, volume-mounts, cdi-annotations, cdi-cri; or several."),
    ] = "envvar",
    identify: Annotated[str, typer.Option(help="Devices by uuid or index.")] = "uuid",
    variable: Annotated[
        str, typer.Option(help="The plugin's variable: NVIDIA_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES.")
    ] = "NVIDIA_VISIBLE_DEVICES",
    path: Annotated[str, typer.Option(help="runtime: the spec is edited; hook: the prestart hook mounts.")] = "runtime",
    policy: Annotated[str, typer.Option(help="Who is believed: env, or the kubelet's ledger.")] = "env",
    low_level: Annotated[str, typer.Option(help="The low-level runtime: runc, crun or a path.")] = "runc",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the demo's folder, to look around in.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as data, on standard output.")] = False,
) -> int:
    """Play Pods through discovery, scheduling, configuration, initialisation and mounting."""
    strategies = tuple(dict.fromkeys(one.strip() for one in strategy.split(",") if one.strip()))
    for name, value in (("identify", identify), ("path", path), ("policy", policy), ("node", node)):
        _check(name, value)
    for one in strategies or ("",):
        _check("strategy", one)
    if not variable.isidentifier():
        raise UsageError("--variable", seen=repr(variable), wanted="a variable's name, such as NVIDIA_VISIBLE_DEVICES")
    if low_level not in KNOWN and shutil.which(low_level) is None:
        raise UsageError("--low-level", seen=repr(low_level), wanted="runc, crun or the path of a program like them")
    options = Options(
        profile=profile,
        gpus=gpus,
        host=node == "host",
        strategies=strategies,
        identification=identify,
        variable=variable,
        path=path,
        policy=policy,
        low_level=low_level,
    )
    wanted, notes = pods.load_all(pod or _examples())
    for note in notes:
        print(note, file=sys.stderr)
    os.umask(0o022)  # the image's files are for every user of a container, whatever root keeps to itself here
    why_planned = isolation.enter(low_level)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    with workplace(keep) as folder:
        if keep:
            print(f"kept: {folder}", file=sys.stderr)
        return _perform(folder, options, wanted, why_planned, as_json=as_json, keep=keep)


def _perform(
    folder: Path, options: Options, wanted: list[pods.Pod], why_planned: str, *, as_json: bool, keep: bool
) -> int:
    console = Console(highlight=False, soft_wrap=False)
    stage = Stage(folder, options)
    try:
        stage.discover()
        demo = Demo(stage, privileged=not why_planned)
        node = demo.node()
        if as_json:
            report = demo.run(wanted)
        else:
            order = {uuid: index for index, uuid in enumerate(node["gpus"])}
            show_node(console, node, _settings(options))
            demo.tell = lambda part: show_pod(console, part, order)
            report = demo.run(wanted)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what was begun is taken away to its end
        stage.close(keep=keep)
    if why_planned:
        report["planned"] = why_planned
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _conclude(console, report)
    return 0 if report["ok"] else 1


def _conclude(console: Console, report: dict[str, Any]) -> None:
    for line in report["wrong"]:
        console.print(Text(f"wrong: {line}", "bold red"))
    containers = [(pod, one) for pod in report["pods"] for one in pod["containers"] if one["seen"] is not None]
    beyond = [f"{pod['name']}/{one['name']}" for pod, one in containers if one["beyond"]]
    if "planned" in report:
        console.print(Text(f"steps 4 and 5 were planned, not done: {report['planned']}", "yellow"))
    elif report["ok"]:
        console.print(Text(f"containers started: {len(containers)}; each saw exactly what it was to see", "green"))
    if beyond:
        text = f"by the rules in force that is more than the kubelet gave: {', '.join(beyond)} (see --policy kubelet)"
        console.print(Text(text, "bold red"))


def _settings(options: Options) -> str:
    return (
        f"strategy {','.join(options.strategies)}, devices by {options.identification}, {options.variable}, "
        f"path {options.path}, policy {options.policy}, {options.low_level}"
    )


def _check(name: str, value: str) -> None:
    if value not in CHOICES[name]:
        raise UsageError(f"--{name}", seen=repr(value), wanted=f"one of {', '.join(CHOICES[name])}")


def _examples() -> list[Path]:
    """The example Pods: those of the checkout, else those packed with gpulet."""
    for folder in (Path(__file__).parents[3] / "examples" / "pods", Path(str(files("gpulet.sim"))) / "examples"):
        found = sorted(folder.glob("*.yaml"))
        if found:
            return found
    raise GpuletError("example Pods", seen="none found", wanted="examples/pods/*.yaml", remedy="name a manifest: --pod")


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    # end like Ctrl-C does, so that everything started is ended and nothing is left behind
    raise KeyboardInterrupt
