"""Where an Injection comes from: CDI specifications by name, this node's facts, or a Tegra's lists of files.

Imports what it needs where it needs it: a container that asks for nothing pays for none of it.
"""

from __future__ import annotations

import os

from gpulet.errors import CdiError, NodeError, RequestError, UnknownDevice
from gpulet.injection.model import Injection
from gpulet.request.devices import is_qualified
from gpulet.request.policy import TEGRA
from gpulet.settings import DRIVER_CAPABILITIES, VISIBLE_DEVICES, Settings
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulet.node.gpu import NodeFacts
    from gpulet.request.bundle import Container
    from gpulet.request.model import Request

AUTOMATIC = "runtime.nvidia.com/gpu="  # CDI names that mean: as the runtime finds the device itself
USUAL_LISTS = ("l4t.csv", "drivers.csv", "devices.csv")


class Found(Value):
    """An Injection; the folders and files of the host that it was made from, () where it can't be known whether the
    next look would give the same; requirements that were taken as met, as nothing is known of what they ask; what of
    the driver capabilities that were asked for isn't installed here; and see nodes.unready."""

    injection: Injection
    looked: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()


def find(request: Request, mode: str, container: Container, settings: Settings) -> Found:
    """What a request brings. Raises CdiError, NodeError, RequestError, RequirementNotMet."""
    names = cdi_names(request, mode, settings)
    if names:
        assumed = _check_requirements(request, settings, None)
        looked = [*settings.cdi_spec_dirs, *_files(settings.cdi_spec_dirs)]
        return Found(_resolve(names, request, settings), tuple(looked), assumed)
    request = request.replace(devices=tuple(device.removeprefix(AUTOMATIC) for device in request.devices))
    if mode == "csv" or _is_tegra(settings.driver_root()):
        assumed = _check_requirements(request, settings, None)
        return Found(_from_lists(request, container, settings), assumed=assumed)
    return _from_node(request, settings)


def _files(folders: tuple[str, ...]) -> list[str]:
    return [f"{folder}/{name}" for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)]


def _is_tegra(root: str) -> bool:
    """Whether the node's GPU is a Tegra's own. Most nodes answer with two looks at files that aren't there."""
    signs = ("etc/nv_tegra_release", "sys/devices/soc0/family")
    if not any(os.path.exists(os.path.join(root, sign)) for sign in signs):
        return False
    from gpulet.node import platform

    return platform.detect(root).kind == "tegra"


def _from_lists(request: Request, container: Container, settings: Settings) -> Injection:
    """Mode csv. A container gets the usual lists, or every one where NVIDIA_REQUIRE_JETPACK is "csv-mounts=all"."""
    from gpulet.injection import csv_files

    folder = settings.csv_mount_spec_path
    names = (
        sorted(name for name in os.listdir(folder) if name.lower().endswith(".csv")) if os.path.isdir(folder) else []
    )
    if container.variable("NVIDIA_REQUIRE_JETPACK") != "csv-mounts=all":
        names = [name for name in names if name in USUAL_LISTS]
    if not names:
        raise UnknownDevice(
            "no lists of files for mode csv",
            seen=folder,
            wanted=" ".join(USUAL_LISTS),
            remedy="install JetPack's nvidia-container packages, or correct modes.csv.mount-spec-path",
        )
    strange = [device for device in request.devices if device not in ("0", "all", TEGRA)]
    if strange:
        raise UnknownDevice("unknown device of a Tegra", seen=",".join(strange), wanted=f"0, {TEGRA} or all")
    rows = csv_files.read(settings.driver_root(), [f"{folder}/{name}" for name in names])
    found = csv_files.injection(rows, settings.driver_root(), **_compat_folder(settings))
    # "none" is driver files and no GPU (the peer gives all of them)
    devices = found.devices if request.devices else ()
    return found.replace(devices=devices, env=(*found.env, (VISIBLE_DEVICES, "void")))


def _compat_folder(settings: Settings) -> dict[str, str]:
    return {"compat_folder": settings.csv_compat_root} if settings.csv_compat_root else {}


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
    if qualified and len(qualified) < len(request.devices):
        _mixed(next(device for device in request.devices if not is_qualified(device)), request)
    return tuple(qualified)  # CDI names come from specifications in mode jit-cdi too


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

    return narrow(injection, request.capabilities, drm=all(name.startswith("nvidia.com/") for name in names))


def _from_node(request: Request, settings: Settings) -> Found:
    from gpulet.injection import build, nodes
    from gpulet.launch.places import looked_into
    from gpulet.node import driver, driver_files, procfs

    root = settings.driver_root()
    facts = procfs.facts(root)
    assumed = _check_requirements(request, settings, facts)
    if procfs.needs_nvml(facts, request.devices):
        # the specification that the plugin or `gpulet cdi generate` wrote knows MIG devices too, and costs no NVML
        try:
            found = _resolve(tuple(f"{settings.cdi_default_kind}={d}" for d in request.devices), request, settings)
        except CdiError:
            from gpulet.node import nvml

            facts = nvml.facts(root, search=driver.cached_folders(root, settings.cli_ldcache))
        else:
            gated = build.gated(facts, request.gated, root=root)
            return Found(build.merge([found, build.imex(facts, request.imex), gated]), assumed=assumed)
    unready = nodes.unready(facts, request.capabilities)
    files = driver.find(root, version=facts.driver, ldcache=settings.cli_ldcache)
    if set(DRIVER_CAPABILITIES) <= set(request.capabilities):
        request = request.replace(capabilities=("all",))  # with the files that belong to none of them
        lacking = driver_files.lacking(files)  # nobody has named the others
    else:
        lacking = driver_files.lacking(files, request.capabilities)
    injection = build.build(facts, files, request)
    if settings.jit_disable_hooks:
        from gpulet.injection.cdi_hooks import less

        injection = injection.replace(rootfs=less(injection.rootfs, settings.jit_disable_hooks))
    known = facts.source == "procfs" and not any(gpu.mig_enabled or not gpu.uuid for gpu in facts.gpus)
    looked = looked_into(files, facts.dev_root, settings.cli_ldcache, request.gated) if known else ()
    injection = injection.replace(gids=()) if settings.no_device_gids else injection
    return Found(injection, looked, assumed, lacking, unready)


def _check_requirements(request: Request, settings: Settings, facts: NodeFacts | None) -> tuple[str, ...]:
    if not request.requirements:
        return ()
    from gpulet.node import procfs
    from gpulet.request import requirements

    if facts is None:
        try:
            facts = procfs.facts(settings.driver_root())
        except NodeError:
            return ()  # a specification may be for devices of which this node's /proc tells nothing
    return requirements.check(request.requirements, requirements.subjects(facts))
