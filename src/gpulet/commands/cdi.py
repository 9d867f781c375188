"""gpulet cdi: write CDI specifications, check them against rules and node, and say why a name can't be used."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from gpulet.codec import read_standard_input
from gpulet.commands.cdi_why import explain
from gpulet.commands.cdi_write import ROOT, generate, installed_hook, say
from gpulet.commands.node import look
from gpulet.errors import CdiError, GpuletError, NodeError, visible
from gpulet.injection import cdi, cdi_fingerprint, cdi_rules, cdi_targets, cdi_transform
from gpulet.injection.build import GATED
from gpulet.injection.cdi_registry import DEFAULT_FOLDERS, Registry, parse, read_spec
from gpulet.launch import programs
from gpulet.node.gpu import NodeFacts

app = typer.Typer(no_args_is_help=True, help="Write, check and explain CDI specifications.")
transform = typer.Typer(no_args_is_help=True, help="Change specifications that are there.")
app.add_typer(transform, name="transform")

JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FOLDERS = Annotated[list[str] | None, typer.Option("--spec-dir", help="A spec folder; later ones win. Repeatable.")]


app.command()(generate)


@app.command(name="list")
def list_(folders: FOLDERS = None, as_json: JSON = False) -> None:
    """The qualified names that can be used, and the files that can't be read."""
    registry = Registry(folders or DEFAULT_FOLDERS)
    if as_json:
        devices = [{"name": name, "file": registry.source(name)} for name in registry.names()]
        errors = {path: str(error) for path, error in registry.errors.items()}
        typer.echo(json.dumps({"devices": devices, "errors": errors, "conflicts": registry.conflicts}))
        return
    say(f"{len(registry.names())} devices in {' '.join(registry.folders)}")
    for name in registry.names():
        typer.echo(visible(name))
    _tell_errors(registry)


def _tell_errors(registry: Registry) -> None:
    for error in registry.errors.values():
        say(str(error))
    for name, paths in registry.conflicts.items():
        say(f"{name} can't be used: {' and '.join(paths)} both define it")


def _files(paths: list[str] | None, folders: list[str] | None) -> list[str]:
    if paths:
        return paths
    registry = Registry(folders or DEFAULT_FOLDERS)
    return [*(spec.path for spec in registry.specs), *registry.errors]


@app.command()
def validate(
    paths: Annotated[list[str] | None, typer.Argument(help="Spec files; all of the folders without.")] = None,
    folders: FOLDERS = None,
    target: Annotated[str, typer.Option(help="Also hold them against what an engine reads: podman=4.9.")] = "",
    as_json: JSON = False,
) -> None:
    """Hold spec files against the rules of CDI, and of OCI for paths. Exit code 1 where one breaks them."""
    highest = cdi_targets.limit(target) if target else cdi_rules.VERSIONS[-1]
    results: dict[str, list[str]] = {}
    for path in _files(paths, folders):
        try:
            spec = read_spec(path)
            results[path] = [f"{target} can't read {what}" for what in cdi_targets.above(spec, highest)]
            results[path] += [
                f"{what} is relative, low-level runtimes want an absolute path" for what in _relative(spec)
            ]
            if not results[path] and cdi_rules.parse_version(spec["cdiVersion"]) > cdi_rules.parse_version(highest):
                results[path] = [f"declares {spec['cdiVersion']}, {target} reads up to {highest}"]
        except CdiError as error:
            results[path] = [str(error)]
    _report(results, as_json, good="valid", wrong="invalid")


@app.command()
def verify(
    paths: Annotated[list[str] | None, typer.Argument(help="Spec files; all of the folders without.")] = None,
    folders: FOLDERS = None,
    driver_root: ROOT = "/",
    as_json: JSON = False,
) -> None:
    """Hold spec files against the node as it is: paths, device numbers, driver, MIG. Exit code 1 where one is stale."""
    facts: NodeFacts | None
    try:
        facts, _trouble = look(driver_root)
    except NodeError as error:
        facts = None
        say(f"paths and numbers are checked alone: {error}")
    results: dict[str, list[str]] = {}
    remedies: dict[str, str] = {}
    for path in _files(paths, folders):
        try:
            spec = read_spec(path)
            results[path] = cdi_fingerprint.problems(spec, facts)
            remedies[path] = _mend(path, spec, driver_root)
        except CdiError as error:
            results[path] = [str(error)]
    _report(results, as_json, good="fits this node", wrong="stale", remedies=remedies)


def _relative(spec: Mapping[str, Any]) -> Iterator[str]:
    """Paths that CDI's own rules leave alone and OCI's refuse (runtime-spec, config.md)."""
    for edits in cdi_rules.all_edits(spec):
        for kind, field in (("hooks", "path"), ("deviceNodes", "path"), ("mounts", "containerPath")):
            for item in edits.get(kind) or ():
                if not item[field].startswith("/"):
                    yield f"{kind}: {field} {item[field]!r}"


def _mend(path: str, spec: Mapping[str, Any], root: str) -> str:
    """The command that writes a spec of this kind anew, with the hook program that it names where that is here."""
    vendor, cls = cdi_rules.split_kind(spec["kind"])
    mode = {"imex-channel": "imex"}.get(cls, cls if cls in GATED else "")
    mode = "management" if vendor.startswith("management.") else mode
    words = ["--mode", mode] if mode else []
    words += ["--driver-root", root] if root not in ("", "/") else []
    words += [] if vendor in ("nvidia.com", "management.nvidia.com") else ["--vendor", vendor]
    words += [] if mode or cls == "gpu" else ["--class", cls]
    hooks = [hook["path"] for edits in cdi_rules.all_edits(spec) for hook in edits.get("hooks") or ()]
    here = next((hook for hook in hooks if os.path.isabs(hook) and programs.is_program(hook)), None)
    installed = installed_hook()
    words += ["--hook-path", here] if here and here != installed else []
    before = "gpulet install --yes && " if hooks and not here and not installed else ""
    return before + shlex.join(["gpulet", "cdi", "generate", *words, "--output", path])


def _report(
    results: dict[str, list[str]], as_json: bool, *, good: str, wrong: str, remedies: dict[str, str] | None = None
) -> None:
    bad = any(results.values())
    if as_json:
        mends = remedies or {}
        files = [
            {"file": path, "ok": not found, "problems": found, "remedy": mends.get(path, "") if found else ""}
            for path, found in results.items()
        ]
        typer.echo(json.dumps({"ok": not bad, "files": files}))
    else:
        for path, found in results.items():
            typer.echo(visible(f"{path}: {wrong if found else good}"))
            for text in found:
                typer.echo(visible(f"  {text}"))
            if found and remedies and path in remedies:
                typer.echo(visible(f"  mend it with: {remedies[path]}"))
        if not results:
            typer.echo("no spec files")
    if bad:
        raise typer.Exit(1)


@app.command()
def why(
    name: Annotated[str, typer.Argument(help="A qualified name: nvidia.com/gpu=0.")],
    engine: Annotated[str, typer.Option(help="containerd, crio, docker or podman; with =VERSION also its limit.")] = "",
    folders: FOLDERS = None,
    as_json: JSON = False,
) -> None:
    """Why a CDI name can or can't be used here. Exit code 1 where it can't."""
    answer = explain(name, engine, tuple(folders or ()))
    if as_json:
        typer.echo(json.dumps(answer))
    else:
        for line in answer["lines"]:
            typer.echo(visible(line))
    if not answer["ok"]:
        raise typer.Exit(1)


@transform.command(name="root")
def transform_root(
    old: Annotated[str, typer.Option("--from", help="The root that paths have now.")],
    new: Annotated[str, typer.Option("--to", help="The root that they are to have.")],
    source: Annotated[str, typer.Option("--input", help="The file to read; - for standard input.")] = "-",
    output: Annotated[str, typer.Option(help="The file to write; standard output without.")] = "",
    relative_to: Annotated[str, typer.Option(help="Whose paths: host or container.")] = "host",
) -> None:
    """Change the root of a spec's paths."""
    spec = _read(source)
    changed = cdi_transform.change_root(spec, old, new, relative_to=relative_to)
    if output:
        cdi.write_spec(changed, output)
    else:
        typer.echo(cdi.to_text(changed, "json" if source.endswith(".json") else "yaml"), nl=False)


def _read(source: str) -> dict[str, Any]:
    if source not in ("", "-"):
        return read_spec(source)
    try:
        spec: dict[str, Any] = parse(read_standard_input())
        cdi_rules.check(spec)
    except OSError as error:
        raise CdiError("CDI spec on standard input can't be read", seen=error.strerror) from error
    except GpuletError as error:
        raise CdiError("CDI spec on standard input", seen=str(error)) from error
    return spec
