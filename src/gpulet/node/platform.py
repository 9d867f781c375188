"""What kind of node this is, and by which signs. Nothing is asked of a driver; files are looked at."""

from __future__ import annotations

import os

from gpulet.node import devices, elf
from gpulet.node.driver import library_folders
from gpulet.node.paths import below, resolve
from gpulet.node.pci import pci_gpus
from gpulet.node.procfs import DRIVER, proc_root, read_text, sys_root
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WSL_FOLDER = "/usr/lib/wsl/lib"
_INTEGRATED = ("(nvgpu)", "NVIDIA Thor")  # in the names that NVML has for GPUs that are part of a Tegra


def is_integrated(name: str) -> bool:
    """Whether NVML's name for a GPU is that of a Tegra's own."""
    return any(mark in name for mark in _INTEGRATED)


class Platform(Value):
    """kind: "discrete" (PCI GPUs with NVIDIA's driver, MIG or not), "wsl", "tegra", "vfio" (all GPUs are handed to
    virtual machines) or "none"; evidence: the signs seen, one line each; vfio: PCI addresses of GPUs that are bound to
    vfio-pci and so belong to virtual machines, never to containers.
    """

    kind: str
    evidence: tuple[str, ...] = ()
    vfio: tuple[str, ...] = ()


def _tegra_signs(root: str) -> list[str]:
    signs = []
    release = below(root, resolve(root, "/etc/nv_tegra_release"))
    if os.path.isfile(release):
        signs.append(f"{below(root, '/etc/nv_tegra_release')} is there")
    family = (read_text(below(root, "/sys/devices/soc0/family")) or "").strip()
    if family.lower().startswith("tegra"):
        signs.append(f"/sys/devices/soc0/family says {family}")
    return signs


def _wsl_signs(root: str) -> list[str]:
    signs = []
    if devices.char_device(devices.choose_dev_root(root), "/dev/dxg") is not None:
        signs.append("/dev/dxg is a device")
    if os.path.exists(below(root, f"{WSL_FOLDER}/libdxcore.so")):
        signs.append(f"{WSL_FOLDER}/libdxcore.so is there")
    return signs


def _has_nvml(root: str, folders: Iterable[str]) -> str:
    for folder in folders:
        path = f"{folder}/libnvidia-ml.so.1"
        real = below(root, resolve(root, path))
        if os.path.exists(real) and elf.bits(real) != 32:
            return path
    return ""


def detect(root: str = "/", *, gpu_names: Sequence[str] = ()) -> Platform:
    """The platform beneath a driver root. gpu_names: from NVML, where that has been asked: they tell an integrated GPU
    on a machine that has NVML too.
    """
    root = root or "/"
    wsl, tegra, nvml = _wsl_signs(root), _tegra_signs(root), _has_nvml(root, library_folders(root))
    integrated = [name for name in gpu_names if is_integrated(name)]
    bound = list(pci_gpus(sys_root(root)))
    vfio = tuple(address for address, driver in bound if driver == "vfio-pci")
    signs = [f"PCI {address} is an NVIDIA GPU, bound to {driver or 'no driver'}" for address, driver in bound]
    signs += [f"{nvml} is there"] if nvml else []
    module = os.path.isdir(below(proc_root(root), DRIVER))
    signs += [f"{below(proc_root(root), DRIVER)} is there"] if module else []
    if wsl:
        return Platform("wsl", (*wsl, *signs), vfio)
    if integrated or (tegra and not nvml):
        return Platform("tegra", (*tegra, *(f"integrated GPU {name}" for name in integrated), *signs), vfio)
    if nvml or module:
        return Platform("discrete", tuple(signs), vfio)
    if bound and len(vfio) == len(bound):
        return Platform("vfio", tuple(signs), vfio)
    return Platform("none", (*signs, "no NVML library, no kernel module"), vfio)
