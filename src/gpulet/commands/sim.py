"""gpulet sim: simulated nodes from the command line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from gpulet.codec import read_standard_input
from gpulet.errors import ConfigError, UsageError
from gpulet.sim import capture as captured
from gpulet.sim import description, inject, node, rootfs

app = typer.Typer(no_args_is_help=True, help="Simulated nodes: create, break, capture.")

AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# "\b" keeps the command line's library from joining the lines that follow
CHANGES = "\n\n".join(
    [
        "Change a running node: every process that asks NVML or looks at /proc and /dev sees it at once.",
        "\b\nA fault           gpu 3 xid 79, gpu 3 xid 43 gi 7 ci 0\n"
        "A lost GPU        gpu 3 lost, gpu 3 found, gpu 3 recovery 2\n"
        "NVML              nvml init fails with 18, nvml init takes 2s, nvml init works\n"
        "MIG               mig gpu0 3g.40gb x2, mig gpu0 off\n"
        "Another driver    driver 580.65.06",
        "\b\nExamples:\n"
        "  gpulet sim inject node 'gpu 3 xid 79' 'gpu 3 lost'\n"
        "  echo 'at 2s gpu 2 xid 79' | gpulet sim inject node --script -",
    ]
)


@app.command()
def create(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to lay the node out in: new or empty.")],
    profile: Annotated[
        str, typer.Option(help="Which machine: a name out of `gpulet sim profiles`, or a YAML file.")
    ] = "h100x8",
    gpus: Annotated[int | None, typer.Option(help="How many GPUs, where not the profile's number.")] = None,
    mig: Annotated[list[str] | None, typer.Option(help="A MIG layout: 'gpu0: 1g.10gb x7'. Repeatable.")] = None,
    driver: Annotated[str | None, typer.Option(help="The driver's version.")] = None,
    as_json: AS_JSON = False,
) -> None:
    """Lay out a node without hardware: driver files, device nodes, /proc, and an NVML library."""
    made = node.create(folder, profile, gpus=gpus, mig=mig or (), driver=driver)
    if as_json:
        _print({"root": str(made.root), "placeholders": made.placeholders, **made.description.to_data()})
        return
    typer.echo(f"{made.root}: {_models(made.description)}, driver {made.description.driver}")
    if made.placeholders:
        typer.echo("The device nodes are plain files: only root may make real ones.")
    typer.echo(f"Look at it:  gpulet node --driver-root {made.root}")
    if made.gpus:
        typer.echo(f"Break it:    gpulet sim inject {made.folder} 'gpu 0 xid 79'")


@app.command()
def profiles(as_json: AS_JSON = False) -> None:
    """List the machines that can be simulated."""
    every = {name: description.load_profile(name) for name in description.profiles()}
    if as_json:
        _print({name: one.to_data() for name, one in every.items()})
        return
    width = max(map(len, every))
    for name, one in every.items():
        typer.echo(f"{name:{width}}  {_models(one)}, driver {one.driver}")
        typer.echo(f"{'':{width}}  {description.summary(name)}")


@app.command(name="inject", help=CHANGES, short_help="Change a running node: faults, MIG layouts, another driver.")
def change(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A simulated node.")],
    what: Annotated[
        list[str] | None, typer.Argument(metavar="CHANGE", help="One change, or several, each one argument.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="A file of lines 'at 2s gpu 2 xid 79', played in time; - reads standard input.")
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Change a running node."""
    if bool(what) == bool(script):
        raise UsageError("sim inject", seen="both" if what else "neither", wanted="changes, or --script FILE")
    made = node.load(folder)
    steps = inject.read_script(_read(script), made) if script else [(0.0, one) for one in what or ()]
    for _, one in steps:
        inject.check(made, one)
    for seconds, one in inject.play(made.folder, steps):
        if as_json:
            _print({"at": seconds, "change": one})
        elif script:
            typer.echo(f"{seconds:8.3f} s  {one}")


@app.command()
def capture(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the description.")],
    root: Annotated[Path, typer.Option("--driver-root", help="The node: / or a simulated node's root.")] = Path("/"),
    redact: Annotated[
        bool, typer.Option(help="Put made-up UUIDs and serial numbers in the place of the machine's.")
    ] = True,
    as_json: AS_JSON = False,
) -> None:
    """Write down what this node is, in a file that `gpulet sim create --profile FILE` lays out again."""
    found = captured.capture(root, file, redact=redact)
    if as_json:
        _print({"file": str(file), **found.to_data()})
        return
    typer.echo(f"{file}: {_models(found)}, driver {found.driver}{', identities made up' if redact else ''}")
    typer.echo(f"Lay it out:  gpulet sim create DIR --profile {file}")


@app.command(name="rootfs")
def make_rootfs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to fill: new or empty.")],
    libc: Annotated[str, typer.Option(help="glibc, musl or none.")] = "glibc",
    cuda_compat: Annotated[
        str | None, typer.Option(help="Add CUDA's forward-compatibility libraries, this driver's.")
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Make a small root file system for a container, with a probe that says what the container got."""
    made = rootfs.create(folder, libc, cuda_compat=cuda_compat)
    if as_json:
        _print({"root": str(made), "libc": libc, "probe": rootfs.PROBE})
    else:
        typer.echo(f"{made}: {libc}, with {rootfs.PROBE}")


def _print(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data))


def _models(one: description.Description) -> str:
    counts = Counter(gpu.name for gpu in one.gpus)
    return " + ".join(f"{count} x {name}" for name, count in counts.items()) or "no GPU"


def _read(script: str) -> str:
    try:
        return read_standard_input().decode() if script == "-" else Path(script).read_text()
    except (OSError, UnicodeDecodeError) as error:
        name = "on standard input" if script == "-" else script
        raise ConfigError(f"script {name} can't be read", seen=getattr(error, "strerror", None) or error) from error
