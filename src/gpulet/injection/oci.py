"""Puts an Injection into a config.json: pure, idempotent, keeps every field that it doesn't know.

Follows the CDI specification's rules for the OCI specification, without the peer's faults: a variable is replaced where
it stands, a device rule that is there already isn't added again. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.injection.model import DeviceNode, Hook, Injection, Mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

BOUND = ("rw", "nosuid", "noexec", "bind", "rprivate")  # a node as a mount
NOT_INSIDE = "the container's user namespace has no such group (linux.gidMappings)"


def apply(config: dict[str, Any], injection: Injection) -> dict[str, Any]:
    """A new config.json content; `config` itself stays as it is."""
    config = dict(config)
    if injection.env:
        config = set_env(config, injection.env)
    if injection.devices:
        config = bind_nodes(config, [node for node in injection.devices if node.host_path not in ("", node.path)])
        config["linux"] = _with_devices(config, injection.devices)
    if injection.mounts:
        config["mounts"] = _with_mounts(config.get("mounts") or [], injection.mounts)
        config = with_types(config)
    for hook in injection.hooks:
        config = add_hook(config, hook)
    if injection.net_devices:
        linux = config.get("linux") or {}
        named = {host: {"name": name} for host, name in injection.net_devices}
        config["linux"] = {**linux, "netDevices": {**(linux.get("netDevices") or {}), **named}}
    if injection.intel_rdt:
        rdt = {key: list(value) if isinstance(value, tuple) else value for key, value in injection.intel_rdt}
        config["linux"] = {**(config.get("linux") or {}), "intelRdt": rdt}
    if injection.gids:
        config["process"] = _with_gids(config.get("process") or {}, seen_inside(config, injection.gids).values())
    return config


def set_env(config: dict[str, Any], pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Variables replaced where they stand first (later repetitions go) or appended."""
    process = dict(config.get("process") or {})
    env = list(process.get("env") or [])
    for name, value in pairs:
        at = [i for i, entry in enumerate(env) if entry.partition("=")[0] == name]
        if at:
            env[at[0]] = f"{name}={value}"
            for i in reversed(at[1:]):
                del env[i]
        else:
            env.append(f"{name}={value}")
    return {**config, "process": {**process, "env": env}}


def put_env(config: dict[str, Any], name: str, value: str | None) -> dict[str, Any]:
    """The same with a variable's new value; None takes it away."""
    if value is not None:
        return set_env(config, ((name, value),))
    process = dict(config.get("process") or {})
    env = [entry for entry in process.get("env") or [] if entry.partition("=")[0] != name]
    return {**config, "process": {**process, "env": env}}


def add_hook(config: dict[str, Any], hook: Hook) -> dict[str, Any]:
    """The hook at the end of its stage, unless the very same one is there."""
    entry: dict[str, Any] = {"path": hook.path}
    if hook.args:
        entry["args"] = list(hook.args)
    if hook.env:
        entry["env"] = list(hook.env)
    if hook.timeout:
        entry["timeout"] = hook.timeout
    hooks = dict(config.get("hooks") or {})
    stage = list(hooks.get(hook.stage) or [])
    if entry not in stage:
        stage.append(entry)
    return {**config, "hooks": {**hooks, hook.stage: stage}}


def with_hooks(config: dict[str, Any], hooks: dict[str, Any]) -> dict[str, Any]:
    """The same with these hooks (stage -> entries) and no others; stages without any are left out."""
    config = {**config, "hooks": {stage: list(entries) for stage, entries in hooks.items() if entries}}
    if not config["hooks"]:
        del config["hooks"]
    return config


def bind_nodes(config: dict[str, Any], nodes: Iterable[DeviceNode]) -> dict[str, Any]:
    """The same, in a user namespace with these nodes as mounts, not as devices.

    There nobody may make a node. Low-level runtimes bind the host's of the same path, which isn't there where the
    driver's nodes lie beneath a root of their own.
    """
    bound = {node.path: Mount(node.host_path, node.path, BOUND, type="bind") for node in nodes}
    if not bound or not has_user_namespace(config):
        return config
    linux = dict(config["linux"])
    linux["devices"] = [entry for entry in linux.get("devices") or () if entry.get("path") not in bound]
    return {**config, "linux": linux, "mounts": _with_mounts(config.get("mounts") or [], tuple(bound.values()))}


def _with_devices(config: dict[str, Any], nodes: tuple[DeviceNode, ...]) -> dict[str, Any]:
    linux = dict(config.get("linux") or {})
    resources = dict(linux.get("resources") or {})
    user = (config.get("process") or {}).get("user") or {}
    devices = list(linux.get("devices") or [])
    rules = list(resources.get("devices") or [])
    mounted = {place(entry.get("destination")) for entry in config.get("mounts") or ()}
    for node in nodes:
        # a privileged container of a rootless podman has the host's nodes as mounts: runc fails on one that is both
        if node.path not in mounted:
            devices = [entry for entry in devices if entry.get("path") != node.path]
            devices.append(_device(node, user))
        if node.type in ("b", "c"):
            _allow(rules, node)
    return {**linux, "devices": devices, "resources": {**resources, "devices": rules}}


def _device(node: DeviceNode, user: dict[str, Any]) -> dict[str, Any]:
    """A node that names no owner belongs to the container's user."""
    entry = {"path": node.path, "type": node.type, "major": node.major, "minor": node.minor, "fileMode": node.mode}
    for key, own in (("uid", node.uid), ("gid", node.gid)):
        owner = own or user.get(key) or 0
        if owner > 0:
            entry[key] = owner
    return entry


def _allow(rules: list[dict[str, Any]], node: DeviceNode) -> None:
    """Rules apply in order, so one that stands before a denial doesn't count as there already."""
    rule = {"allow": True, "type": node.type, "major": node.major, "minor": node.minor, "access": node.access}
    denied = max((i for i, old in enumerate(rules) if not old.get("allow")), default=-1)
    if rule not in rules[denied + 1 :]:
        rules.append(rule)


def _with_mounts(mounts: list[dict[str, Any]], added: tuple[Mount, ...]) -> list[dict[str, Any]]:
    """Replaced where one of that destination stands, else appended; then ordered by depth so that a parent never hides
    what is mounted beneath it."""
    taken = {place(mount.path): mount for mount in added}
    waiting, merged = dict(taken), []
    for entry in mounts:
        where = place(entry.get("destination"))
        if where not in taken:
            merged.append(entry)
        elif where in waiting:
            merged.append(_mount(waiting.pop(where)))
    merged += map(_mount, waiting.values())
    return sorted(merged, key=lambda entry: place(entry.get("destination")).rstrip("/").count("/"))


def _mount(mount: Mount) -> dict[str, Any]:
    entry: dict[str, Any] = {"destination": mount.path, "source": mount.source}
    if mount.type:
        entry["type"] = mount.type
    if mount.options:
        entry["options"] = list(mount.options)
    return entry


def place(destination: str | None) -> str:
    """A mount's destination as the low-level runtimes take it: from the root on, whatever slashes it begins with."""
    if (
        destination
        and destination[0] == "/"
        and destination[-1] != "/"
        and not ("//" in destination or "/." in destination)
    ):
        return destination  # nearly all are, and a container has a hundred
    return os.path.normpath("/" + (destination or "").lstrip("/"))


def with_types(config: dict[str, Any]) -> dict[str, Any]:
    """The same, in a user namespace with a type for each mount that is one by its options alone.

    The specification allows that, CDI specifications are written so, and crun until 1.28 dies of it where a container
    joins a Pod's namespaces and has a user namespace (containers/crun#1948).
    """
    if not has_user_namespace(config):
        return config
    mounts = [
        {**entry, "type": "bind"}
        if not entry.get("type") and {"bind", "rbind"} & set(entry.get("options") or ())
        else entry
        for entry in config.get("mounts") or ()
    ]
    return {**config, "mounts": mounts} if mounts != config.get("mounts") else config


def has_user_namespace(config: dict[str, Any]) -> bool:
    """Whether the container has a user namespace that isn't the engine's own."""
    namespaces = (config.get("linux") or {}).get("namespaces") or ()
    return any(namespace.get("type") == "user" for namespace in namespaces)


def seen_inside(config: dict[str, Any], gids: Iterable[int]) -> dict[int, int]:
    """The host's groups that the container has -> their numbers there, which is what additionalGids are.

    A user namespace's are translated by linux.gidMappings; what these don't cover is no group inside, and a process
    that is to be in it doesn't start. In a namespace that is joined without them, whose numbers are unknown here, none.
    """
    linux = config.get("linux") or {}
    wanted = [gid for gid in dict.fromkeys(gids) if gid]
    if not has_user_namespace(config):
        return {gid: gid for gid in wanted}
    ids = ("containerID", "hostID", "size")
    spans = [tuple(span.get(name) or 0 for name in ids) for span in linux.get("gidMappings") or ()]
    return {gid: inside + gid - host for gid in wanted for inside, host, size in spans if host <= gid < host + size}


def _with_gids(process: dict[str, Any], gids: Iterable[int]) -> dict[str, Any]:
    user = dict(process.get("user") or {})
    groups = list(user.get("additionalGids") or [])
    groups += [gid for gid in dict.fromkeys(gids) if gid not in groups]
    if not groups:
        return process
    return {**process, "user": {**user, "additionalGids": groups}}
