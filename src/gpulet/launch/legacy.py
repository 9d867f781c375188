"""Mode legacy: one prestart hook in config.json, which has the container CLI work on the live container; and what that
CLI can't do, put into config.json at once.
"""

from __future__ import annotations

import os

from gpulet.injection import oci
from gpulet.injection.model import Hook, Injection, RootfsWork
from gpulet.launch import programs
from gpulet.request import cuda
from gpulet.settings import CUDA_VISIBLE_DEVICES, DEFAULT_PATH, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpulet.request.bundle import Container
    from gpulet.request.model import Request

PRESTART_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit", "gpulet-hook")
_SERVING = ("prestart", "createRuntime")  # where it finds the container's namespaces and the host's files


def original(config: dict[str, Any], container: Container) -> Container:
    """The container as it was before an earlier run of ours rewrote CUDA_VISIBLE_DEVICES for the hook's sake."""
    for hook in prestart(config):
        for entry in hook.get("env") or () if is_ours(hook) else ():
            name, _, value = entry.partition("=")
            if name == cuda.ORIGINAL:
                return container.with_variable(CUDA_VISIBLE_DEVICES, value)
    return container


def with_hook(
    config: dict[str, Any], container: Container, request: Request, settings: Settings
) -> tuple[dict[str, Any], Hook]:
    """config.json with the prestart hook, and the hook. Call it once: see `has_hook`."""
    find = programs.own_hook if settings.policy_grants == "kubelet" else programs.hook
    path = find(settings.hook_path)
    env = [f"PATH={':'.join(programs.search_path())}"]  # never empty: runc would hand the container's to the hook
    if settings.source and settings.source != DEFAULT_PATH:
        env.append(f"GPULET_CONFIG={settings.source}")
    if cuda.speaks_cuda(settings, container):
        env.append(f"{cuda.ORIGINAL}={container.variable(CUDA_VISIBLE_DEVICES)}")
        config = oci.put_env(config, CUDA_VISIBLE_DEVICES, cuda.cuda_value(request))
    hook = Hook("prestart", path, (os.path.basename(path), "prestart"), tuple(env))
    return oci.add_hook(config, hook), hook


def beyond_the_cli(request: Request, settings: Settings) -> Injection:
    """What the container CLI doesn't give: devices that are asked for by name (GDS and the like), the DRM nodes of the
    selected GPUs for graphics, and forward compatibility where the configuration wants it by hook."""
    graphics = "graphics" in request.capabilities or "display" in request.capabilities
    compat = settings.cuda_compat_mode == "hook" and not settings.disable_cuda_compat_hook
    if not (request.gated or graphics or compat):
        return Injection()
    from gpulet.injection import build
    from gpulet.injection.nodes import gids_of
    from gpulet.node import procfs

    root = settings.driver_root()
    facts = procfs.facts(root)
    parts = [build.gated(facts, request.gated, root=root)]
    if graphics:
        found = build.device(facts, build.select(facts, request.devices), ("graphics",))
        nodes = tuple(node for node in found.devices if node.path.startswith("/dev/dri/"))
        gids = () if settings.no_device_gids else gids_of(nodes)
        parts.append(Injection(nodes, gids=gids, rootfs=RootfsWork(found.rootfs.links)))
    if compat and build.forward_compatible(build.select(facts, request.devices).gpus):
        parts.append(Injection(rootfs=RootfsWork(host_driver=facts.driver)))
    return build.merge(parts)


def has_hook(config: dict[str, Any]) -> bool:
    """Whether a hook that puts GPUs in is there already, ours or the peer's."""
    return any(is_ours(hook) for stage in _SERVING for hook in (config.get("hooks") or {}).get(stage) or ())


def without_credulous(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without the peer's prestart hook, which an engine took from a hooks folder: under policy kubelet it
    would give what the environment asks for, granted or not."""
    return _without(config, lambda hook: is_ours(hook) and not programs.is_own_hook(hook["path"]))


def without_ours(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without the hooks that put GPUs in, ours and the peer's: it is done already."""
    return _without(config, is_ours)


def _without(config: dict[str, Any], unwanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The same without the unwanted hooks, in whichever stage somebody has put them: which one the program was made
    for is written in its documentation, and nothing keeps it to that."""
    hooks = config.get("hooks") or {}
    kept = {stage: [hook for hook in entries or () if not unwanted(hook)] for stage, entries in hooks.items()}
    if all(len(kept[stage]) == len(entries or ()) for stage, entries in hooks.items()):
        return config
    return oci.with_hooks(config, kept)


def prestart(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The prestart hooks as they stand."""
    return (config.get("hooks") or {}).get("prestart") or []


def is_ours(hook: dict[str, Any]) -> bool:
    """Whether a hook is the one that puts GPUs in, ours or the peer's, by its name or by that of the program to which a
    link leads. `.real` is the name behind the script that NVIDIA's installer of the toolkit puts in its place."""
    path = hook.get("path") or ""
    names = os.path.basename(path), programs.real_name(path) if path else ""
    return any(name.removesuffix(".real") in PRESTART_HOOKS for name in names)
