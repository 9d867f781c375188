"""Tegra: what goes into a container as lists of files say it, "type, path" a line, and the CDI spec made of them.

Such nodes have no driver tree of one version and no device node for each GPU; JetPack ships the lists.
"""

from __future__ import annotations

import fnmatch
import glob
import os

from gpulet.errors import CdiError
from gpulet.injection.cdi_spec import assemble, edits_of
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from gpulet.node import devices
from gpulet.node.paths import below, resolve
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
    for line in text.splitlines():
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
    if os.path.isfile(below(root, RELEASE)):
        mounts[RELEASE] = Mount(below(root, RELEASE), RELEASE, why="tells programs that this is a Tegra")
    folders = dict.fromkeys(path.rpartition("/")[0] for path, mount in mounts.items() if mount.kind == "library")
    work = RootfsWork(tuple(links.values()), tuple(folders), host_cuda=cuda, compat_folder=compat_folder)
    return Injection(tuple(nodes.values()), tuple(mounts.values()), rootfs=work)


def spec(
    found: Injection,
    *,
    vendor: str = "nvidia.com",
    cls: str = "gpu",
    hook_path: str = "/usr/bin/gpulet-cdi-hook",
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The CDI spec: the nodes as device "0" and as "all", everything else in common. Raises CdiError without nodes."""
    if not found.devices:
        raise CdiError("the lists name no device node that is there", seen=f"*.csv in {FOLDER}")
    common = edits_of(found.replace(devices=(), env=(("NVIDIA_VISIBLE_DEVICES", "void"),)), hook_path)
    every = edits_of(Injection(found.devices), "")
    return assemble(f"{vendor}/{cls}", {"0": every, "all": every}, common, annotations or {})
