"""Where a GPU is: its PCI address and the number of its device node, through NVML and where that doesn't tell."""

from __future__ import annotations

from typing import Any

import pynvml

from gpulet.errors import NodeError
from gpulet.node import devices, procfs
from gpulet.node.nvml_ask import text
from gpulet.node.nvml_errors import ABOUT_THE_QUESTION, told
from gpulet.node.paths import below
from gpulet.node.platform import is_integrated
from gpulet.node.procfs import nvml_bus_id, pci_name, read_text


def place(handle: Any, name: str, proc: str, dev: str) -> tuple[str, int]:
    """(PCI bus id, device minor). A Tegra's own GPU is no PCI device, and neither it nor one of WSL has a minor.

    NodeError where nobody tells another's minor, without which no container could have it; any other failure of NVML's
    is raised as it is.
    """
    try:
        bus_id = nvml_bus_id(text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        return "", -1
    try:
        return bus_id, int(pynvml.nvmlDeviceGetMinorNumber(handle))
    except pynvml.NVMLError as error:
        if error.value not in ABOUT_THE_QUESTION:
            raise
        said = below(proc, f"{procfs.DRIVER}/gpus/{pci_name(bus_id)}/information")
        minor = procfs.parse_information(read_text(said) or "").get("Device Minor", "")
        if minor.isdigit():
            return bus_id, int(minor)
        if is_integrated(name) or devices.char_device(dev, "/dev/dxg"):
            return "", -1
        raise NodeError(
            "which /dev/nvidiaN it has isn't known",
            seen=told(error.value, str(error)),
            wanted=f"Device Minor in {said}",
        ) from error
