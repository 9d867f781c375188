"""Why NVML did not start, told apart: which failure, with which evidence, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpulet.errors import NvmlError
from gpulet.node import devices
from gpulet.node.paths import below
from gpulet.node.pci import pci_gpus
from gpulet.node.procfs import driver_version, sys_root

# nvmlReturn_t, nvml.h
NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 4, 9, 12, 15, 18, 999


def library_not_found(root: str, looked: Sequence[str]) -> NvmlError:
    """libnvidia-ml.so.1 is nowhere; `looked` names every path tried."""
    return NvmlError(
        "NVML library not found",
        code=LIBRARY_NOT_FOUND,
        seen="none of " + " ".join(looked),
        wanted="libnvidia-ml.so.1",
        remedy=f"install the NVIDIA driver or point the driver root (now {root}) at the tree that has it",
    )


def _not_loaded(root: str) -> NvmlError:
    gpus = list(pci_gpus(sys_root(root)))
    if not gpus:
        return NvmlError(
            "no NVIDIA device on the PCI bus",
            code=DRIVER_NOT_LOADED,
            seen="no device of vendor 10de and class 03 in /sys/bus/pci/devices",
            remedy="check lspci; on a virtual machine, that the GPU is passed through",
        )
    bound = ", ".join(f"{address} bound to {driver or 'no driver'}" for address, driver in gpus)
    if any(driver == "nvidia" for _address, driver in gpus):
        return NvmlError(
            "NVML doesn't reach the NVIDIA kernel module",
            code=DRIVER_NOT_LOADED,
            seen=f"{bound}, module {driver_version(root) or 'of unknown version'}",
            wanted="/dev/nvidiactl of the module that runs",
            remedy="run: nvidia-modprobe -c 0, and read dmesg",
        )
    return NvmlError(
        "NVIDIA kernel module not loaded",
        code=DRIVER_NOT_LOADED,
        seen=bound,
        wanted="bound to nvidia",
        remedy="run: modprobe nvidia, and read dmesg where that fails",
    )


def _no_permission(root: str) -> NvmlError:
    dev = devices.choose_dev_root(root)
    for node in devices.scan(dev):
        if not os.access(node.host_path, os.R_OK | os.W_OK):
            seen = f"{node.host_path} has mode {node.mode:04o} owner {node.uid}:{node.gid}"
            return NvmlError(
                "no permission to use the GPUs",
                code=NO_PERMISSION,
                seen=f"{seen}, we are uid {os.geteuid()}",
                wanted="read and write",
                remedy="run as root or join the group, let the device cgroup have it, or look at the nvidia module's "
                "parameter NVreg_DeviceFileMode",
            )
    return NvmlError(
        "no permission to use the GPUs",
        code=NO_PERMISSION,
        seen=f"every node in {below(dev, '/dev')} is readable and writable for us",
        remedy="look at the device cgroup and at security modules (AppArmor, SELinux)",
    )


def init_failed(code: int, text: str, root: str, library: str) -> NvmlError:
    """The library was loaded and nvmlInit answered `code`; `text` is NVML's own word for it."""
    if code == DRIVER_NOT_LOADED:
        return _not_loaded(root)
    if code == NO_PERMISSION:
        return _no_permission(root)
    if code == VERSION_MISMATCH:
        real = os.path.basename(os.path.realpath(library)).partition(".so.")[2]
        module = driver_version(root)
        return NvmlError(
            "driver library and kernel module differ in version",
            code=code,
            seen=f"library {real or library}, kernel module {module or 'unknown'}"
            + (" by their files, but NVML says otherwise" if real == module else ""),
            wanted="the same version",
            remedy="reload the kernel module (rmmod nvidia; modprobe nvidia) or reboot",
        )
    if code == GPU_IS_LOST:
        return NvmlError(
            "NVML can't start, a GPU is lost",
            code=code,
            seen=text,
            remedy="find it in dmesg (Xid 79), reset the GPU or reboot the node",
        )
    return NvmlError(
        "NVML can't start",
        code=code,
        seen=f"{text} ({code})",
        remedy=f"try {below(root, '/usr/bin/nvidia-smi')}; read dmesg",
    )
