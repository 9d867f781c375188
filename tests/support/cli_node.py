"""A driver tree of eight GPUs for gpulet-container-cli, and what NVIDIA's program lists of it, in its order."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

from gpulet.sim import description, tree

VERSION = "550.163.01"
FOLDER = "/usr/lib/x86_64-linux-gnu"
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
NUMBERS = ((195, 255), (509, 0), (509, 1), (195, 254))
BINARIES = tuple(
    f"/usr/bin/{name}"
    for name in (
        "nvidia-smi",
        "nvidia-debugdump",
        "nvidia-persistenced",
        "nv-fabricmanager",
        "nvidia-cuda-mps-control",
        "nvidia-cuda-mps-server",
    )
)
LIBRARIES = tuple(
    f"{FOLDER}/lib{name}.so.{VERSION}"
    for name in (
        *("nvidia-ml", "nvidia-cfg"),
        *("cuda", "cudadebugger", "nvidia-opencl", "nvidia-gpucomp", "nvidia-ptxjitcompiler", "nvidia-allocator"),
        *("nvidia-pkcs11-openssl3", "nvidia-nvvm"),
        "nvidia-ngx",
        *("vdpau_nvidia", "nvidia-encode", "nvidia-opticalflow", "nvcuvid"),
        *("nvidia-eglcore", "nvidia-glcore", "nvidia-tls", "nvidia-glsi", "nvidia-fbc", "nvidia-rtcore", "nvoptix"),
        *("GLX_nvidia", "EGL_nvidia", "GLESv2_nvidia", "GLESv1_CM_nvidia", "nvidia-glvkspirv"),
    )
)
SOCKETS = ("/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket", "/tmp/nvidia-mps")
FIRMWARE = tuple(f"/lib/firmware/nvidia/{VERSION}/gsp_{name}.bin" for name in ("ga10x", "tu10x"))


def uuid(index: int) -> str:
    return f"GPU-4d4f434b-0000-0000-0000-00000000000{index}"


def lay(root: Path) -> Path:
    """Lays the tree. Its devices are real nodes, so this needs root."""
    for path in (*BINARIES, *LIBRARIES, *SOCKETS[:2], *(f"/usr{file}" for file in FIRMWARE)):
        file = root / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(57) if path in LIBRARIES else b"")
        file.chmod(0o755)
    (root / SOCKETS[2][1:]).mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "var").mkdir()
    (root / "var/run").symlink_to("/run")
    (root / "dev").mkdir()
    for path, number in zip(CONTROL, NUMBERS, strict=True):
        os.mknod(root / path[1:], stat.S_IFCHR | 0o666, os.makedev(*number))
    driver = root / "proc/driver/nvidia"
    for index in range(8):
        os.mknod(root / f"dev/nvidia{index}", stat.S_IFCHR | 0o666, os.makedev(195, index))
        folder = driver / f"gpus/0000:0{index + 1}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t Mock A100\nGPU UUID: \t {uuid(index)}\nDevice Minor: \t {index}\nGPU Excluded:\t No\n"
        )
    for node in (root / "dev").iterdir():
        node.chmod(0o666)  # whatever the umask was: NVML is asked by nobody in particular
    (driver / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Tue\n")
    (driver / "params").write_text("ModifyDeviceFiles: 1\n")
    return root


def lay_nvml(root: Path) -> None:
    """Puts a libnvidia-ml there that answers for the tree's GPUs."""
    kind = description.load_profile("a100x8")
    gpus = tuple(
        replace(gpu, uuid=uuid(gpu.index), bus_id=f"00000000:0{gpu.index + 1}:00.0", name=f"Mock {gpu.name}")
        for gpu in kind.gpus
    )
    (root / FOLDER[1:] / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{VERSION}")
    tree.lay_nvml(root, replace(kind, driver=VERSION, gpus=gpus), root.parent / "control")
