"""gpulet-runtime: stands between an engine and the low-level runtime; `create` gets its GPUs, all else goes through.

For `create`: read config.json, decide, work out the plan, do the work beneath the root file system, write config.json,
and become the low-level runtime with the very arguments that the engine gave, and its environment (as a shell hands it
on, where the launcher has one). Whatever fails leaves config.json as it was and starts nothing. The peer's program of
the same part is nvidia-container-runtime.
"""

from __future__ import annotations

import os
import sys
from time import perf_counter, time

from gpulet import settings as settings_file
from gpulet.errors import CdiError, GpuletError, NodeError, RequestError
from gpulet.launch import call as calls
from gpulet.settings import Settings
from gpulet.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from gpulet.launch.log import Log
    from gpulet.launch.plan import Bundle, Plan
    from gpulet.node.gpu import NodeFacts


def main(argv: Sequence[str] | None = None, become: Callable[[str, Sequence[str]], NoReturn] | None = None) -> int:
    """Runs the program; returns only where it fails. argv: without the program's name. become: what the end is in
    place of programs.become."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    call = calls.Call()
    settings = Settings()
    began = perf_counter()
    try:
        call = calls.read(arguments)
        settings = _settings(call)
        from gpulet.launch import programs, shortcut

        low_level = programs.low_level_runtime(settings.runtimes)
        if call.version:
            from gpulet.launch.start import put

            put(f"gpulet runtime version {__version__}\nspec: 1.3.0\n\n")
        if call.command == "create":
            create(call, settings)
    except GpuletError as error:
        _log(call, settings).error(str(error))
        _count_failure(call, settings, "refused" if isinstance(error, RequestError) else "error", began)
        return error.exit_code
    except Exception as error:  # a bug of ours: the engine must show it, not lose it
        import traceback

        log = _log(call, settings)
        log.write("debug", traceback.format_exc())
        log.error(f"internal error: {type(error).__name__}: {error}; please report it")
        _count_failure(call, settings, "error", began)
        return 1
    try:
        shortcut.keep(settings, low_level, time() - (perf_counter() - began))
        (become or programs.become)(low_level, arguments)
    except OSError as error:
        _log(call, settings).error(f"could not exec '{low_level}': {error.strerror}")
        return 1


def create(call: calls.Call, settings: Settings) -> None:
    """Prepares the bundle for its container. Raises GpuletError, and then config.json is as it was."""
    from gpulet.launch.plan import Bundle
    from gpulet.request.bundle import write_config

    times = [perf_counter()]
    bundle = Bundle(call.config_path(), settings)
    times.append(perf_counter())
    plan = _plan(call, bundle, settings)
    times.append(perf_counter())
    if plan.laid or not plan.work.empty():
        from gpulet.launch.carry import carry_out

        plan = carry_out(bundle, plan, settings)
    times.append(perf_counter())
    if plan.config != bundle.config:
        write_config(bundle.path, plan.config)
    times.append(perf_counter())
    result = _result(bundle)
    if result:
        from gpulet.injection import tally

        tally.add(settings.state_dir, bundle.decision.mode, result, times[-1] - times[0])
    if result == "denied":
        from gpulet.launch.log import tell_denied

        tell_denied("gpulet-runtime", bundle.container, bundle.decision)
    if settings.debug in ("", "/dev/null"):
        return
    spent = zip(("decide", "plan", "prepare", "write"), times, times[1:], strict=False)
    _tell(_own_log(call, settings), bundle, plan, " ".join(f"{phase}={(b - a) * 1e3:.1f}" for phase, a, b in spent))


def _plan(call: calls.Call, bundle: Bundle, settings: Settings) -> Plan:
    """The plan. Where this node lacks modules or device nodes for it, as after a start of the machine, they are loaded
    and made first, if load-kmods says so. Raises what Bundle.plan raises."""
    try:
        plan = bundle.plan(settings)
    except (NodeError, CdiError):
        if not _made_ready(call, settings):
            raise
    else:
        memory = plan.memory
        unready = memory.unready if memory and memory.found is None else ()  # it isn't tried for every container
        facts = _made_ready(call, settings) if unready else None
        if not facts:
            return plan
        from gpulet.injection import nodes

        if nodes.unready(facts, bundle.decision.request.capabilities) == unready:
            return plan
    return bundle.plan(settings)


def _made_ready(call: calls.Call, settings: Settings) -> NodeFacts | None:
    """Does what load-kmods stands for. Answers the node's facts then, None where it isn't to be done or no driver is
    loaded."""
    if not settings.cli_load_kmods:
        return None
    from gpulet.launch import kmods

    log = _own_log(call, settings)
    return kmods.make_ready(settings.driver_root(), lambda text: log.write("info", f"load-kmods: {text}"))


def _result(bundle: Bundle) -> str:
    """What became of the container's wish for GPUs, as tally.py names it; "" where it had none."""
    if bundle.decision.request:
        return "ok"
    return "denied" if bundle.decision.denied() else ""


def _count_failure(call: calls.Call, settings: Settings, result: str, began: float) -> None:
    if call.command == "create":
        from gpulet.injection import tally

        tally.add(settings.state_dir, settings.mode, result, perf_counter() - began)


def _settings(call: calls.Call) -> Settings:
    """The settings; for anything but `create` a broken file doesn't count, so that containers can still be stopped."""
    try:
        return settings_of(sys.argv[0])
    except Exception:
        if call.command == "create":
            raise
        return Settings()


def settings_of(program: str, path: str | None = None) -> Settings:
    """The settings as the program of this path takes them: the name of a link to it may choose the mode. path: the
    configuration's, None for the usual places. Raises ConfigError."""
    settings = settings_file.load(path)
    for flavour in ("cdi", "legacy"):
        if os.path.basename(program).endswith(f"runtime.{flavour}"):
            return settings.replace(mode=flavour)
    return settings


def _own_log(call: calls.Call, settings: Settings) -> Log:
    """The configured log alone: podman takes whatever stands in the engine's file for the reason of a failure."""
    from gpulet.launch.log import Log

    return Log((settings.debug,), "debug" if call.debug else settings.log_level, call.log_format)


def _log(call: calls.Call, settings: Settings) -> Log:
    from gpulet.launch.log import Log

    sinks = () if call.version else (settings.debug, call.log)
    return Log(sinks, "debug" if call.debug else settings.log_level, call.log_format)


def _tell(log: Log, bundle: Bundle, plan: Plan, spent: str) -> None:
    """One line for a container that got something, one for each thing that may surprise. spent: ms by phase."""
    from gpulet.injection import oci

    for rule in bundle.decision.trace:
        if rule.level == "warning":
            log.write("warning", f"{rule.name}: {rule.outcome}", input=rule.input, where=rule.where)
    for term in plan.memory.assumed if plan.memory else ():
        log.write("warning", f"requirement taken as met: {term}: nothing is known of that here without NVML")
    for name in plan.memory.lacking if plan.memory else ():
        log.write("warning", f"capability {name} in this node's driver; install its package")
    if plan.memory and plan.memory.unready:
        from gpulet.injection.nodes import NO_UVM, UVM

        if UVM in plan.memory.unready:
            log.write("warning", NO_UVM)
    inside = oci.seen_inside(bundle.config, plan.injection.gids)
    for gid in plan.injection.gids:
        if gid not in inside:
            log.write("warning", f"group {gid}, which opens a device node, is left out: {oci.NOT_INSIDE}")
    request, one = bundle.decision.request, bundle.container
    if request:
        log.write(
            "info",
            "GPUs for a container",
            pod=f"{one.pod_namespace}/{one.pod_name}" if one.pod_name else "",
            container=one.name,
            grant=request.reason,
            source=request.source,
            devices=",".join(request.devices) or "none",
            mode=bundle.decision.mode,
            ms=spent,
        )


if __name__ == "__main__":
    sys.exit(main())
