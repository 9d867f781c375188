"""The driver's files under a root: libraries that the loader takes, programs, firmware, configuration, loader cache."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpulet.errors import NodeError
from gpulet.sim import compiler, elf, files, nvmlfile
from gpulet.sim.description import Description

TRIPLET = "aarch64-linux-gnu" if elf.native_machine() == elf.EM_AARCH64 else "x86_64-linux-gnu"
TRIPLET_32 = "arm-linux-gnueabihf" if elf.native_machine() == elf.EM_AARCH64 else "i386-linux-gnu"

WSL_STORE = "usr/lib/wsl/drivers/nv_dispi.inf_amd64_0f1e2d3c4b5a6978"


def lay(root: Path, description: Description, control: Path) -> None:
    """Lay out the driver's files as the node's platform has them; what is there already is replaced."""
    _merged_usr(root)
    _PLATFORMS[description.platform](root, description, control)
    loader_cache(root)


def check_tools(platform: str) -> None:
    """NodeError where this machine lacks what laying out a node takes: a C compiler, ldconfig. Changes nothing."""
    _ldconfig()
    if platform != "tegra":
        compiler.nvml()


def nvml_paths(description: Description) -> tuple[str, ...]:
    """Where the NVML library lies under the root: every file that bears the node's description."""
    if description.platform == "wsl":
        return ("usr/lib/wsl/lib/libnvidia-ml.so.1", f"{WSL_STORE}/libnvidia-ml.so.1")
    if description.platform == "tegra":
        return ()
    return (f"usr/lib/{TRIPLET}/libnvidia-ml.so.{description.driver}",)


def lay_nvml(root: Path, description: Description, control: Path) -> None:
    """Write the NVML library anew. A container reads no control file: those that start from now on get the present
    state, those that have the old file open or mounted keep it."""
    for path in nvml_paths(description):
        _put(root / path, nvml_library(description, control))


def _lay_discrete(root: Path, description: Description, control: Path) -> None:
    version = description.driver
    _libraries(root / "usr/lib" / TRIPLET, version, 64)
    _libraries(root / "usr/lib" / TRIPLET_32, version, 32)
    lay_nvml(root, description, control)
    _graphics(root / "usr/lib" / TRIPLET, version)
    _programs(root / "usr/bin", fabric=description.fabricmanager)
    for name in files.FIRMWARE:
        _put(root / "usr/lib/firmware/nvidia" / version / name, f"simulated firmware {name} {version}\n".encode())
    for path, text in files.CONFIGURATION.items():
        _put(root / path, text.encode())
    _sockets(root, fabric=description.fabricmanager)


def _lay_wsl(root: Path, description: Description, control: Path) -> None:
    for folder in (root / "usr/lib/wsl/lib", root / WSL_STORE):
        for name, soname in files.WSL_LIBRARIES:
            _put(folder / name, elf.shared_object(soname))
        _put(folder / "nvidia-smi", compiler.build([compiler.SOURCES / "smi.c"], ("-ldl",)).read_bytes(), 0o755)
    _put(root / WSL_STORE / "nvcubins.bin", b"simulated\n")
    for name in files.WSL_HOST_LIBRARIES:
        _put(root / "usr/lib/wsl/lib" / name, elf.shared_object(name))
    adapters = max(1, len(description.gpus))  # a machine without a GPU still has a display
    _put(root / "usr/lib/wsl/lib/libdxcore.so", compiler.dxcore(adapters, f"/{WSL_STORE}").read_bytes())
    for name in ("libcuda.so.1", "libcuda.so"):
        _link("libcuda.so.1.1", root / "usr/lib/wsl/lib" / name)
    lay_nvml(root, description, control)
    _put(root / "etc/ld.so.conf.d/ld.wsl.conf", b"/usr/lib/wsl/lib\n")


def _lay_tegra(root: Path, description: Description, control: Path) -> None:
    folder = root / "usr/lib" / TRIPLET / "nvidia"
    for name, soname in files.TEGRA_LIBRARIES:
        _put(folder / name, elf.shared_object(soname))
        if soname != name:
            _link(name, folder / soname)
    _link("libcuda.so.1.1", folder / "libcuda.so")
    _put(root / f"etc/ld.so.conf.d/nvidia-tegra-{TRIPLET}.conf", f"/usr/lib/{TRIPLET}/nvidia\n".encode())
    _put(root / "etc/nv_tegra_release", b"# R36 (release), REVISION: 4.0, BOARD: generic, EABI: aarch64\n")
    _put(root / "sys/devices/soc0/family", b"Tegra\n")
    csv = root / "etc/nvidia-container-runtime/host-files-for-container.d"
    _put(csv / "devices.csv", "".join(f"dev, /dev/{name}\n" for name in files.TEGRA_DEVICES).encode())
    lines = [f"lib, /usr/lib/{TRIPLET}/nvidia/{name}" for name, _ in files.TEGRA_LIBRARIES]
    lines += [f"sym, /usr/lib/{TRIPLET}/nvidia/{name}" for name in ("libcuda.so.1", "libcuda.so")]
    _put(csv / "drivers.csv", "\n".join([*lines, ""]).encode())


_PLATFORMS: dict[str, Callable[[Path, Description, Path], None]] = {
    "discrete": _lay_discrete,
    "wsl": _lay_wsl,
    "tegra": _lay_tegra,
}


def remove(root: Path, version: str) -> None:
    """Take away what carries a driver's version in its name, as an upgrade does."""
    for folder, _, names in os.walk(root / "usr/lib"):
        for name in names:
            if name.endswith(f".so.{version}"):
                Path(folder, name).unlink()
    shutil.rmtree(root / "usr/lib/firmware/nvidia" / version, ignore_errors=True)


def nvml_library(description: Description, control: Path) -> bytes:
    """The stand-in libnvidia-ml.so.1 of one node."""
    return nvmlfile.library(compiler.nvml().read_bytes(), description, control)


def _merged_usr(root: Path) -> None:
    for name in ("lib", "bin", "sbin"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        _link(f"usr/{name}", root / name)
    for name in ("dev", "proc", "sys", "run", "tmp", "var", "etc", "lib64"):
        (root / name).mkdir(exist_ok=True)
    _link("/run", root / "var/run")


def _libraries(folder: Path, version: str, bits: int) -> None:
    for name, soname, links in files.LIBRARIES:
        if bits == 32 and name not in files.LIBRARIES_32:
            continue
        path = folder / f"{name}.so.{version}"
        tag = elf.ABI_TAG if name == "libnvidia-tls" else None
        _put(path, elf.shared_object(soname or path.name, bits=bits, abi_tag=tag))
        if soname:
            _link(path.name, path.with_name(soname))
        for link, target in links.items():
            _link(target, path.with_name(link))


def _graphics(folder: Path, version: str) -> None:
    for name, soname in (*files.OTHERS, *files.COMPANY):
        _put(folder / name, elf.shared_object(soname))
        if soname != name:
            _link(name, folder / soname)
    _link("../libnvidia-allocator.so.1", folder / "gbm/nvidia-drm_gbm.so")
    xorg = folder.parent / "xorg/modules"
    _put(xorg / "drivers/nvidia_drv.so", elf.shared_object("nvidia_drv.so"))
    server = xorg / f"extensions/libglxserver_nvidia.so.{version}"
    _put(server, elf.shared_object(server.name))
    _link(server.name, server.with_name("libglxserver_nvidia.so"))


def _programs(folder: Path, *, fabric: bool) -> None:
    for name, source in files.PROGRAMS.items():
        built = compiler.build([compiler.SOURCES / source], ("-ldl",))
        _put(folder / name, built.read_bytes(), 0o755)
    for name in (*files.SCRIPTS, *([files.FABRIC_SCRIPT] if fabric else [])):
        _put(folder / name, f"#!/bin/sh\necho 'simulated {name}'\n".encode(), 0o755)


def _sockets(root: Path, *, fabric: bool) -> None:
    for service in ("nvidia-persistenced", *(["nvidia-fabricmanager"] if fabric else [])):
        path = root / "run" / service / "socket"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            continue
        # bind() takes short paths only: name it by its folder's descriptor
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(f"/proc/self/fd/{folder}/socket")
        finally:
            os.close(folder)


@functools.cache
def _ldconfig() -> str:
    found = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if not found:
        raise NodeError("no ldconfig on this machine", wanted="glibc's ldconfig", remedy="install libc-bin")
    return found


def loader_cache(root: Path) -> None:
    """Write etc/ld.so.conf and etc/ld.so.cache for the libraries under a root. NodeError where ldconfig fails."""
    _put(root / "etc/ld.so.conf", b"include /etc/ld.so.conf.d/*.conf\n")
    for triplet in (TRIPLET, TRIPLET_32):
        text = f"/usr/local/lib/{triplet}\n/lib/{triplet}\n/usr/lib/{triplet}\n/usr/lib/{triplet}/vdpau\n"
        _put(root / f"etc/ld.so.conf.d/{triplet}.conf", text.encode())
    done = subprocess.run([_ldconfig(), "-X", "-r", str(root)], capture_output=True, text=True)
    cache = root / "etc/ld.so.cache"
    if done.returncode or not cache.exists():
        raise NodeError(f"ldconfig -r {root} failed", seen=done.stderr.strip() or f"exit code {done.returncode}")


def _put(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file aside and rename it: whoever has the old one open, or mapped, or mounted, keeps it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_bytes(content)
    aside.chmod(mode)
    aside.rename(path)


def _link(target: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if os.readlink(path) == target:
            return
        path.unlink()
    path.symlink_to(target)
