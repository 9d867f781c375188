"""gpulet cdi generate: the command line, which takes the peer's options and its service's variables."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from gpulet.commands.cdi_generate import FLAGS, MODES, Options, coherence_specs, gaps, generate_spec
from gpulet.errors import CdiError, UsageError, visible
from gpulet.injection import cdi
from gpulet.injection.cdi_calls import HookCalls, as_ours
from gpulet.injection.cdi_hooks import HOOKS, OURS
from gpulet.injection.cdi_spec import NAMINGS
from gpulet.launch import programs

ROOT = Annotated[str, typer.Option("--driver-root", envvar=["GPULET_DRIVER_ROOT", "NVIDIA_CTK_DRIVER_ROOT"])]
ENV = "NVIDIA_CTK_CDI_GENERATE"


def say(text: str) -> None:
    """One line for people, beside what is printed."""
    typer.echo(visible(f"gpulet: {text}"), err=True)


def _option(help_text: str, *names: str, env: str = "") -> Any:
    """An option; `env` is the variable that the peer's service files set for it."""
    return typer.Option(*names, help=help_text, envvar=env or None)


def generate(
    output: Annotated[
        str, _option("The file to write; else standard output.", env="NVIDIA_CTK_CDI_OUTPUT_FILE_PATH")
    ] = "",
    form: Annotated[
        str, _option("yaml or json; else the file's extension decides.", "--format", env=f"{ENV}_OUTPUT_FORMAT")
    ] = "",
    mode: Annotated[str, _option(", ".join(MODES), "--mode", "--discovery-mode", env=f"{ENV}_MODE")] = "auto",
    driver_root: ROOT = "/",
    dev_root: Annotated[str, _option("The tree whose dev/ holds the nodes.", env="NVIDIA_CTK_DEV_ROOT")] = "",
    host_driver_root: Annotated[str, _option("Where the host has the driver root, if elsewhere.")] = "",
    names: Annotated[
        list[str] | None,
        _option(", ".join(NAMINGS), "--device-name-strategy", env=f"{ENV}_DEVICE_NAME_STRATEGIES"),
    ] = None,
    ids: Annotated[
        list[str] | None,
        _option("Only these.", "--device-id", "--device-ids", "--device", "--devices", env=f"{ENV}_DEVICE_IDS"),
    ] = None,
    vendor: Annotated[str, _option("Half of the kind.", "--vendor", "--cdi-vendor", env=f"{ENV}_VENDOR")] = "",
    cls: Annotated[str, _option("Half of the kind.", "--class", "--cdi-class", env=f"{ENV}_CLASS")] = "",
    search: Annotated[
        list[str] | None,
        _option("Library folders, tried first.", "--library-search-path", env=f"{ENV}_LIBRARY_SEARCH_PATHS"),
    ] = None,
    config_search: Annotated[
        list[str] | None,
        _option("The host's folders of configuration.", "--config-search-path", env=f"{ENV}_CONFIG_SEARCH_PATHS"),
    ] = None,
    hook_path: Annotated[
        str | None,
        _option(
            "The hook program on the host: ours does all in one process, NVIDIA's get a hook for each part. "
            "Unless told, gpulet-cdi-hook where it is installed.",
            "--hook-path",
            "--nvidia-cdi-hook-path",
            "--nvidia-ctk-path",
            env="NVIDIA_CTK_CDI_HOOK_PATH",
        ),
    ] = None,
    ldconfig_path: Annotated[
        str, _option("The host's, for NVIDIA's hook program; ours needs none.", env=f"{ENV}_LDCONFIG_PATH")
    ] = "",
    csv_files: Annotated[list[str] | None, _option("Tegra's lists.", "--csv.file", env=f"{ENV}_CSV_FILES")] = None,
    csv_ignore: Annotated[
        list[str] | None, _option("Links to leave out.", "--csv.ignore-pattern", env=f"{ENV}_CSV_IGNORE_PATTERNS")
    ] = None,
    csv_compat: Annotated[
        str,
        _option("The image's folder.", "--csv.compat-container-root", env=f"{ENV}_CSV_CONTAINER_COMPAT_ROOT"),
    ] = "",
    no_all_device: Annotated[bool, _option('Without "all".', "--no-all-device", env=f"{ENV}_NO_ALL_DEVICE")] = False,
    flags: Annotated[
        list[str] | None, _option(", ".join(FLAGS), "--feature-flag", "--feature-flags", env=f"{ENV}_FEATURE_FLAGS")
    ] = None,
    without: Annotated[
        list[str] | None,
        _option("Work not to be done, or all.", "--disable-hook", "--disable-hooks", env=f"{ENV}_DISABLED_HOOKS"),
    ] = None,
    more_hooks: Annotated[
        list[str] | None, _option("chmod", "--enable-hook", "--enable-hooks", env=f"{ENV}_ENABLED_HOOKS")
    ] = None,
    target: Annotated[str, _option("What must be able to read it: podman=4.9, containerd=1.7.")] = "",
    strict: Annotated[bool, _option("Fail where something that CUDA needs is missing.", "--strict")] = False,
) -> None:
    """Write the CDI spec of this node."""
    options = Options(
        mode=mode.lower(),
        root=driver_root or "/",
        dev_root=dev_root,
        host_root=host_driver_root,
        names=_split(names) or ("index", "uuid"),
        ids=_split(ids) or ("all",),
        vendor=vendor,
        cls=cls,
        search=_split(search),
        hook_path=_hook_program(hook_path, out_of_sight=bool(host_driver_root)),
        ldconfig=ldconfig_path,
        csv_files=_split(csv_files),
        csv_ignore=_split(csv_ignore),
        csv_compat=csv_compat,
        all_device=not no_all_device,
        flags=_split(flags),
        without=_split(without),
        more_hooks=_split(more_hooks),
        config_search=_split(config_search),
        target=target,
    )
    form = form.lower() or {".json": "json"}.get(os.path.splitext(output)[1], "yaml")
    if form not in ("json", "yaml"):
        raise UsageError("--format", seen=form, wanted="yaml or json")
    if os.path.exists(output) and not os.path.isfile(output):  # a name with an extension beside it would be written
        raise UsageError("--output", seen=output, wanted="a file; leave it out for standard output")
    for flag in options.flags:
        if flag not in FLAGS:
            say(f"unknown feature flag {flag}, passed over; there are {', '.join(FLAGS)}")
    for name in options.without:
        if name not in (*HOOKS, "all"):
            say(f"unknown hook {name}, passed over; there are {', '.join(HOOKS)}")
    spec, facts = generate_spec(options)
    missing = gaps(facts, options)
    for text in missing:
        say(text)
    if missing and strict:
        raise CdiError("the spec would be incomplete", seen=f"{len(missing)} thing(s) missing, see above")
    for infix, each in {"": spec, **coherence_specs(options, facts)}.items():
        _put(each, infix, output, form)
    if hook_path is None and not host_driver_root and not programs.is_program(options.hook_path):
        say(f"{OURS} isn't here: the spec names {options.hook_path}; write it with: gpulet install, or use --hook-path")


def _hook_program(named: str | None, *, out_of_sight: bool) -> str:
    """The hook program's path. out_of_sight: the specification is for another root than the one that is seen here."""
    if named is None:
        return HookCalls.path if out_of_sight else installed_hook() or HookCalls.path
    path = named if os.path.isabs(named) else None
    if path is None and named and not out_of_sight:
        path = programs.find(named)
    if path is None:  # engines start it wherever they are, with a PATH of theirs
        raise UsageError("--hook-path", seen=repr(named), wanted="an absolute path, or a program that is here")
    return path if out_of_sight else as_ours(path)


def installed_hook() -> str | None:
    """The path of our hook program on this machine, None where it isn't installed."""
    return programs.find(OURS, (os.path.dirname(HookCalls.path),))


def _put(spec: dict[str, Any], infix: str, output: str, form: str) -> None:
    """To standard output, or to the file; `infix` goes before the file's extension."""
    if not output:
        typer.echo(cdi.to_text(spec, form), nl=False)
        return
    stem, extension = os.path.splitext(_with_extension(output, form))
    path = f"{stem}.{infix}{extension}" if infix else stem + extension
    cdi.write_spec(spec, path)
    say(f"wrote {path}: CDI {spec['cdiVersion']}, {spec['kind']}, {len(spec['devices'])} devices")


def _split(values: list[str] | None) -> tuple[str, ...]:
    return tuple(item.strip() for value in values or () for item in value.split(",") if item.strip())


def _with_extension(path: str, form: str) -> str:
    """Engines read .json and .yaml alone: another name gets one of them."""
    stem, extension = os.path.splitext(path)
    if extension in (".json", ".yaml"):
        return path
    return f"{stem}.yaml" if extension == ".yml" else f"{path}.{form}"
