"""gpulet system: what a node needs beside the driver: links in /dev/char, and device nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpulet.errors import EngineError, NodeError
from gpulet.launch import kmods
from gpulet.node import devices, procfs
from gpulet.node.gpu import NodeFacts
from gpulet.node.paths import below

app = typer.Typer(
    no_args_is_help=True, help="Links in /dev/char and device nodes, which the driver doesn't make itself."
)

# Made by others (GPUDirect Storage, the fabric manager), who know their own numbers.
NOT_OURS = ("nvidia-fs", "nvidia-nvswitch", "nvidia-nvlink")

Root = Annotated[
    str,
    typer.Option(
        "--driver-root", envvar=["GPULET_DRIVER_ROOT", "NVIDIA_DRIVER_ROOT", "DRIVER_ROOT"], help="Driver root."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", envvar="DRY_RUN", help="Say what would be done, and do nothing.")]
Json = Annotated[bool, typer.Option("--json", help="The same as data.")]


@dataclass(frozen=True)
class CharLink:
    """One link of /dev/char. state: "right", "made", "replaced" (it led elsewhere or nowhere), "wanted" (dry run)."""

    path: str
    target: str
    state: str


@app.command("create-dev-char-symlinks")
def create_dev_char_symlinks(
    dev_char_path: Annotated[
        Path, typer.Option("--dev-char-path", envvar="DEV_CHAR_PATH", help="The folder for the links.")
    ] = Path("/dev/char"),
    driver_root: Root = "/",
    create_all: Annotated[
        bool, typer.Option("--create-all", envvar="CREATE_ALL", help="Links for every node the driver may make, too.")
    ] = False,
    load_kernel_modules: Annotated[
        bool, typer.Option("--load-kernel-modules", envvar="LOAD_KERNEL_MODULES", help="Load them beforehand.")
    ] = False,
    create_device_nodes: Annotated[
        bool, typer.Option("--create-device-nodes", envvar="CREATE_DEVICE_NODES", help="Make missing nodes beforehand.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Make /dev/char/MAJOR:MINOR links to NVIDIA's nodes, which runc needs under systemd (runc issue 3708)."""
    if (load_kernel_modules or create_device_nodes) and not dry_run:
        kmods.prepare(driver_root, _facts(driver_root), (), lambda line: typer.echo(line, err=True), every=True)
    facts = _facts(driver_root)
    wanted = dict(existing(driver_root))
    if create_all and facts is not None:
        wanted = {**{(major, minor): path for path, major, minor in possible(driver_root, facts)}, **wanted}
    elif create_all or not wanted:
        raise _no_devices(driver_root, facts)
    try:
        done = [link(dev_char_path, number, path, dry_run) for number, path in sorted(wanted.items())]
    except OSError as error:
        raise EngineError(
            f"can't make links in {dev_char_path}", seen=error.strerror, remedy="become root, or use --dev-char-path"
        ) from error
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in done]))
        return
    for item in done:
        if item.state != "right":
            typer.echo(f"{item.path} -> {item.target} ({item.state})")


@app.command("create-device-nodes")
def create_device_nodes(
    driver_root: Root = "/",
    load_kernel_modules: Annotated[
        bool, typer.Option("--load-kernel-modules", help="Accepted: done where needed.")
    ] = True,
    control_devices: Annotated[bool, typer.Option("--control-devices", help="Accepted: these are always made.")] = True,
    dry_run: DryRun = False,
) -> None:
    """Load the driver's modules and make its device nodes, where they are missing."""
    facts = _facts(driver_root)
    if dry_run:
        for path, major, minor in kmods.missing_nodes(facts, ()):
            typer.echo(f"mknod --mode=0666 {below(devices.choose_dev_root(driver_root), path)} c {major} {minor}")
        return
    after = kmods.prepare(driver_root, facts, (), typer.echo, every=True)
    if after is None:
        raise _no_devices(driver_root, None)


def _no_devices(root: str, facts: NodeFacts | None) -> NodeError:
    """facts: None where there is no driver either."""
    if facts is None:
        return NodeError("no NVIDIA devices found", seen=f"no driver beneath {root}", remedy="install the driver")
    folder = below(devices.choose_dev_root(root), "/dev")
    remedy = "gpulet system create-device-nodes makes them"
    return NodeError("no NVIDIA devices found", seen=f"a driver, and no nodes in {folder}", remedy=remedy)


def existing(root: str) -> Iterator[tuple[tuple[int, int], str]]:
    """(number, path) of NVIDIA's nodes that are in the root's /dev."""
    for node in devices.scan(devices.choose_dev_root(root)):
        if node.path.startswith("/dev/nvidia") and not os.path.basename(node.path).startswith(NOT_OURS):
            yield (node.major, node.minor), node.host_path


def possible(root: str, facts: NodeFacts) -> Iterator[tuple[str, int, int]]:
    """(host path, major, minor) of the nodes that the driver has numbers for."""
    for path, major, minor in kmods.wanted_nodes(facts, ()):
        if major >= 0:
            yield below(devices.choose_dev_root(root), path), major, minor


def link(folder: Path, number: tuple[int, int], target: str, dry_run: bool) -> CharLink:
    """Makes one link, unless one is there that leads to the same place. Raises OSError."""
    target = os.path.abspath(target)  # what is relative counts from the folder of the link
    path = folder / f"{number[0]}:{number[1]}"
    there = path.is_symlink() or path.exists()
    if there and os.path.realpath(path) == os.path.realpath(target):
        return CharLink(str(path), target, "right")
    if dry_run:
        return CharLink(str(path), target, "wanted")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    aside = folder / f".gpulet-{os.getpid()}-{path.name}"
    aside.symlink_to(target)
    aside.replace(path)
    return CharLink(str(path), target, "replaced" if there else "made")


def _facts(root: str) -> NodeFacts | None:
    """None where there is no driver. Raises NodeError where there is no root."""
    try:
        return procfs.facts(root, every=True)  # who makes nodes decides which this node is to have
    except NodeError:
        if not os.path.isdir(root or "/"):
            raise
        return None
