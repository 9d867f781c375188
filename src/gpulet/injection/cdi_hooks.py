"""Hooks that prepare a container's root file system: ours, NVIDIA's, and what they ask for as RootfsWork.

A runtime that does the work itself before the container starts takes such hooks out of the spec. Loaded by the
programs in launch/.
"""

from __future__ import annotations

from gpulet.injection.model import Hook, Injection, RootfsWork, SymLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

OURS = "gpulet-cdi-hook"
PROGRAMS = (OURS, "nvidia-cdi-hook", "nvidia-ctk")
# subcommand -> its options, each with whether a value follows
_COMMANDS = {
    "prepare": {
        "link": True,
        "device-link": True,
        "folder": True,
        "host-driver-version": True,
        "host-cuda-version": True,
        "cuda-compat-container-root": True,
        "freeze-device-nodes": False,
        "application-profile": False,
    },
    "create-symlinks": {"link": True},
    "update-ldcache": {"folder": True, "ldconfig-path": True},
    "chmod": {"mode": True, "path": True},
    "enable-cuda-compat": {"host-driver-version": True, "host-cuda-version": True, "cuda-compat-container-root": True},
    "disable-device-node-modification": {},
    "update-application-profile": {},
}
HOOKS = tuple(name for name in _COMMANDS if name != "prepare")  # the peer's, each with a part of the work
_EVERYWHERE = {"debug": False, "d": False, "quiet": False}


def hook_args(program: str, work: RootfsWork, *, profile: bool) -> list[str]:
    """The arguments with which our hook program does `work`. profile: it finds the GPUs' minors itself, in /dev."""
    args = [program, "prepare"]
    for link in work.links:
        args += ["--link", f"{link.target}::{link.path}"]
    for link in work.device_links:
        args += ["--device-link", f"{link.target}::{link.path}"]
    for folder in work.folders:
        args += ["--folder", folder]
    if work.host_driver:
        args += ["--host-driver-version", work.host_driver]
    if work.host_cuda:
        args += ["--host-cuda-version", work.host_cuda]
    if work.compat_folder != RootfsWork.compat_folder:
        args += ["--cuda-compat-container-root", work.compat_folder]
    if work.freeze_device_nodes:
        args.append("--freeze-device-nodes")
    if profile:
        args.append("--application-profile")
    return args


def _options(words: Sequence[str], known: Mapping[str, bool]) -> list[tuple[str, str]] | None:
    """The (option, value) pairs of a command line; None where there is something that isn't known."""
    found = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in known:
            return None
        if known[name] and not equals:
            if not rest:
                return None
            value = rest.pop(0)
        found.append((name, value))
    return found


def _pairs(options: Sequence[tuple[str, str]], wanted: str) -> list[SymLink] | None:
    """The TARGET::LINK values of an option, None where one has another form."""
    pairs = [value.split("::") for name, value in options if name == wanted]
    return [SymLink(*pair) for pair in pairs] if all(len(pair) == 2 for pair in pairs) else None


def understand(
    path: str, args: Sequence[str], minors: Iterable[int] = (), nodes: Iterable[str] = ()
) -> RootfsWork | None:
    """What a hook asks for, None where it isn't one of these hooks or asks for something that isn't known.

    minors: of the container's GPUs, which an application-profile hook would look up in its /dev; nodes: paths of its
    device nodes, by which links to such are chosen.
    """
    if path.rpartition("/")[2].removesuffix(".real") not in PROGRAMS:
        return None
    words = list(args[1:])
    while words and words[0].lstrip("-") in _EVERYWHERE:
        words.pop(0)
    if words[:1] == ["hook"]:
        words.pop(0)
    if not words or words[0] not in _COMMANDS:
        return None
    command = words[0]
    options = _options(words[1:], {**_EVERYWHERE, **_COMMANDS[command]})
    if options is None:
        return None
    links, beside = _pairs(options, "link"), _pairs(options, "device-link")
    if links is None or beside is None:
        return None
    present = set(nodes)
    said = dict(options)
    profile = command == "update-application-profile" or "application-profile" in said
    return RootfsWork(
        (*links, *(link for link in beside if link.leads_to() in present)),
        tuple(value for name, value in options if name == "folder"),
        said.get("host-driver-version", ""),
        said.get("host-cuda-version", ""),
        said.get("cuda-compat-container-root") or RootfsWork.compat_folder,
        command == "disable-device-node-modification" or "freeze-device-nodes" in said,
        tuple(minors) if profile else (),
    )


def from_specification(hooks: Mapping[str, Any]) -> bool:
    """Whether one of these hooks (stage -> entries) is of a CDI specification for GPUs."""
    entries = (entry for stage in hooks.values() for entry in stage or ())
    return any(understand(str(entry.get("path") or ""), entry.get("args") or ()) is not None for entry in entries)


def less(work: RootfsWork, without: Iterable[str]) -> RootfsWork:
    """The work without what some hooks of the peer would do, by the hooks' names; "all" for every one."""
    changes: dict[str, dict[str, Any]] = {
        "create-symlinks": {"links": (), "device_links": ()},
        "update-ldcache": {"folders": ()},
        "enable-cuda-compat": {"host_driver": "", "host_cuda": ""},
        "disable-device-node-modification": {"freeze_device_nodes": False},
    }
    for name in without:
        work = RootfsWork() if name == "all" else work.replace(**changes.get(name, {}))
    return work


def join(works: Iterable[RootfsWork]) -> RootfsWork:
    """Several works as one, each link and folder once."""
    works = list(works)
    compat = [work.compat_folder for work in works if work.compat_folder != RootfsWork.compat_folder]
    return RootfsWork(
        tuple({link.path: link for work in works for link in work.links}.values()),
        tuple(dict.fromkeys(folder for work in works for folder in work.folders)),
        next((work.host_driver for work in works if work.host_driver), ""),
        next((work.host_cuda for work in works if work.host_cuda), ""),
        compat[0] if compat else RootfsWork.compat_folder,
        any(work.freeze_device_nodes for work in works),
        tuple(sorted({minor for work in works for minor in work.profile_minors})),
        tuple(dict.fromkeys(link for work in works for link in work.device_links)),
    )


def take_over(
    hooks: Mapping[str, Sequence[Mapping[str, Any]]], *, minors: Iterable[int] = (), nodes: Iterable[str] = ()
) -> tuple[RootfsWork, dict[str, list[Mapping[str, Any]]]]:
    """(work, hooks that remain) of config.json's `hooks`: stage -> hooks. A stage left without any is dropped.

    Only createContainer hooks are taken over: the others of these programs don't run before the container's start.
    minors: of the container's GPUs, for the application profile; nodes: paths of its device nodes.
    """
    works: list[RootfsWork] = []
    remaining: dict[str, list[Mapping[str, Any]]] = {}
    minors, nodes = tuple(minors), tuple(nodes)
    for stage, items in hooks.items():
        for hook in items or ():
            work = (
                understand(hook.get("path") or "", hook.get("args") or (), minors, nodes)
                if stage == "createContainer"
                else None
            )
            if work is None:
                remaining.setdefault(stage, []).append(hook)
            else:
                works.append(work)
    return join(works), remaining


def absorb(injection: Injection) -> Injection:
    """The injection with its preparing hooks turned into work on the root file system."""
    minors = [node.minor for node in injection.devices if gpu_number(node.path) >= 0]
    nodes = [node.path for node in injection.devices]
    works, others = [injection.rootfs], []
    for hook in injection.hooks:
        work = understand(hook.path, hook.args, minors, nodes) if hook.stage == "createContainer" else None
        if work is None:
            others.append(hook)
        else:
            works.append(work)
    return injection.replace(hooks=tuple(others), rootfs=join(works))


def gpu_number(path: str) -> int:
    """N of /dev/nvidiaN, which is the GPU's minor; -1 for any other path. The kernel's minors have 20 bits."""
    number = path.removeprefix("/dev/nvidia")
    return int(number) if number != path and number.isascii() and number.isdigit() and len(number) < 8 else -1


def hook_of(item: Mapping[str, Any]) -> Hook:
    """A CDI spec's hook as a value."""
    return Hook(
        item["hookName"],
        item["path"],
        tuple(item.get("args") or ()),
        tuple(item.get("env") or ()),
        int(item.get("timeout") or 0),
    )
