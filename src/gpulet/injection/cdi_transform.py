"""A CDI spec with the root of its paths changed, for a tree that the host has in another place. Pure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from gpulet.errors import UsageError
from gpulet.injection import cdi_rules


def _mover(old: str, new: str) -> Callable[[str], str]:
    """Paths at or below `old` go below `new`; a folder that merely begins with the same letters doesn't."""
    old, new = old.rstrip("/"), new.rstrip("/")

    def move(path: str) -> str:
        inside = path == old or path.startswith(old + "/")
        return (new + path[len(old) :] or "/") if inside else path

    return move


def _argument(word: str, move: Callable[[str], str]) -> str:
    first, pair, second = word.partition("::")
    return f"{move(first)}::{move(second)}" if pair else move(word)


def _host(edits: dict[str, Any], move: Callable[[str], str]) -> None:
    for node in edits.get("deviceNodes") or ():
        moved = move(node.get("hostPath") or node["path"])
        if moved != node["path"] or "hostPath" in node:
            node["hostPath"] = moved
    for mount in edits.get("mounts") or ():
        mount["hostPath"] = move(mount["hostPath"])
    for hook in edits.get("hooks") or ():
        if hook["hookName"] != "startContainer":  # the one hook whose program is the container's
            hook["path"] = move(hook["path"])
        if hook["hookName"] not in ("createContainer", "startContainer"):
            hook["args"] = [_argument(word, move) for word in hook.get("args") or ()]


def _container(edits: dict[str, Any], move: Callable[[str], str]) -> None:
    for node in edits.get("deviceNodes") or ():
        node.setdefault("hostPath", node["path"])
        node["path"] = move(node["path"])
        if node["hostPath"] == node["path"]:
            del node["hostPath"]
    for mount in edits.get("mounts") or ():
        mount["containerPath"] = move(mount["containerPath"])
    for hook in edits.get("hooks") or ():
        if hook["hookName"] == "startContainer":
            hook["path"] = move(hook["path"])
        if hook["hookName"] in ("createContainer", "startContainer"):
            hook["args"] = [_argument(word, move) for word in hook.get("args") or ()]


def change_root(spec: Mapping[str, Any], old: str, new: str, *, relative_to: str = "host") -> dict[str, Any]:
    """A copy of the spec with `old` replaced by `new` at the beginning of its paths: those of the host, or those of
    the container. The version is raised where that needs one. Raises UsageError for another `relative_to`.
    """
    if relative_to not in ("host", "container"):
        raise UsageError("--relative-to", seen=relative_to, wanted="host or container")
    out: dict[str, Any] = copy.deepcopy(dict(spec))
    if old.rstrip("/") != new.rstrip("/"):
        act, move = (_host if relative_to == "host" else _container), _mover(old, new)
        for edits in cdi_rules.all_edits(out):
            act(edits, move)  # type: ignore[arg-type]  # of our own copy
    least = cdi_rules.minimum_version(out)
    if cdi_rules.parse_version(out["cdiVersion"]) < cdi_rules.parse_version(least):
        out["cdiVersion"] = least
    return out
