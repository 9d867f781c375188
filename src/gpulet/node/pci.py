"""NVIDIA GPUs on the PCI bus, whoever drives them. Source: sysfs, Documentation/ABI/testing/sysfs-bus-pci."""

from __future__ import annotations

import os

from gpulet.node.paths import below
from gpulet.node.procfs import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NVIDIA_VENDOR = "0x10de"
_DISPLAY_CLASS = "0x03"  # PCI base class "display controller": VGA (00) and 3D (02) alike


def pci_gpus(sys_root: str) -> Iterator[tuple[str, str]]:
    """(PCI address, kernel driver's name or "") of each NVIDIA GPU; `sys_root` is the folder whose sys/ counts."""
    folder = below(sys_root, "/sys/bus/pci/devices")
    try:
        addresses = sorted(os.listdir(folder))
    except OSError:
        return
    for address in addresses:
        vendor = (read_text(f"{folder}/{address}/vendor") or "").strip()
        kind = (read_text(f"{folder}/{address}/class") or "").strip()
        if vendor == NVIDIA_VENDOR and kind.startswith(_DISPLAY_CLASS):
            try:
                driver = os.path.basename(os.readlink(f"{folder}/{address}/driver"))
            except OSError:
                driver = ""
            yield address, driver
