"""gpulet sim: simulated nodes from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gpulet.sim import capture as captured
from gpulet.sim import description, inject, node, rootfs

app = typer.Typer(no_args_is_help=True, help="Simulated nodes: create, break, capture.")

AS_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def create(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to lay the node out in.")],
    profile: Annotated[str, typer.Option(help="Which machine: a profile's name, or a YAML file.")] = "h100x8",
    gpus: Annotated[int | None, typer.Option(help="How many GPUs, where not the profile's number.")] = None,
    mig: Annotated[list[str] | None, typer.Option(help="A MIG layout: 'gpu0: 1g.10gb x7'. Repeatable.")] = None,
    driver: Annotated[str | None, typer.Option(help="The driver's version.")] = None,
    as_json: AS_JSON = False,
) -> None:
    """Lay out a node without hardware: driver files, device nodes, /proc, and an NVML library."""
    made = node.create(folder, profile, gpus=gpus, mig=mig or (), driver=driver)
    if as_json:
        typer.echo(
            json.dumps({"root": str(made.root), "placeholders": made.placeholders, **made.description.to_data()})
        )
        return
    models = " + ".join(dict.fromkeys(gpu.name for gpu in made.gpus)) or "no GPU"
    typer.echo(f"{made.root}: {len(made.gpus)} x {models}, driver {made.description.driver}")
    if made.placeholders:
        typer.echo("The device nodes are plain files: only root may make real ones.")
    typer.echo(f"Look at it with --driver-root {made.root}")


@app.command()
def profiles(as_json: AS_JSON = False) -> None:
    """List the machines that can be simulated."""
    names = description.profiles()
    if as_json:
        typer.echo(json.dumps({name: description.load_profile(name).to_data() for name in names}))
        return
    for name in names:
        one = description.load_profile(name)
        models = " + ".join(dict.fromkeys(gpu.name for gpu in one.gpus))
        typer.echo(f"{name:10s} {len(one.gpus):2d} x {models}, driver {one.driver}")


@app.command(name="inject", help=f"Change a running node at once. CHANGE is one of {inject.GRAMMAR}.")
def change(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A simulated node.")],
    what: Annotated[list[str], typer.Argument(metavar="CHANGE", help="One change, or several, each one argument.")],
) -> None:
    """Change a running node at once."""
    for one in what:
        inject.inject(folder, one)


@app.command()
def capture(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the description.")],
    root: Annotated[Path, typer.Option("--driver-root", help="The node: / or a simulated node's root.")] = Path("/"),
    redact: Annotated[bool, typer.Option(help="Leave out what identifies the machine: UUIDs, serial numbers.")] = True,
) -> None:
    """Write down what this node is, in a file that `gpulet sim create --profile FILE` lays out again."""
    captured.capture(root, file, redact=redact)
    typer.echo(f"{file}: lay it out with gpulet sim create DIR --profile {file}")


@app.command(name="rootfs")
def make_rootfs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to fill.")],
    libc: Annotated[str, typer.Option(help="glibc, musl or none.")] = "glibc",
    cuda_compat: Annotated[
        str | None, typer.Option(help="Add CUDA's forward-compatibility libraries, this driver's.")
    ] = None,
) -> None:
    """Make a small root file system for a container, with a probe that says what the container got."""
    typer.echo(rootfs.create(folder, libc, cuda_compat=cuda_compat))
