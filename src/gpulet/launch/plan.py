"""What the runtime does to one bundle, worked out before anything is touched: the new config.json and the work in the
container's root file system. `gpulet explain` prints what this makes.

    legacy           a prestart hook that calls the container CLI on the live container
    cdi              the edits of CDI specifications in the spec folders
    jit-cdi (auto)   the Injection that build.py makes from this node's facts

In the CDI modes the hooks that engines took from CDI specifications are taken over: their work is done beneath the root
before the container exists, and they are not run.
"""

from __future__ import annotations

import os

from gpulet.errors import CdiError, ConfigError, EngineError, RequestError
from gpulet.injection import oci
from gpulet.injection.model import Hook, Injection, Mount, RootfsWork
from gpulet.launch import programs
from gpulet.request import bundle, policy
from gpulet.request.decide import Decision, cuda_value, decide, needs_ledger, speaks_cuda
from gpulet.request.devices import is_qualified
from gpulet.settings import CUDA_VISIBLE_DEVICES, DEFAULT_PATH, DRIVER_CAPABILITIES, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpulet.node.gpu import NodeFacts
    from gpulet.request.bundle import Container
    from gpulet.request.model import Request

ORIGINAL = "GPULET_VISIBLE_DEVICES"  # in the hook's environment: the variable's value before it was rewritten
AUTOMATIC = "runtime.nvidia.com/gpu="  # CDI names that mean: as the runtime finds the device itself
HOOK_ENV = ("GPULET_HOOK=1",)  # never empty: runc would hand the container's environment to the hook
PRESTART_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit", "gpulet-hook")


class Plan:
    """config: the new config.json; injection: what was put in; work: what is to be done beneath the root; mounts:
    those that bring libraries, for the loader's cache."""

    def __init__(
        self, config: dict[str, Any], injection: Injection, work: RootfsWork, mounts: tuple[Mount, ...] = ()
    ) -> None:
        self.config = config
        self.injection = injection
        self.work = work
        self.mounts = mounts


class Bundle:
    """One bundle as it is: the path of its config.json, what stands there, the container, and the decision on it."""

    def __init__(self, path: str, settings: Settings) -> None:
        """Reads and decides. Raises BundleError, RequestError, Refused, ConfigError."""
        self.path = path
        self.config = bundle.read_config(path)
        container = bundle.Container.from_config(self.config, os.path.dirname(path))
        self.container = original(self.config, container)
        asks_kubelet = needs_ledger(self.container, settings)
        ledger = policy.read_ledger(settings.policy_checkpoint) if asks_kubelet else None
        self.decision = decide(self.container, settings, ledger)

    def plan(self, settings: Settings) -> Plan:
        """What is to be done to it. Raises what `make` raises."""
        if self.container.type == "sandbox":
            return Plan(self.config, Injection(), RootfsWork())
        return make(self.config, self.container, self.decision, settings)


def original(config: dict[str, Any], container: Container) -> Container:
    """The container as it was before an earlier run of ours rewrote CUDA_VISIBLE_DEVICES for the hook's sake."""
    for hook in _prestart(config):
        for entry in hook.get("env") or () if _is_ours(hook) else ():
            name, _, value = entry.partition("=")
            if name == ORIGINAL:
                return container.with_variable(CUDA_VISIBLE_DEVICES, value)
    return container


def make(config: dict[str, Any], container: Container, decision: Decision, settings: Settings) -> Plan:
    """Works out the plan for a decision. Raises CdiError, NodeError, RequestError, ConfigError."""
    if decision.mode == "legacy":
        return _legacy(config, container, decision.request, settings)
    if decision.mode == "csv":
        raise ConfigError("mode csv (Tegra) isn't built yet", seen="mode = csv", wanted="auto, cdi, jit-cdi or legacy")
    return _direct(config, container, decision, settings)


def _legacy(config: dict[str, Any], container: Container, request: Request, settings: Settings) -> Plan:
    if not request or any(map(_is_ours, _prestart(config))):
        return Plan(config, Injection(), RootfsWork())
    path = programs.hook(settings.hook_path)
    env = [f"PATH={':'.join(programs.search_path())}"]  # never empty: runc would hand the container's to the hook
    if settings.source and settings.source != DEFAULT_PATH:
        env.append(f"GPULET_CONFIG={settings.source}")
    pairs = _cuda_env(request, container, settings)
    if pairs is not None:
        env.append(f"{ORIGINAL}={container.variable(CUDA_VISIBLE_DEVICES)}")
        config = _with_cuda(config, pairs)
    hook = Hook("prestart", path, (os.path.basename(path), "prestart"), tuple(env))
    return Plan(oci.add_hook(config, hook), Injection(hooks=(hook,)), RootfsWork())


def _direct(config: dict[str, Any], container: Container, decision: Decision, settings: Settings) -> Plan:
    request = decision.request
    injection = Injection()
    if request:
        injection = _injection(request, decision.mode, settings)
        config = oci.apply(config, injection)
        config = _with_cuda(config, _cuda_env(request, container, settings))
    config, work = _take_over(config, injection.rootfs)
    plan = Plan(config, injection, work, _libraries(config, injection, work))
    if covered(config, work):
        return by_hook(plan)
    if work.freeze_device_nodes:
        plan.config = _frozen(config)
    return plan


def covered(config: dict[str, Any], work: RootfsWork) -> str:
    """The first mount that would hide what is written beneath the root now, "" for none."""
    if work.empty():
        return ""
    places = [link.path for link in work.links] + [f"{folder}/soname" for folder in work.folders]
    places += ["/etc/ld.so.cache", "/etc/ld.so.conf.d/conf"] if work.folders or work.host_driver else []
    places += ["/etc/nvidia/profile"] if work.profile_minors else []
    for entry in config.get("mounts") or ():
        folder = os.path.normpath(entry.get("destination") or "/")
        if any(place == folder or place.startswith(folder + "/") for place in places):
            return folder
    return ""


def by_hook(plan: Plan) -> Plan:
    """The same plan with the work left to one hook, which runs when the container's mounts are there: for roots whose
    files lie under another mount, or that can't be written from here (another user namespace's). Raises EngineError."""
    from gpulet.injection.cdi_hooks import hook_args

    program = programs.cdi_hook()
    if not program:
        raise EngineError(
            "the container's root can't be prepared from outside",
            wanted="gpulet-cdi-hook beside gpulet-runtime or in PATH",
            remedy="write the launchers with: gpulet install",
        )
    args = hook_args(os.path.basename(program), plan.work, profile=bool(plan.work.profile_minors))
    config = oci.add_hook(plan.config, Hook("createContainer", program, tuple(args), HOOK_ENV))
    return Plan(config, plan.injection, RootfsWork())


def _take_over(config: dict[str, Any], work: RootfsWork) -> tuple[dict[str, Any], RootfsWork]:
    """The config.json without the prestart hook and the hooks whose work can be done now, and that work added."""
    if not config.get("hooks"):
        return config, work
    from gpulet.injection import cdi_hooks

    hooks = {**config["hooks"], "prestart": [hook for hook in _prestart(config) if not _is_ours(hook)]}
    names = [str(node.get("path")) for node in (config.get("linux") or {}).get("devices") or ()]
    minors = [int(name[11:]) for name in names if name.startswith("/dev/nvidia") and name[11:].isdigit()]
    taken, remaining = cdi_hooks.take_over(hooks, minors=minors)
    return oci.with_hooks(config, remaining), cdi_hooks.join([work, taken])


def _frozen(config: dict[str, Any]) -> dict[str, Any]:
    """Hiding the driver's ModifyDeviceFiles needs a mount inside the container's /proc, which low-level runtimes refuse
    in a spec: a hook does it, on nodes where the driver makes device nodes at all."""
    from gpulet.injection import rootfs

    program = programs.cdi_hook()
    if not program or rootfs.frozen_params() is None:
        return config
    name = os.path.basename(program)
    return oci.add_hook(config, Hook("createContainer", program, (name, "disable-device-node-modification"), HOOK_ENV))


def _injection(request: Request, mode: str, settings: Settings) -> Injection:
    names = cdi_names(request, mode, settings)
    if names:
        _check_requirements(request, settings, None)
        return _resolve(names, request, settings)
    plain = tuple(device.removeprefix(AUTOMATIC) for device in request.devices)
    return _from_node(request.replace(devices=plain), settings)


def cdi_names(request: Request, mode: str, settings: Settings) -> tuple[str, ...]:
    """The CDI names that a request stands for; () where this node is to be asked. Raises RequestError for a mixture."""
    automatic = [device for device in request.devices if device.startswith(AUTOMATIC)]
    qualified = [device for device in request.devices if is_qualified(device)]
    if automatic and len(automatic) < len(request.devices):
        _mixed(automatic[0], request)
    if automatic:
        return ()
    if mode == "cdi":
        devices = request.devices or ("none",)
        return tuple(d if is_qualified(d) else f"{settings.cdi_default_kind}={d}" for d in devices)
    if qualified:
        _mixed(next(device for device in request.devices if not is_qualified(device)), request)
    return ()


def _mixed(device: str, request: Request) -> None:
    raise RequestError(
        "devices by CDI name and by plain id can't be mixed",
        seen=",".join(request.devices),
        wanted="all of one kind",
        remedy=f"correct {device}",
    )


def _resolve(names: tuple[str, ...], request: Request, settings: Settings) -> Injection:
    from gpulet.injection.cdi_hooks import absorb
    from gpulet.injection.cdi_registry import Registry

    injection = absorb(Registry(settings.cdi_spec_dirs, keep=settings.state_dir).resolve(names))
    if settings.capabilities == "all" or set(DRIVER_CAPABILITIES) <= set(request.capabilities):
        return injection
    from gpulet.injection.narrow import narrow

    return narrow(injection, request.capabilities)


def _from_node(request: Request, settings: Settings) -> Injection:
    from gpulet.injection import build
    from gpulet.node import driver, procfs

    root = settings.driver_root()
    facts = procfs.facts(root)
    if procfs.needs_nvml(facts, request.devices):
        # the specification that the plugin or `gpulet cdi generate` wrote knows MIG devices too, and costs no NVML
        try:
            return _resolve(tuple(f"{settings.cdi_default_kind}={d}" for d in request.devices), request, settings)
        except CdiError:
            from gpulet.node import nvml

            facts = nvml.facts(root)
    _check_requirements(request, settings, facts)
    files = driver.find(root, version=facts.driver, ldcache=settings.cli_ldcache)
    if set(DRIVER_CAPABILITIES) <= set(request.capabilities):
        request = request.replace(capabilities=("all",))  # with the files that belong to none of them
    injection = build.build(facts, files, request)
    return injection.replace(gids=()) if settings.no_device_gids else injection


def _check_requirements(request: Request, settings: Settings, facts: NodeFacts | None) -> None:
    if not request.requirements:
        return
    from gpulet.errors import NodeError
    from gpulet.node import procfs
    from gpulet.request import requirements

    if facts is None:
        try:
            facts = procfs.facts(settings.driver_root())
        except NodeError:
            return  # a specification may be for devices of which this node's /proc tells nothing
    known = {"cuda": facts.cuda or None, "driver": facts.driver or None}
    subjects = [requirements.Subject(arch=g.arch or None, brand=g.brand or None, **known) for g in facts.gpus]
    requirements.check(request.requirements, subjects or [requirements.Subject(**known)])


def _cuda_env(request: Request, container: Container, settings: Settings) -> tuple[tuple[str, str | None], ...] | None:
    """What becomes of CUDA_VISIBLE_DEVICES: a new value, None to take it away; no pair where it isn't ours."""
    if not speaks_cuda(settings, container):
        return None
    return ((CUDA_VISIBLE_DEVICES, cuda_value(request)),)


def _with_cuda(config: dict[str, Any], pairs: tuple[tuple[str, str | None], ...] | None) -> dict[str, Any]:
    for name, value in pairs or ():
        config = oci.unset_env(config, name) if value is None else oci.set_env(config, ((name, value),))
    return config


def _libraries(config: dict[str, Any], injection: Injection, work: RootfsWork) -> tuple[Mount, ...]:
    """The mounts that bring libraries into the folders of the loader's cache: the injection's, and those that an engine
    has put into config.json already."""
    known = {mount.path: mount for mount in injection.mounts if mount.kind in ("library", "library32")}
    for entry in config.get("mounts") or [] if work.folders else []:
        path = str(entry.get("destination") or "")
        folder, _, name = path.rpartition("/")
        if path not in known and folder in work.folders and ".so" in name:
            known[path] = Mount(str(entry.get("source") or ""), path, kind="library")
    return tuple(known.values())


def _prestart(config: dict[str, Any]) -> list[dict[str, Any]]:
    return (config.get("hooks") or {}).get("prestart") or []


def _is_ours(hook: dict[str, Any]) -> bool:
    """Whether a prestart hook is the one that puts GPUs in, ours or the peer's."""
    return os.path.basename(hook.get("path") or "") in PRESTART_HOOKS
