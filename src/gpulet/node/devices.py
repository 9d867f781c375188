"""The device nodes in /dev that concern GPUs, and the majors behind them.

Loaded by the programs in launch/: os alone is imported.
"""

from __future__ import annotations

import os

from gpulet.node.gpu import CharDevice, NodeFacts
from gpulet.node.paths import below

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeVar

    T = TypeVar("T")

# Linux Documentation/admin-guide/devices.txt: 195 is NVIDIA's; the other majors are given out at load time.
NVIDIA_MAJOR = 195
CAPS_FOLDER = "/dev/nvidia-caps"
IMEX_FOLDER = "/dev/nvidia-caps-imex-channels"
_S_IFMT, _S_IFCHR = 0o170000, 0o020000  # stat.h; importing stat only for these isn't worth it


def choose_dev_root(root: str, dev_root: str = "") -> str:
    """The folder whose dev/ holds the nodes: the one given, else the driver root where it has a dev/, else "/"."""
    if dev_root:
        return dev_root
    return root if root and os.path.isdir(below(root, "/dev")) else "/"


def char_device(dev_root: str, path: str) -> CharDevice | None:
    """The character device at `path` beneath `dev_root`, or None. A symbolic link is none: it may lead anywhere."""
    host = below(dev_root, path)
    try:
        info = os.lstat(host)
    except OSError:
        return None
    if info.st_mode & _S_IFMT != _S_IFCHR:
        return None
    number = info.st_rdev
    return CharDevice(path, host, os.major(number), os.minor(number), info.st_mode & 0o7777, info.st_uid, info.st_gid)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _candidates(dev_root: str) -> Iterator[str]:
    for name in _names(below(dev_root, "/dev")):
        if name.startswith("nvidia") or name in ("dxg", "gdrdrv"):
            yield f"/dev/{name}"
    for name in _names(below(dev_root, CAPS_FOLDER)):
        yield f"{CAPS_FOLDER}/{name}"
    for name in _names(below(dev_root, "/dev/infiniband")):
        if name.startswith("uverbs") or name == "rdma_cm":
            yield f"/dev/infiniband/{name}"


def scan(dev_root: str, drm: Iterable[str] = ()) -> tuple[CharDevice, ...]:
    """Every node that may be injected, sorted by path; `drm` names the ones in /dev/dri to look at."""
    paths = [*_candidates(dev_root), *(f"/dev/dri/{name}" for name in drm)]
    found = (char_device(dev_root, path) for path in paths)
    return tuple(sorted((node for node in found if node is not None), key=lambda node: node.path))


def given(known: list[T], paths: Callable[[T], tuple[str, ...]], nodes: Iterable[CharDevice], dev_root: str) -> list[T]:
    """Those of the kernel's GPUs or MIG devices that this node was given, where it is itself a container; paths: the
    nodes that one needs.

    /proc tells of all that the kernel has. Given are those whose nodes are there, if some have theirs and others don't:
    so NVML counts, for which one that it can't open isn't there. In the kernel's own /dev a node that is missing is yet
    to be made by whoever needs it, and so are all of them where there is none at all.
    """
    there = {node.path for node in nodes}
    found = [one for one in known if there.issuperset(paths(one))]
    if not found or len(found) == len(known) or on_devtmpfs(below(dev_root, "/dev")):
        return known
    return found


def on_devtmpfs(folder: str) -> bool:
    """Whether a folder is the kernel's own /dev, by its line in mountinfo: statfs(2) takes devtmpfs for a tmpfs."""
    try:
        number = os.stat(folder).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")
    except OSError:
        return False
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in lines:
        mount, _, kind = line.partition(" - ")  # proc_pid_mountinfo(5): id, parent, major:minor, ... - type ...
        if kind.startswith("devtmpfs ") and mount.split(" ", 3)[2] == device:
            return True
    return False


def imex_channels(dev_root: str) -> tuple[int, ...]:
    """The IMEX channels present, ascending."""
    names = _names(below(dev_root, IMEX_FOLDER))
    numbers = (name[len("channel") :] for name in names if name.startswith("channel"))
    return tuple(sorted(int(number) for number in numbers if number.isascii() and number.isdigit()))


def parse_majors(text: str) -> tuple[tuple[str, int], ...]:
    """(name, major) of NVIDIA's character devices out of /proc/devices, sorted by name."""
    found = {}
    for line in text.split("\n"):
        if line.startswith("Block devices"):
            break
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and (name.startswith("nvidia") or name == "gdrdrv"):
            found[name] = int(number)
    return tuple(sorted(found.items()))


_DRIVER_OF = (  # beginning of a node's path -> the name of its driver in /proc/devices
    ("/dev/nvidia-uvm", "nvidia-uvm"),
    (CAPS_FOLDER + "/", "nvidia-caps"),
    (IMEX_FOLDER + "/", "nvidia-caps-imex-channels"),
    ("/dev/nvidia-nvswitch", "nvidia-nvswitch"),
    ("/dev/gdrdrv", "gdrdrv"),
)


def kernel_major(facts: NodeFacts, path: str) -> int:
    """The major that the kernel has now for the driver of a node, -1 where it has none or the path tells no driver.

    A node that was left by an earlier boot can have another: opening it reaches nothing, or something else.
    """
    return next((facts.major(name) for beginning, name in _DRIVER_OF if path.startswith(beginning)), -1)


def drm_of(sys_root: str, dev_root: str, bus_id: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """A PCI device's DRM node names, and its (text, path) links in /dev/dri/by-path that lead to one of them.

    bus_id in sysfs form, "0000:19:00.0".
    """
    names = tuple(_names(below(sys_root, f"/sys/bus/pci/devices/{bus_id}/drm")))
    links = []
    if names:
        for kind in ("card", "render"):
            path = f"/dev/dri/by-path/pci-{bus_id}-{kind}"
            try:
                text = os.readlink(below(dev_root, path))
            except OSError:
                continue
            if text.rpartition("/")[2] in names:
                links.append((text, path))
    return names, tuple(links)
