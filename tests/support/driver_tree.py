"""A small driver tree for tests: files of the right names and links, /proc and (as root) device nodes."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

VERSION = "570.86.15"
LIBRARIES = {  # name -> soname suffix
    "libcuda": "1",
    "libcudadebugger": "1",
    "libnvidia-ml": "1",
    "libnvidia-cfg": "1",
    "libnvidia-ptxjitcompiler": "1",
    "libnvidia-nvvm": "4",
    "libnvidia-encode": "1",
    "libnvcuvid": "1",
    "libnvidia-opticalflow": "1",
    "libnvidia-allocator": "1",
    "libGLX_nvidia": "0",
    "libEGL_nvidia": "0",
    "libnvidia-ngx": "1",
}
INTERNAL = ("libnvidia-glcore", "libnvidia-eglcore", "libnvidia-tls")
BINARIES = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
CONFIG = ("etc/vulkan/icd.d/nvidia_icd.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json")
UVM_MAJOR, CAPS_MAJOR, IMEX_MAJOR = 508, 509, 510


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-1111-2222-3333-{index:012x}"


def write(path: Path, text: str = "", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def libraries(folder: Path, version: str = VERSION) -> None:
    """The driver's libraries with the links that ldconfig makes."""
    for name, suffix in LIBRARIES.items():
        write(folder / f"{name}.so.{version}")
        link(folder / f"{name}.so.{suffix}", f"{name}.so.{version}")
    for name in INTERNAL:
        write(folder / f"{name}.so.{version}")
    write(folder / "vdpau" / f"libvdpau_nvidia.so.{version}")
    link(folder / "vdpau" / "libvdpau_nvidia.so.1", f"libvdpau_nvidia.so.{version}")
    write(folder / "libnvidia-egl-gbm.so.1.1.2")
    link(folder / "libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.2")


def proc(root: Path, gpus: Sequence[tuple[str, int]], version: str = VERSION) -> None:
    """/proc for GPUs given as (PCI address, minor)."""
    base = root / "proc/driver/nvidia"
    write(
        base / "version",
        f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Jan 23 2025\nGCC version:  12\n",
    )
    write(base / "params", "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n")
    (base / "gpus").mkdir(parents=True, exist_ok=True)
    for index, (address, minor) in enumerate(gpus):
        write(
            base / "gpus" / address / "information",
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\nGPU UUID: \t {uuid(index)}\n"
            f"Bus Type: \t PCIe\nBus Location: \t {address}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n",
        )
    write(
        root / "proc/devices",
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n195 nvidia-modeset\n"
        f"{UVM_MAJOR} nvidia-uvm\n{CAPS_MAJOR} nvidia-caps\n{IMEX_MAJOR} nvidia-caps-imex-channels\n"
        "\nBlock devices:\n  8 sd\n195 nvidia-not-a-char-device\n",
    )


def nodes(root: Path, minors: Sequence[int], imex: Sequence[int] = ()) -> None:
    """Device nodes; needs root."""
    wanted = {f"nvidia{minor}": (195, minor) for minor in minors}
    wanted |= {"nvidiactl": (195, 255), "nvidia-modeset": (195, 254)}
    wanted |= {"nvidia-uvm": (UVM_MAJOR, 0), "nvidia-uvm-tools": (UVM_MAJOR, 1)}
    wanted |= {f"nvidia-caps-imex-channels/channel{n}": (IMEX_MAJOR, n) for n in imex}
    for name, (major, minor) in wanted.items():
        path = root / "dev" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        path.chmod(0o666)


def mig(root: Path, gpu_minor: int, instances: Sequence[tuple[int, int]], first: int = 3) -> None:
    """MIG capabilities for (GPU instance, compute instance) pairs; minors are counted from `first`."""
    base = root / "proc/driver/nvidia/capabilities"
    lines = ["config 1", "monitor 2"]
    number = first
    for gi, ci in instances:
        for key in (f"gi{gi}", f"gi{gi}/ci{ci}"):
            write(base / f"gpu{gpu_minor}/mig/{key}/access", f"DeviceFileMinor: {number}\nDeviceFileMode: 444\n")
            lines.append(f"gpu{gpu_minor}/{key}/access {number}")
            number += 1
    write(root / "proc/driver/nvidia-caps/mig-minors", "\n".join(lines) + "\n")


def create(root: Path, count: int = 2, *, libs: str = "usr/lib/x86_64-linux-gnu", with_nodes: bool = False) -> Path:
    """A whole tree of `count` GPUs on PCI addresses 0000:19:00.0, 0000:1a:00.0 and so on; minor = index."""
    libraries(root / libs)
    for name in BINARIES:
        write(root / "usr/bin" / name, "#!/bin/sh\n", 0o755)
    for name in CONFIG:
        write(root / name, "{}\n")
    for name in ("gsp_ga10x.bin", "gsp_tu10x.bin"):
        write(root / "lib/firmware/nvidia" / VERSION / name)
    proc(root, [(f"0000:{0x19 + index:02x}:00.0", index) for index in range(count)])
    (root / "dev").mkdir(exist_ok=True)
    if with_nodes:
        nodes(root, range(count))
    return root
