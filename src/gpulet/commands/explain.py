"""`gpulet explain`: why a container gets what it gets. Decides and plans as the runtime does, and changes nothing."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from gpulet import settings as settings_file
from gpulet.commands.explain_ahead import Ahead, foreseen, in_place_of
from gpulet.commands.terminal import shown
from gpulet.errors import NodeError, UsageError
from gpulet.injection import oci
from gpulet.launch.plan import Bundle, Plan
from gpulet.launch.runtime import settings_of
from gpulet.node import procfs
from gpulet.request import requirements
from gpulet.request.requirements import Subject
from gpulet.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Why a container gets what it gets.")

Config = Annotated[str, typer.Option("--config", help="config.toml; else GPULET_CONFIG and the usual places.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as data, on standard output.")]

TRAP = """\
The trap: this container asked for no GPU. Its image is a legacy CUDA image (it sets CUDA_VERSION and no
NVIDIA_REQUIRE_CUDA), and policy "env" gives every GPU of the node to such an image. To stop that, either
  - believe the kubelet alone: in config.toml, [gpulet.policy] grants = "kubelet"
  - or don't believe unprivileged containers: accept-nvidia-visible-devices-envvar-when-unprivileged = false
  - or, for this Pod alone, set the environment variable NVIDIA_VISIBLE_DEVICES=void"""


@app.command("bundle")
def explain_bundle(
    folder: Annotated[Path, typer.Argument(help="The OCI bundle: the folder with config.json.")],
    config: Config = "",
    runtime: Annotated[
        Path | None, typer.Option(help="The gpulet-runtime that the engine starts; else the first launcher in PATH.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What gpulet-runtime would do to a bundle, started by this user, and each rule that led there."""
    with in_place_of(runtime):
        settings = settings_of(sys.argv[0], config or None)
        bundle = Bundle(str(folder / "config.json"), settings)
        ahead = foreseen(bundle, settings)
    if as_json:
        typer.echo(json.dumps(_for_json(data(bundle, ahead, settings)), indent=2, allow_nan=False))
    else:
        show(Console(), bundle, ahead, settings)
    if ahead.refusal:  # what was decided is worth knowing though it can't be done here
        raise ahead.refusal


@app.command("require")
def explain_require(
    expressions: Annotated[
        list[str] | None, typer.Argument(help='Such as "cuda>=12.4 brand=tesla,driver>=535".')
    ] = None,
    image_env: Annotated[
        Path | None, typer.Option(help="A file of NAME=value lines, whose NVIDIA_REQUIRE_* are taken too.")
    ] = None,
    config: Config = "",
    as_json: AsJson = False,
) -> None:
    """Hold requirement expressions against this node, clause by clause. Exit 1 where one doesn't hold."""
    wanted = list(expressions or [])
    if image_env:
        lines = image_env.read_text("utf-8-sig", "replace").splitlines()
        pairs = [line.partition("=") for line in lines if "=" in line]
        wanted += [value for name, _, value in pairs if name.startswith(requirements.PREFIX)]
    if not wanted:
        seen = f"no {requirements.PREFIX}* in {image_env}" if image_env else None
        raise UsageError("nothing to explain", seen=seen, wanted="an expression or --image-env FILE")
    settings = settings_file.load(config or None)
    against = subjects(settings, nvml=any(name in text.lower() for name in ("arch", "brand") for text in wanted))
    judged = [judge(expression, subject) for expression in wanted for subject in against]
    if as_json:
        typer.echo(json.dumps({"ok": all(one["holds"] for one in judged), "expressions": judged}, indent=2))
    else:
        _show_judged(Console(), judged)
    if not all(one["holds"] for one in judged):
        raise typer.Exit(1)


def subjects(settings: Settings, *, nvml: bool = False) -> tuple[Subject, ...]:
    """What expressions are held against: this node, once for each kind of GPU it has.

    nvml: ask NVML, which alone knows a GPU's brand and architecture; a container's start may not have the time.
    """
    facts = None
    if nvml:
        from gpulet.node import nvml as library

        with contextlib.suppress(NodeError):
            facts = library.facts(settings.driver_root(), links=False)
    try:
        return requirements.subjects(facts or procfs.facts(settings.driver_root()))
    except NodeError:
        return (Subject(),)


def judge(expression: str, subject: Subject) -> dict[str, Any]:
    """One expression's outcome as data."""
    holds, clauses = requirements.evaluate(expression, subject)
    told = [clause.to_data() for clause in clauses]
    return {"expression": expression, "holds": holds, "node": subject.to_data(), "clauses": told}


def data(bundle: Bundle, ahead: Ahead, settings: Settings) -> dict[str, Any]:
    """The whole explanation as data. "injection" and "rootfs" are null where no plan could be made; where "refused"
    says why the runtime starts nothing, config.json stays, and they are what would be done without that."""
    decision, plan = bundle.decision, ahead.plan
    after = bundle.config if plan is None or ahead.refusal else plan.config
    memory = plan.memory if plan else None
    return {
        "bundle": bundle.path,
        "config": settings.source,
        "container": {"name": bundle.container.name, "pod": _pod(bundle), "root": bundle.container.root},
        "mode": decision.mode,
        "request": decision.request.to_data(),
        "prepared": _prepared(bundle),
        "trace": [rule.to_data() for rule in decision.trace],
        "refused": str(ahead.refusal or ""),
        "injection": plan.injection.to_data() if plan else None,
        "rootfs": plan.work.to_data() if plan else None,
        "laid": [
            {"path": thing.path, "links": dict(thing.links), "bytes": len(thing.data)}
            for thing in (plan.laid if plan else ())
        ],
        "config_json": {"changed": after != bundle.config, "after": after},
        "notes": ahead.notes,
        "assumed": list(memory.assumed) if memory else [],
        "lacking": list(memory.lacking) if memory else [],
        "trap": decision.request.source == "legacy-image",
    }


def _for_json(value: Any) -> Any:
    """The same value without the numbers that Python's JSON knows and nobody else's: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, dict):
        return {key: _for_json(item) for key, item in value.items()}
    return [_for_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _pod(bundle: Bundle) -> str:
    one = bundle.container
    return f"{one.pod_namespace}/{one.pod_name}" if one.pod_name else ""


def show(console: Console, bundle: Bundle, ahead: Ahead, settings: Settings) -> None:
    """The same for people."""
    _show_rules(console, bundle, settings)
    for note in ahead.notes:
        console.print(f"[yellow]{shown(note)}[/yellow]", soft_wrap=True, highlight=False)
    if ahead.refusal:
        console.print("[red]The runtime refuses this: no container is started, config.json stays as it is.[/red]")
    if ahead.plan:
        _show_plan(console, bundle, ahead.plan, "What would go in" if ahead.refusal else "What goes in")
    if bundle.decision.request.source == "legacy-image":
        console.print(f"\n[yellow]{escape(TRAP)}[/yellow]", soft_wrap=True)


def _show_rules(console: Console, bundle: Bundle, settings: Settings) -> None:
    decision = bundle.decision
    who = f"{_pod(bundle)}/{bundle.container.name}" if bundle.container.name else bundle.path
    console.print(f"[bold]{shown(who)}[/bold]: {shown(_verdict(bundle))}", soft_wrap=True)
    console.print(f"configuration: {shown(settings.source) or 'defaults'}; mode {decision.mode}\n", soft_wrap=True)
    console.print("[bold]Rules looked at, in order[/bold]")
    for number, rule in enumerate(decision.trace, 1):
        colour = "yellow" if rule.level == "warning" else "default"
        console.print(f"{number:3} {rule.name}: {shown(rule.input)}  [dim]{shown(rule.where)}[/dim]", soft_wrap=True)
        console.print(f"    [{colour}]-> {shown(rule.outcome)}[/{colour}]", soft_wrap=True)
    console.print()


def _verdict(bundle: Bundle) -> str:
    request = bundle.decision.request
    if not request and _prepared(bundle):  # as the runtime left it, which takes the wish for GPUs away
        return f"left alone ({request.reason}); prepared already: config.json has {', '.join(_prepared(bundle))}"
    if not request:
        return f"left alone ({request.reason})"
    return f"gets {','.join(request.devices) or 'the driver and no GPU'} ({request.reason})"


def _prepared(bundle: Bundle) -> list[str]:
    """NVIDIA's device nodes that are in config.json before anything is done."""
    paths = [str(node.get("path")) for node in (bundle.config.get("linux") or {}).get("devices") or ()]
    paths += [str(mount.get("destination")) for mount in bundle.config.get("mounts") or ()]  # in a user namespace
    return [path for path in paths if path.startswith("/dev/nvidia")]


def _show_plan(console: Console, bundle: Bundle, plan: Plan, head: str) -> None:
    if plan.config == bundle.config and plan.work.empty():
        console.print("[bold]Nothing is changed[/bold]")
        return
    console.print(f"[bold]{head}[/bold]")
    injection, work = plan.injection, plan.work
    for node in injection.devices:
        _item(console, "device", f"{node.path} ({node.type} {node.major}:{node.minor}, {node.access})", node.why)
    for mount in injection.mounts:
        _item(console, "mount", f"{mount.path} <- {mount.source} ({','.join(mount.options)})", mount.why)
    known = [*(bundle.config.get("mounts") or ()), *({"destination": mount.path} for mount in injection.mounts)]
    places = [mount.get("destination") for mount in known]
    for entry in plan.config.get("mounts") or ():
        if entry.get("destination") not in places:
            _item(console, "mount", f"{entry['destination']} <- {entry['source']}", "laid in the state folder")
    stay = [mount.get("destination") for mount in plan.config.get("mounts") or ()]
    for mount in bundle.config.get("mounts") or ():
        if mount.get("destination") not in stay:
            _item(
                console, "less", f"mount {mount.get('destination')}", f"capabilities {','.join(bundle.decision.kept)}"
            )
    before = set((bundle.config.get("process") or {}).get("env") or ())
    for entry in (plan.config.get("process") or {}).get("env") or ():
        if entry not in before:
            _item(console, "env", entry, "")
    inside = oci.seen_inside(bundle.config, injection.gids)
    for gid in injection.gids:
        if gid in inside:
            _item(console, "group", str(inside[gid]), "opens a device node")
        else:
            _item(console, "lacking", f"group {gid}, which opens a device node", oci.NOT_INSIDE)
    for link in work.links:
        _item(console, "link", f"{link.path} -> {link.target}", link.why)
    for folder in work.folders:
        _item(console, "loader", folder, "goes first in the loader's cache")
    if work.host_driver:
        _item(console, "compat", work.compat_folder, f"taken where it is newer than driver {work.host_driver}")
    for term in plan.memory.assumed if plan.memory else ():
        _item(console, "require", term, "taken as met: nothing is known of that here without NVML")
    for name in plan.memory.lacking if plan.memory else ():
        _item(console, "lacking", name, "in this node's driver; install its package")
    hooks_before = (bundle.config.get("hooks") or {}).items()
    left = [(stage, hook) for stage, hooks in (plan.config.get("hooks") or {}).items() for hook in hooks]
    for stage, hook in left:
        stays = any(stage == old and hook in (hooks or ()) for old, hooks in hooks_before)
        _item(
            console,
            "hook",
            f"{stage} {' '.join([hook['path'], *(hook.get('args') or [])[1:]])}",
            "stays" if stays else "added",
        )
    for stage, hooks in hooks_before:
        for hook in hooks or ():
            if (stage, hook) not in left:
                _item(console, "hook", f"{stage} {' '.join((hook.get('args') or [])[:2])}", "taken over, not run")


def _item(console: Console, kind: str, text: str, why: str) -> None:
    reason = f"  [dim]{shown(why)}[/dim]" if why else ""
    console.print(f"  {kind:7} {shown(text)}{reason}", soft_wrap=True, highlight=False)


def _show_judged(console: Console, judged: list[dict[str, Any]]) -> None:
    for one in judged:
        mark, colour = ("holds", "green") if one["holds"] else ("does not hold", "red")
        console.print(f"{shown(one['expression'])}  [{colour}]{mark}[/{colour}]", highlight=False)
        for clause in one["clauses"]:
            here = clause["here"] or "nothing known of it"
            sign = ("yes" if clause["known"] else "taken as met") if clause["holds"] else "no"
            console.print(f"  {shown(clause['text']):24} here: {shown(here):16} {sign}", highlight=False)
