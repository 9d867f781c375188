"""A simulated node: one folder with a driver root, and beside it what a kubelet, engines and containers need.

DIR/node.yaml    what the node is
DIR/control      what has changed since, read by the stand-in libnvidia-ml at each call
DIR/root/        the driver root
DIR/kubelet/ DIR/cdi/ DIR/bin/ DIR/images/ DIR/bundles/   empty; see docs/architecture.md
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpulet.errors import ConfigError, NodeError
from gpulet.sim import description as describe
from gpulet.sim import devices, tree
from gpulet.sim import mig as layouts
from gpulet.sim.description import Description, SimGpu
from gpulet.sim.workplace import whole

FOLDERS = ("kubelet", "cdi", "bin", "images", "bundles")


@dataclass(frozen=True)
class SimNode:
    """A simulated node on disk. placeholders: its device nodes are plain files, since only root may make real ones."""

    folder: Path
    description: Description
    placeholders: bool = False

    @property
    def root(self) -> Path:
        """The driver root."""
        return self.folder / "root"

    @property
    def control(self) -> Path:
        """The file through which a running node is changed."""
        return self.folder / "control"

    @property
    def gpus(self) -> tuple[SimGpu, ...]:
        """The GPUs, by index."""
        return self.description.gpus

    @property
    def library_folder(self) -> Path:
        """Where the driver's 64-bit libraries are, libnvidia-ml.so.1 among them (Tegra has none)."""
        place = {"wsl": "wsl/lib", "tegra": f"{tree.TRIPLET}/nvidia"}.get(self.description.platform, tree.TRIPLET)
        return self.root / "usr/lib" / place


def create(
    folder: Path,
    profile: str = "h100x8",
    *,
    gpus: int | None = None,
    mig: Sequence[str] = (),
    driver: str | None = None,
) -> SimNode:
    """Lay out a simulated node in `folder`, which may be there already but empty.

    profile: a name out of `description.profiles()` or the path of a YAML file; gpus: how many, where not the
    profile's number; mig: layouts such as "gpu0: 1g.10gb x7"; driver: its version.
    UsageError for a profile or layout that can't be; NodeError where the folder can't carry a node.
    """
    folder = Path(folder).absolute()
    made = describe.load_profile(profile, gpus=gpus, driver=driver)
    for line in mig:
        made = layouts.apply(made, line)
    if (folder / "node.yaml").exists():
        raise NodeError(f"{folder} holds a simulated node already", remedy="remove it, or choose another folder")
    if folder.is_dir() and any(folder.iterdir()):  # of all folders "/" must not be taken for one
        raise NodeError(f"{folder} isn't empty", wanted="a new or an empty folder", remedy="choose another folder")
    devices.check_file_system(folder)
    tree.check_tools(made.platform)
    if not made.majors:
        made = replace(made, majors=devices.dynamic_majors(made.platform, Path("/proc/devices").read_text()))
    node = SimNode(folder, made)
    with whole(folder):
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "root").mkdir(exist_ok=True)
        (folder / "control").touch()
        lay(node)
    return replace(node, placeholders=not _has_devices(node))


def load(folder: Path) -> SimNode:
    """The node that `create` left in a folder. ConfigError where there is none."""
    folder = Path(folder).absolute()
    path = folder / "node.yaml"
    if not path.is_file():
        raise ConfigError(f"no simulated node in {folder}", remedy="make one: gpulet sim create DIR")
    node = SimNode(folder, describe.load_profile(str(path)))
    return replace(node, placeholders=not _has_devices(node))


def lay(node: SimNode) -> None:
    """Bring everything under the root in line with the description, node.yaml last."""
    tree.lay(node.root, node.description, node.control)
    devices.lay_proc(node.root, node.description)
    devices.lay_sys(node.root, node.description)
    devices.lay_devices(node.root, node.description)
    save(node)


def save(node: SimNode) -> None:
    """Write node.yaml, aside and renamed."""
    aside = node.folder / ".node.yaml.new"
    aside.write_text(describe.to_yaml(node.description))
    aside.rename(node.folder / "node.yaml")


def _has_devices(node: SimNode) -> bool:
    return all(
        os.path.exists(path := node.root / "dev" / name) and os.stat(path).st_rdev
        for name, _, _ in devices.nodes(node.description)
    )
