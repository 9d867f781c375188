"""What a live container gets from the host, opened there: mounts that hang nowhere yet, with their flags set, and the
driver's files to be copied. In the container the same paths may mean other things.
"""

from __future__ import annotations

import os
import stat

from gpulet import mount_api
from gpulet.errors import StepFailed
from gpulet.injection import loader
from gpulet.injection.held import failed
from gpulet.injection.model import DeviceNode, Injection, Mount
from gpulet.node.procfs import DRIVER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RO, NOSUID = mount_api.MOUNT_ATTR_RDONLY, mount_api.MOUNT_ATTR_NOSUID
NODEV, NOEXEC = mount_api.MOUNT_ATTR_NODEV, mount_api.MOUNT_ATTR_NOEXEC
ATTRIBUTES = {"ro": RO, "nosuid": NOSUID, "nodev": NODEV, "noexec": NOEXEC}
COPIED = ("params", "version", "registry")  # what a container sees of the driver in /proc, besides its own GPUs


class Step:
    """One mount to be placed: a detached mount's descriptor, where it goes, and whether that is a folder."""

    def __init__(self, name: str, tree: int, path: str, directory: bool) -> None:
        self.name = name
        self.tree = tree
        self.path = path
        self.directory = directory


class Sources:
    """Everything that comes from the host for one injection. Raises StepFailed, and then nothing stays open.

    steps: the mounts; missing: device nodes that the host lacks, to be made; libraries: for the loader's cache;
    texts: the driver's files in /proc that every container sees.
    """

    def __init__(self, injection: Injection, source: str, devbind: bool) -> None:
        self.steps: list[Step] = []
        self.missing: list[DeviceNode] = []
        self.libraries = loader.libraries_of(injection.mounts)
        self.texts = {name: data for name in COPIED if (data := _read(f"{source}/{name}")) is not None}
        try:
            for mount in injection.mounts:
                self.steps.append(_clone(mount))
            for node in injection.devices if devbind else ():
                if os.path.lexists(node.host_path):
                    self.steps.append(_clone_device(node))
                else:
                    self.missing.append(node)
            for mount in _proc_mounts(injection, source):
                self.steps.append(_clone(mount))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the mounts back: what isn't placed by then is gone."""
        for step in self.steps:
            os.close(step.tree)


def _proc_mounts(injection: Injection, source: str) -> Iterator[Mount]:
    options = ("ro", "nodev", "nosuid", "noexec")
    for folder in _gpu_folders(source, injection.proc_gpus):
        yield Mount(f"{source}/gpus/{folder}", f"{DRIVER}/gpus/{folder}", options, "proc")
    for path in injection.proc_mig:
        yield Mount(source + path.removeprefix(DRIVER), path, options, "proc")


def _clone(mount: Mount) -> Step:
    recursive = mount_api.AT_RECURSIVE if "rbind" in mount.options else 0
    attributes = 0
    for option in mount.options:
        attributes |= ATTRIBUTES.get(option, 0)
    try:
        tree = mount_api.open_tree(mount.source, mount_api.OPEN_TREE_CLONE | recursive)
        try:
            directory = stat.S_ISDIR(os.fstat(tree).st_mode)
            mount_api.mount_setattr(tree, attributes, 0, mount_api.MS_PRIVATE, recursive)
        except OSError:
            os.close(tree)
            raise
    except OSError as error:
        raise failed("open", mount.source, error) from error
    return Step(mount.kind, tree, mount.path, directory)


def _clone_device(node: DeviceNode) -> Step:
    try:
        tree = mount_api.open_tree(node.host_path)
    except OSError as error:
        raise failed("open device", node.host_path, error) from error
    try:
        seen = os.fstat(tree)
        if not stat.S_ISCHR(seen.st_mode) or seen.st_rdev != os.makedev(node.major, node.minor):
            wanted = f"character device {node.major}:{node.minor}"
            raise StepFailed("open device", node.host_path, reason=f"it is not {wanted}", remedy="make the node anew")
        # Where the host's folder is mounted nodev, the clone would be too, and the node useless.
        mount_api.mount_setattr(tree, RO | NOSUID | NOEXEC, NODEV, mount_api.MS_PRIVATE)
    except OSError as error:
        os.close(tree)
        raise failed("open device", node.host_path, error) from error
    except StepFailed:
        os.close(tree)
        raise
    return Step("device", tree, node.path, False)


def _gpu_folders(source: str, wanted: Sequence[str]) -> list[str]:
    """The folders of the GPUs, spelt as the driver does: their domain may have four digits or eight, in any case."""
    try:
        names = os.listdir(f"{source}/gpus") if wanted else []
    except OSError:
        return []
    keys = {_bus_key(bus_id) for bus_id in wanted}
    return sorted(name for name in names if _bus_key(name) in keys)


def _bus_key(bus_id: str) -> str:
    return bus_id.lower().rjust(16, "0")


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return None
