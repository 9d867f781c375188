"""A Tegra that has NVML: with a PCI GPU beside its own, with compatibility libraries, with links beside libraries."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpulet.injection import csv_files
from gpulet.injection.model import DeviceNode, Injection
from gpulet.node.gpu import CharDevice, Gpu, NodeFacts
from support import driver_tree as tree

OWN = Gpu(0, -1, "GPU-own", "", name="Orin (nvgpu)")
CARD = Gpu(1, 1, "GPU-card", "00000005:01:00.0", name="NVIDIA RTX 6000 Ada Generation")


def node(path: str, major: int = 511, minor: int = 0) -> CharDevice:
    return CharDevice(path, path, major, minor)


LISTED = ("/dev/nvmap", "/dev/nvhost-gpu", "/dev/nvidia1", "/dev/nvidiactl")
FOUND = Injection(tuple(DeviceNode(path, path, 195, at) for at, path in enumerate(LISTED)))
NODES = tuple(node(f"/dev/{name}", 195) for name in ("nvidia1", "nvidia2", "nvidiactl", "nvidia-modeset"))


def facts(*gpus: Gpu) -> NodeFacts:
    return NodeFacts(gpus, "nvml", cuda="12.6", nodes=NODES)


def paths(spec: dict[str, Any]) -> dict[str, list[str]]:
    return {
        device["name"]: sorted(item["path"] for item in device["containerEdits"]["deviceNodes"])
        for device in spec["devices"]
    }


def test_two_devices_where_a_pci_gpu_is_beside_the_tegras_own() -> None:
    own = ["/dev/nvhost-gpu", "/dev/nvidia2", "/dev/nvidiactl", "/dev/nvmap"]
    card = ["/dev/nvhost-gpu", "/dev/nvidia-modeset", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvmap"]
    spec = csv_files.spec(FOUND, facts(OWN, CARD), names=("index", "uuid"))
    assert paths(spec) == {
        "0": own,
        "1": card,
        "GPU-own": own,
        "GPU-card": card,
        "all": sorted({*own, *card}),
    }
    assert "all" not in paths(csv_files.spec(FOUND, facts(OWN, CARD), all_device=False))


THOR = Gpu(0, 0, "GPU-thor", "00000000:01:00.0", name="NVIDIA Thor")


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        ((THOR, CARD), ["0", "1", "all"]),
        ((OWN,), ["0", "all"]),
        ((CARD, OWN.replace(index=1)), ["0", "all"]),
        ((CARD.replace(index=0), CARD), ["0", "all"]),
        ((OWN, THOR.replace(index=1)), ["0", "all"]),
        ((OWN, CARD, CARD.replace(index=2)), ["0", "all"]),
    ],
)
def test_every_other_layout_is_one_device(gpus: tuple[Gpu, ...], names: list[str]) -> None:
    spec = csv_files.spec(FOUND, facts(*gpus))
    assert list(paths(spec)) == names
    if len(names) == 2:
        assert paths(spec)["0"] == sorted(LISTED)


def test_without_nvml_one_device() -> None:
    assert list(paths(csv_files.spec(FOUND))) == ["0", "all"]


@pytest.mark.root
def test_links_by_which_a_listed_library_is_found(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "dev")
    os.mknod(tmp_path / "dev/nvmap", stat.S_IFCHR | 0o660, os.makedev(10, 60))
    folder = tmp_path / "usr/lib/nvidia"
    for name in ("libnvidia-nvvm.so.540.4.0", "libnvidia-nvvm70.so.4", "libother.so.1"):
        tree.write(folder / name)
    tree.link(folder / "libnvidia-nvvm.so.4", "libnvidia-nvvm.so.540.4.0")
    tree.link(folder / "libnvidia-nvvm.so", "libnvidia-nvvm.so.4")
    tree.link(folder / "libnvidia-nvvm.so.elsewhere", "libother.so.1")
    rows = [("dev", "/dev/nvmap"), ("lib", "/usr/lib/nvidia/libnvidia-nvvm.so.540.4.0")]
    found = csv_files.injection(rows, str(tmp_path))
    assert {(link.target, link.path) for link in found.rootfs.links} == {
        ("libnvidia-nvvm.so.540.4.0", "/usr/lib/nvidia/libnvidia-nvvm.so.4"),
        ("libnvidia-nvvm.so.4", "/usr/lib/nvidia/libnvidia-nvvm.so"),
    }
