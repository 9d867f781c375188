"""Tegra: what goes into a container as lists of files say it, "type, path" a line, and the CDI spec made of them.

Such nodes have no driver tree of one version and no device node for each GPU; JetPack ships the lists.
"""

from __future__ import annotations

import fnmatch
import glob
import os

from gpulet.errors import CdiError
from gpulet.injection import build
from gpulet.injection.cdi_calls import HookCalls
from gpulet.injection.cdi_spec import HostPaths, assemble, edits_of, names_of
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from gpulet.injection.select import Selection
from gpulet.node import devices
from gpulet.node.driver_files import DriverFiles
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.node.paths import below, resolve
from gpulet.node.platform import is_integrated
from gpulet.node.procfs import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

FOLDER = "/etc/nvidia-container-runtime/host-files-for-container.d"
KINDS = ("dev", "dir", "lib", "sym")
RELEASE = "/etc/nv_tegra_release"


def parse(text: str) -> list[tuple[str, str]]:
    """(type, path) of each line; empty lines, comments and lines of another form are left out."""
    rows = []
    for line in text.removeprefix("\ufeff").splitlines():
        kind, comma, path = line.partition(",")
        if comma and kind.strip() in KINDS and path.strip().startswith("/"):
            rows.append((kind.strip(), path.strip()))
    return rows


def read(root: str, paths: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The rows of the files given, else of all lists in the folder beneath the root; each once."""
    files = list(paths) or sorted(glob.glob(below(root, f"{FOLDER}/*.csv")))
    return list(dict.fromkeys(row for path in files for row in parse(read_text(path) or "")))


def _found(root: str, pattern: str) -> Iterator[str]:
    """Paths below the root that fit a pattern, unresolved."""
    prefix = root.rstrip("/")
    for path in sorted(glob.glob(prefix + pattern)) or [prefix + pattern]:
        if os.path.lexists(path):
            yield path[len(prefix) :]


def _chain(root: str, path: str) -> Iterator[tuple[str, str]]:
    """(text, path) of each symbolic link from `path` on, below the root."""
    for _ in range(40):  # as many as the kernel follows
        try:
            text = os.readlink(below(root, path))
        except OSError:
            return
        yield text, path
        path = os.path.normpath(text if text.startswith("/") else f"{os.path.dirname(path)}/{text}")


def _beside(root: str, library: str) -> Iterator[tuple[str, str]]:
    """(text, path) of the links in a library's folder by which programs and linkers find it: lib.so.4, lib.so."""
    folder, _, name = library.rpartition("/")
    for link in sorted(glob.glob(below(root, f"{folder}/{glob.escape(name.partition('.so')[0])}.so*"))):
        path = link[len(root.rstrip("/")) :]
        if os.path.islink(link) and resolve(root, path) == library:
            yield os.readlink(link), path


def _ignored(path: str, patterns: Iterable[str]) -> bool:
    """ "**/name" fits the last part, anything else the whole path."""
    name = path.rpartition("/")[2]
    return any(
        fnmatch.fnmatch(name, pattern[3:]) if pattern.startswith("**/") else fnmatch.fnmatch(path, pattern)
        for pattern in patterns
    )


def injection(
    rows: Iterable[tuple[str, str]],
    root: str = "/",
    *,
    dev_root: str = "",
    ignore: Sequence[str] = (),
    cuda: str = "",
    compat_folder: str = RootfsWork.compat_folder,
) -> Injection:
    """What the rows ask for, as far as it is there. ignore: patterns of symbolic links to leave out; cuda: the node's
    CUDA version, against which an image's compatibility libraries are weighed.
    """
    dev = devices.choose_dev_root(root, dev_root)
    nodes: dict[str, DeviceNode] = {}
    mounts: dict[str, Mount] = {}
    links: dict[str, SymLink] = {}
    for kind, pattern in rows:
        why = f"listed as {kind}"
        if kind == "dev":
            node = devices.char_device(dev, pattern)
            if node is not None:
                nodes[node.path] = DeviceNode(
                    node.path, node.host_path, node.major, node.minor, mode=node.mode, gid=node.gid, why=why
                )
            continue
        for path in _found(root, pattern):
            if kind == "sym" and _ignored(path, ignore):
                continue
            real = resolve(root, path)
            if not os.path.exists(below(root, real)) or (kind == "dir") != os.path.isdir(below(root, real)):
                continue
            library = kind == "lib" or ".so" in real.rpartition("/")[2]
            mounts[real] = Mount(below(root, real), real, kind="library" if library else "other", why=why)
            if kind != "dir":
                links |= {at: SymLink(text, at, why) for text, at in _chain(root, path)}
            if kind == "lib":
                links |= {at: SymLink(text, at, why) for text, at in _beside(root, real)}
    if os.path.isfile(below(root, RELEASE)):
        mounts[RELEASE] = Mount(below(root, RELEASE), RELEASE, why="tells programs that this is a Tegra")
    folders = dict.fromkeys(path.rpartition("/")[0] for path, mount in mounts.items() if mount.kind == "library")
    work = RootfsWork(tuple(links.values()), tuple(folders), host_cuda=cuda, compat_folder=compat_folder)
    return Injection(tuple(nodes.values()), tuple(mounts.values()), rootfs=work)


# -- the CDI spec --


def _own(gpu: Gpu) -> bool:
    """Whether a GPU is the Tegra's own. Thor's says that it is a PCI device, at 01:00."""
    return (not gpu.bus_id and is_integrated(gpu.name)) or gpu.bus_id.startswith("00000000:01:00.")


def divide(found: Injection, facts: NodeFacts) -> dict[Gpu, tuple[DeviceNode, ...]]:
    """The device nodes of a Tegra's own GPU (index 0) and of a PCI GPU beside it (index 1): the listed ones, and what a
    PCI GPU has anywhere. Empty for any other layout: then all nodes belong to the one device.
    """
    if len(facts.gpus) != 2 or not _own(facts.gpus[0]) or _own(facts.gpus[1]):
        return {}
    own, card = facts.gpus
    second = build.device(facts, Selection((card,))).devices
    control = build.common(facts, DriverFiles("", "")).devices
    # Beside a card the driver calls the Tegra's own GPU nvidia2; nvidia1, which the lists have for it, is the card.
    third = (DeviceNode(n.path, n.host_path, n.major, n.minor, mode=n.mode, gid=n.gid) for n in facts.nodes
             if n.path == "/dev/nvidia2")  # fmt: skip
    first = {node.path: node for node in (*found.devices, *third) if node.path != "/dev/nvidia1"}
    taken = {node.path for node in (*second, *control)}
    rest = (n for n in found.devices if n.path not in taken and not n.path.removeprefix("/dev/nvidia").isdigit())
    return {own: tuple(first.values()), card: (*second, *control, *rest)}


def spec(
    found: Injection,
    facts: NodeFacts | None = None,
    *,
    vendor: str = "nvidia.com",
    cls: str = "gpu",
    names: Sequence[str] = ("index",),
    calls: HookCalls | None = None,
    annotations: Mapping[str, str] | None = None,
    all_device: bool = True,
    paths: HostPaths | None = None,
) -> dict[str, Any]:
    """The CDI spec: the listed nodes as device "0" and as "all", everything else in common. facts: from NVML, where it
    is to be looked whether there is a PCI GPU too (see `divide`); then `names` are given as by make_spec. calls,
    paths: see HookCalls, HostPaths. Raises CdiError without nodes.
    """
    if not found.devices:
        raise CdiError("the lists name no device node that is there", seen=f"*.csv in {FOLDER}")
    common = edits_of(found.replace(devices=(), env=(("NVIDIA_VISIBLE_DEVICES", "void"),)), paths, calls)
    divided = divide(found, facts) if facts else {}
    parts = {name: Injection(nodes) for gpu, nodes in divided.items() for name in names_of(gpu, names)}
    parts = parts or {"0": Injection(found.devices)}
    if all_device:
        parts["all"] = build.merge([Injection(nodes) for nodes in divided.values()] or [Injection(found.devices)])
    devices = {name: edits_of(part, paths) for name, part in parts.items()}
    return assemble(f"{vendor}/{cls}", devices, common, annotations or {})
