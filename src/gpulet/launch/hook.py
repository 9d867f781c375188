"""gpulet-hook: the prestart hook, which has the container CLI put the GPUs into a container that has its namespaces.

Called as the peer's nvidia-container-runtime-hook: `[-debug] [-config FILE] prestart|poststart|poststop`, the OCI state
on standard input, in the runtime's namespaces. Decides as the runtime does, composes the container CLI's arguments in
the peer's order and becomes it, or where it is our own, does its work. A container that asks for nothing is left alone.
"""

from __future__ import annotations

import os
import sys

from gpulet import settings as settings_file
from gpulet.errors import BundleError, ConfigError, GpuletError, RequestError, UsageError, cut, visible
from gpulet.request import bundle, cuda, decide, policy
from gpulet.settings import CUDA_VISIBLE_DEVICES, Settings
from gpulet.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gpulet.request.bundle import Container
    from gpulet.request.model import Request

USAGE = """usage: gpulet-hook [-debug] [-config FILE] COMMAND
  prestart         reads a container's state on standard input and gives it the GPUs that it asks for
  poststart        does nothing
  poststop         does nothing
  -version         prints the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns where it fails or has nothing to do. argv: without the program's name."""
    debug = False
    try:
        command, config, debug = _arguments(list(sys.argv[1:] if argv is None else argv))
        if command == "version":
            print(f"gpulet hook version {__version__}")
            return 0
        if command in ("poststart", "poststop"):
            return 0
        return prestart(settings_file.load(config or None), debug)
    except UsageError as error:
        sys.stderr.write(f"{error}\n{USAGE}")
        return error.exit_code
    except GpuletError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as error:  # a bug of ours: engines show standard error
        if debug:
            import traceback

            traceback.print_exc()
        print(f"internal error: {type(error).__name__}: {error}; please report it", file=sys.stderr)
        return 1


def prestart(settings: Settings, debug: bool = False) -> int:
    """Gives the container whose state is on standard input its GPUs, by the container CLI."""
    state = bundle.State.parse(sys.stdin.buffer.read())
    container = read_container(state, os.environ)
    asks_kubelet = decide.needs_ledger(container, settings)
    ledger = policy.read_ledger(settings.policy_checkpoint) if asks_kubelet else None
    decision = decide.decide(container, settings, ledger, hook=True)
    for rule in decision.trace:
        if rule.level == "warning":
            print(visible(f"{rule.name}: {cut(rule.input)} ({rule.where}): {rule.outcome}"), file=sys.stderr)
    if not decision.request:
        if decision.denied():
            from gpulet.launch.log import tell_denied

            tell_denied("gpulet-hook", container, decision)
        return 0
    if decision.mode != "legacy" and not settings.skip_mode_detection:
        raise RequestError(
            "the prestart hook was invoked directly (e.g. by docker --gpus), which this mode doesn't support",
            seen=f"mode {decision.mode}",
            wanted="mode legacy",
            remedy="use the runtime instead (e.g. --runtime=nvidia) or CDI names (--device nvidia.com/gpu=0)",
        )
    from gpulet.launch import programs

    cli = programs.container_cli(settings.cli_path, settings.cli_root)
    command = compose(cli, settings, decision.request, state.pid, container.root, debug=debug)
    if programs.is_own_cli(cli):  # the same in this process: an interpreter less to start
        os.environ.update(environment(settings, {}))
        sys.argv = command
        from gpulet.launch import container_cli

        return container_cli.main()
    programs.restore_locale()
    try:
        os.execve(cli, command, environment(settings, os.environ))
    except OSError as error:
        raise ConfigError(
            f"container CLI {cli}",
            seen=error.strerror,
            wanted="a program",
            remedy="correct nvidia-container-cli.path in config.toml",
        ) from None


def read_container(state: bundle.State, environ: Mapping[str, str]) -> Container:
    """The container of a state's bundle, with the variable's value as it was before the runtime rewrote it."""
    config = bundle.read_config(os.path.join(state.bundle, "config.json"))
    for part, name in (("ociVersion", "Version"), ("process", "Process"), ("root", "Root")):
        if not config.get(part):
            raise BundleError(f"{name} is empty in OCI spec", seen=f"no {part}", wanted="a complete config.json")
    container = bundle.Container.from_config(config, state.bundle)
    original = environ.get(cuda.ORIGINAL)
    return container if original is None else container.with_variable(CUDA_VISIBLE_DEVICES, original)


def compose(cli: str, settings: Settings, request: Request, pid: int, root: str, *, debug: bool = False) -> list[str]:
    """The container CLI's arguments, in the peer's order."""
    command = [cli]
    command += [f"--root={settings.cli_root}"] if settings.cli_root else []
    command += ["--load-kmods"] if settings.cli_load_kmods else []
    command += ["--no-create-imex-channels"] if settings.disable_imex_creation else []
    command += ["--no-pivot"] if settings.cli_no_pivot else []
    if debug or settings.cli_debug:
        command.append("--debug=/dev/stderr" if debug else f"--debug={settings.cli_debug}")
    command += [f"--ldcache={settings.cli_ldcache}"] if settings.cli_ldcache else []
    user = _default_user() if settings.cli_user is None else settings.cli_user
    command += [f"--user={user}"] if user else []
    command.append("configure")
    command += _compat_mode(settings)
    command += [f"--ldconfig={settings.ldconfig()}"] if settings.cli_ldconfig else []
    command += [f"--loader-cache={settings.loader_cache}"] if settings.loader_cache != "native" else []
    command += ["--no-cgroups"] if settings.cli_no_cgroups else []
    command += [f"--device={','.join(request.devices)}"] if request.devices else []
    command += [f"--mig-config={request.mig_config}"] if request.mig_config else []
    command += [f"--mig-monitor={request.mig_monitor}"] if request.mig_monitor else []
    command += [f"--imex-channel={','.join(request.imex)}"] if request.imex else []
    command += [f"--{capability}" for capability in request.capabilities]
    command += [f"--require={expression}" for expression in request.requirements]
    return [*command, f"--pid={pid}", root]


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The container CLI's environment: ours and the configured entries, which win."""
    extra = dict(entry.partition("=")[::2] for entry in settings.cli_environment if entry[:1] not in ("", "="))
    return {**environ, **extra}


def _compat_mode(settings: Settings) -> list[str]:
    mode = settings.cuda_compat_mode
    if mode in ("ldconfig", "mount"):
        return [f"--cuda-compat-mode={mode}"]
    if mode not in ("disabled", "hook") and settings.allow_cuda_compat_from_container:
        return []
    return ["--cuda-compat-mode=disabled"]


def _default_user() -> str:
    """SUSE gives its device nodes to the group video, so the CLI's helper must be of it."""
    try:
        with open("/etc/os-release", encoding="utf-8") as file:
            likes = [line.partition("=")[2] for line in file if line.startswith("ID_LIKE=")]
    except (OSError, UnicodeDecodeError):
        return ""
    words = {word for like in likes for word in like.strip().strip("\"'").split()}
    return "root:video" if words & {"suse", "opensuse"} else ""


def _arguments(arguments: list[str]) -> tuple[str, str, bool]:
    """(command, configuration file, debug). Flags stand before the command, with one dash or two."""
    config, debug = "", False
    while arguments and arguments[0].startswith("-"):
        name, equals, value = arguments.pop(0).lstrip("-").partition("=")
        if name == "config" and (equals or arguments):
            config = value if equals else arguments.pop(0)
        elif name == "debug":
            debug = value not in ("false", "0")
        elif name == "version":
            return "version", config, debug
        else:
            raise UsageError(f"flag -{name}", seen=equals + value or None, wanted="-debug, -config FILE or -version")
    if len(arguments) < 1 or arguments[0] not in ("prestart", "poststart", "poststop"):
        raise UsageError("command", seen=" ".join(arguments) or "none", wanted="prestart, poststart or poststop")
    return arguments[0], config, debug


if __name__ == "__main__":
    sys.exit(main())
