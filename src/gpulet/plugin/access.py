"""Containers that were given a GPU and may no longer use it: its node is in their /dev, their device cgroup refuses it.

That is what becomes of rules that were put into a cgroup behind the low-level runtime's back, as soon as systemd or the
runtime writes the cgroup's rules anew (`systemctl daemon-reload`, the kubelet's static CPU manager). The application
sees no more than an unknown error, the node nothing at all.

The kubelet's checkpoint tells which Pod holds which GPU, cgroups are named by the Pod's UID, and the processes in them
show the container's /dev. Without the host's processes (hostPID) or cgroups nothing is known, and nothing is said.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpulet.injection.cgroup import Cgroup, Rule
from gpulet.injection.cgroup_access import hierarchies, may_use
from gpulet.plugin.generation import Generation
from gpulet.plugin.holders import Holder, checkpoint
from gpulet.plugin.resources import Device

EVERY = 15.0  # seconds between looks
LEVELS = 6  # how deep a cgroup lies at most: the folder of all Pods, and a Pod in it
CLASSES = ("burstable", "besteffort", "guaranteed")


@dataclass(frozen=True, slots=True)
class AccessLost:
    """One device that a container may no longer use. holder: as the checkpoint has it; path: the device's node."""

    holder: Holder
    gpu: str
    path: str

    def named(self, held: Iterable[Holder]) -> Holder:
        """The holder by its Pod's name, where one of these, as the kubelet lists them, is it; else by the UID."""
        own = self.holder.container, self.holder.resource, self.holder.device
        return next((one for one in held if one.namespace and (one.container, one.resource, one.device) == own),
                    self.holder)  # fmt: skip

    @property
    def text(self) -> str:
        """For people; who is concerned stands before it."""
        return (
            f"may no longer use {self.path} of GPU {self.gpu}: its cgroup's device rules were written anew without it, "
            "as `systemctl daemon-reload` does where a hook had put them there; delete the Pod to have it made anew"
        )


class AccessWatch:
    """Looks now and then. A container that is just being made may look so for a moment: two looks must agree."""

    def __init__(self, proc: str = "/proc") -> None:
        self.lost: frozenset[AccessLost] = frozenset()
        self._suspected: frozenset[AccessLost] = frozenset()
        self._proc = proc
        self._next = 0.0

    def look(self, current: Generation) -> list[AccessLost]:
        """What is lost since the last look. Blocks, for milliseconds. Raises OSError."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + EVERY
        before, suspected = self.lost, frozenset(self._look(current))
        self.lost = suspected & (self._suspected | before)
        self._suspected = suspected
        return sorted(self.lost - before, key=repr)

    def _look(self, current: Generation) -> Iterator[AccessLost]:
        held: dict[str, list[tuple[Holder, Device]]] = {}  # by the Pod's UID
        for holder in checkpoint(current.config.kubelet_socket_dir):
            offer = current.offers.get(holder.resource)
            device = offer.resource.by_id.get(holder.device) if offer else None
            if device:
                held.setdefault(holder.pod, []).append((holder, device))
        if not held:
            return
        rules = {path: rule for rows in held.values() for _, device in rows for path in device.paths
                 if (rule := _rule(current.config.lookup_dev_root.rstrip("/") + path))}  # fmt: skip
        for uid, cgroup, pid in _containers(held, self._proc):
            refused = _refused(f"{self._proc}/{pid}/root", f"{self._proc}/1/root", cgroup, rules)
            for holder, device in held[uid]:
                path = next((path for path in device.paths if path in refused), "")
                if path:
                    yield AccessLost(holder, device.gpu_uuid, path)


def _rule(path: str) -> Rule | None:
    """The numbers of a character device, None for anything else."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return (os.major(info.st_rdev), os.minor(info.st_rdev)) if stat.S_ISCHR(info.st_mode) else None


def _folder_device(path: str) -> int:
    """Which file system a folder is of, -1 for what is no folder, or isn't ours to see."""
    try:
        info = os.lstat(path)
    except OSError:
        return -1
    return info.st_dev if stat.S_ISDIR(info.st_mode) else -1


def _refused(root: str, host: str, cgroup: Cgroup, rules: Mapping[str, Rule]) -> set[str]:
    """Which of these nodes stand in the container's /dev and are refused by its cgroup. The host's own /dev, mounted
    into a container, says nothing of what the container was given."""
    own = _folder_device(f"{root}/dev")
    if own in (-1, _folder_device("/dev"), _folder_device(f"{host}/dev")):
        return set()
    there = {path: rule for path, rule in rules.items() if _rule(root + path) == rule}
    return {path for path, rule in there.items() if may_use(cgroup, rule) is False}


def _containers(uids: Iterable[str], proc: str) -> Iterator[tuple[str, Cgroup, int]]:
    """The Pod's UID, a cgroup and a process in it, for each container of these Pods."""
    names = {f"pod{spelt}": uid for uid in uids for spelt in (uid, uid.replace("-", "_"))}
    for top in hierarchies(proc):
        for uid, pod in _pods(top.folder, names):
            for container in _folders(pod):
                for folder, _, _ in os.walk(container):
                    if pid := _process(folder):
                        yield uid, Cgroup(top.version, folder), pid
                        break


def _pods(top: str, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The Pods' UIDs and folders: .../kubepods/burstable/pod<UID>, or as systemd names them, with the UID's dashes as
    "_": .../kubepods-burstable-pod<UID>.slice. All lie at the top, or in the kubelet's cgroupRoot of any name."""
    roots = [top]
    for _ in range(LEVELS):
        inside = {root: _folders(root) for root in roots}
        with_pods = [root for root in roots if any("kubepods" in os.path.basename(path) for path in inside[root])]
        if with_pods:
            for root in with_pods:
                yield from _beneath(root, names, LEVELS)
            return
        roots = [path for paths in inside.values() for path in paths]


def _beneath(folder: str, names: Mapping[str, str], levels: int) -> Iterator[tuple[str, str]]:
    for path in _folders(folder) if levels else ():
        name = os.path.basename(path).removesuffix(".slice")
        uid = names.get(name) or names.get(name.rpartition("-")[2])
        if uid:
            yield uid, path
        elif "kube" in name or name in CLASSES:
            yield from _beneath(path, names, levels - 1)


def _folders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []  # gone meanwhile


def _process(cgroup: str) -> int:
    """A process of the cgroup, 0 where there is none, or none that we may know of."""
    try:
        with open(f"{cgroup}/cgroup.procs", encoding="ascii") as stream:
            return max((int(line) for line in stream), default=0)
    except (OSError, ValueError):
        return 0
