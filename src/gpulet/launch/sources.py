"""Where an Injection comes from: CDI specifications by name, or this node's facts.

Imports what it needs where it needs it: a container that asks for nothing pays for none of it.
"""

from __future__ import annotations

from gpulet.errors import CdiError, NodeError, RequestError
from gpulet.injection.model import Injection
from gpulet.request.devices import is_qualified
from gpulet.settings import DRIVER_CAPABILITIES, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulet.node.gpu import NodeFacts
    from gpulet.request.model import Request

AUTOMATIC = "runtime.nvidia.com/gpu="  # CDI names that mean: as the runtime finds the device itself


def injection(request: Request, mode: str, settings: Settings) -> Injection:
    """What a request brings. Raises CdiError, NodeError, RequestError, RequirementNotMet."""
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
