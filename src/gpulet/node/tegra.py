"""A Tegra without NVML: one GPU, part of the chip, with no PCI address, no UUID and no /proc/driver/nvidia."""

from __future__ import annotations

from gpulet.node import devices
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.node.paths import below
from gpulet.node.procfs import read_text

NAME = "Tegra's own GPU"


def release(root: str) -> str:
    """The Linux for Tegra release ("36.4.3") in /etc/nv_tegra_release, "" where it isn't told.

    The file's first line is "# R36 (release), REVISION: 4.3, GCID: ...".
    """
    words = (read_text(below(root, "/etc/nv_tegra_release")) or "").partition("\n")[0].replace(",", " ").split()
    major = next((word[1:] for word in words if word[:1] == "R" and word[1:].isdigit()), "")
    revision = words[words.index("REVISION:") + 1] if "REVISION:" in words[:-1] else ""
    return f"{major}.{revision}" if major and revision else major


def facts(root: str = "/", dev_root: str = "") -> NodeFacts:
    """Facts with source "tegra". Which nodes and files belong to the GPU is told by lists that JetPack ships
    (injection/csv_files.py); `driver` is the release of Linux for Tegra.
    """
    dev = devices.choose_dev_root(root or "/", dev_root)
    return NodeFacts((Gpu(0, -1, "", "", name=NAME),), "tegra", driver=release(root), dev_root=dev)
