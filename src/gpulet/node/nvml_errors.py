"""Why NVML did not start, told apart: which failure, with which evidence, and what to do about it; and what an error
that answers a question about a GPU says of that GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpulet.errors import NvmlError
from gpulet.node import devices
from gpulet.node.paths import below
from gpulet.node.pci import pci_gpus
from gpulet.node.procfs import driver_version, sys_root

# nvmlReturn_t, nvml.h
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND = 1, 3, 4, 9, 12
GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 15, 18, 999

# What a GPU is that answers a question with an error. A code that isn't here (timeout 10, no memory 20, no resources
# 23, not ready 27, invalid state 29, unknown 999, a later driver's) may be over with the next question: it counts when
# it comes twice.
LOST = frozenset({6, GPU_IS_LOST, 16, 28})  # off the bus (no longer found, lost) or waiting for a reset
BROKEN = LOST | {8, 11}  # there but of no use: without its external power, without interrupts
ABOUT_NVML = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH})  # none of it of a GPU
# The GPU was found; what fails is the question (its arguments 2, 7, 25, 30; not for this GPU 3, 22, 24; not in this
# driver 13, 26; not now 5, 19; no data 21; the infoROM 14, without which it computes) or who asks (4, 17).
ABOUT_THE_QUESTION = frozenset({2, NOT_SUPPORTED, NO_PERMISSION, 5, 7, 13, 14, 17, 19, 21, 22, 24, 25, 26, 30})

_FOLDERS_TOLD = 3


def told(code: int, text: str) -> str:
    """A reason in NVML's own words, with the code that `code_in` reads back."""
    return f"{text} (NVML {code})"


def code_in(reason: str) -> int:
    """NVML's code at the end of a reason as `Session.state` and `Session.watch` give it, -1 where it has none."""
    _, found, number = reason.rpartition("(NVML ")
    return int(number[:-1]) if found and number[:-1].isdigit() else -1


def library_not_found(root: str, looked: Sequence[str], why: str = "") -> NvmlError:
    """libnvidia-ml.so.1 is nowhere. looked: every path tried; why: what the loader says, where it was asked."""
    folders = [os.path.dirname(path) for path in looked]
    more = len(folders) - _FOLDERS_TOLD
    seen = "not in " + ", ".join(folders[:_FOLDERS_TOLD]) + (f" or {more} more folders" if more > 0 else "")
    module = driver_version(root)
    if module:  # /proc is the node's in a container too
        remedy = (
            f"driver {module} is loaded on this node, its library isn't here: run this container with the nvidia "
            f"RuntimeClass, or mount the driver's tree and point the driver root (now {root}) at it"
        )
    else:
        remedy = f"install the NVIDIA driver or point the driver root (now {root}) at the tree that has it"
    return NvmlError(
        "NVML library not found",
        code=LIBRARY_NOT_FOUND,
        seen=seen + (f"; {why}" if why else ""),
        wanted="libnvidia-ml.so.1",
        remedy=remedy,
    )


def library_unusable(path: str, why: str) -> NvmlError:
    """A libnvidia-ml.so.1 is there and can't be loaded; `why` is the loader's word for it."""
    return NvmlError(
        "NVML library can't be loaded",
        code=LIBRARY_NOT_FOUND,
        seen=why if path in why else f"{path}: {why}",
        remedy="install the driver's files anew",
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
