"""Which kind of node, by signs in a tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulet.node import platform
from support import driver_tree as tree


def pci(root: Path, address: str, *, driver: str = "", vendor: str = "0x10de", kind: str = "0x030200") -> None:
    device = root / "sys/bus/pci/devices" / address
    tree.write(device / "vendor", vendor + "\n")
    tree.write(device / "class", kind + "\n")
    if driver:
        tree.link(device / "driver", f"../../../../bus/pci/drivers/{driver}")


def test_discrete_with_mixed_owners(tmp_path: Path) -> None:
    tree.create(tmp_path)
    pci(tmp_path, "0000:19:00.0", driver="nvidia")
    pci(tmp_path, "0000:1a:00.0", driver="vfio-pci")
    pci(tmp_path, "0000:1a:00.1", driver="vfio-pci", kind="0x040300")  # the GPU's sound function
    pci(tmp_path, "0000:02:00.0", vendor="0x8086")
    found = platform.detect(str(tmp_path))
    assert (found.kind, found.vfio) == ("discrete", ("0000:1a:00.0",))
    assert "PCI 0000:19:00.0 is an NVIDIA GPU, bound to nvidia" in found.evidence
    assert not any("8086" in line or "0000:02" in line for line in found.evidence)


def test_all_gpus_belong_to_virtual_machines(tmp_path: Path) -> None:
    pci(tmp_path, "0000:19:00.0", driver="vfio-pci")
    assert platform.detect(str(tmp_path)).kind == "vfio"


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    found = platform.detect(str(tmp_path))
    assert found.kind == "none" and found.evidence


def test_tegra_by_file_or_family_unless_nvml_is_there(tmp_path: Path) -> None:
    for number, (name, text) in enumerate([("etc/nv_tegra_release", "# R36"), ("sys/devices/soc0/family", "Tegra\n")]):
        root = tmp_path / str(number)
        tree.write(root / name, text)
        assert platform.detect(str(root)).kind == "tegra"
        tree.create(root)
        assert platform.detect(str(root)).kind == "discrete"
        assert platform.detect(str(root), gpu_names=["Orin (nvgpu)"]).kind == "tegra"


def test_wsl_by_its_library(tmp_path: Path) -> None:
    tree.write(tmp_path / "usr/lib/wsl/lib/libdxcore.so")
    assert platform.detect(str(tmp_path)).kind == "wsl"


@pytest.mark.root
@pytest.mark.parametrize(("profile", "kind"), [("h100x8", "discrete"), ("wsl", "wsl"), ("tegra", "tegra")])
def test_simulated_nodes(tmp_path: Path, profile: str, kind: str) -> None:
    from gpulet.sim import node

    assert platform.detect(str(node.create(tmp_path / "n", profile).root)).kind == kind
