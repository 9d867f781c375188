"""The driver's files under Windows' Linux subsystem: a driver store that Windows mounts, and its library folder.

Windows puts each display driver package into a folder of its own; the one that holds libcuda.so.1.1 serves CUDA.
Loaded by the programs in launch/ where there is a /dev/dxg.
"""

from __future__ import annotations

import os

from gpulet.errors import DriverNotFound
from gpulet.node.driver_files import DriverFile, DriverFiles, Missing
from gpulet.node.paths import below

STORES = "/usr/lib/wsl/drivers"
LIBRARIES = "/usr/lib/wsl/lib"
_MARK = "libcuda.so.1.1"
REQUIRED = (
    "libcuda.so.1.1",
    "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1",
    "nvcubins.bin",
    "nvidia-smi",
)


def _store(root: str) -> str:
    """The driver store with libcuda; of several the one that an adapter is said to use, else the newest."""
    try:
        names = os.listdir(below(root, STORES))
    except OSError:
        names = []
    found = []
    for name in names:
        try:
            found.append((os.stat(below(root, f"{STORES}/{name}/{_MARK}")).st_mtime, f"{STORES}/{name}"))
        except OSError:
            continue
    if len(found) < 2:
        return found[0][1] if found else ""
    from gpulet.node import dxcore  # an update leaves the old store behind; only now asking is worth its time

    used = dxcore.stores(below(root, f"{LIBRARIES}/libdxcore.so"))
    return next((path for path in used if any(path == store for _, store in found)), max(found)[1])


def _kind(name: str) -> str:
    if name == "nvidia-smi":
        return "binary"
    return "library" if ".so" in name else "config"


def find(root: str, version: str = "") -> DriverFiles:
    """libdxcore and the driver store's files; each goes to the same path in the container. Raises DriverNotFound."""
    store = _store(root)
    if not store:
        raise DriverNotFound(
            f"no NVIDIA driver store beneath {below(root, STORES)}",
            seen=f"no folder with {_MARK}",
            remedy="install NVIDIA's driver in Windows, then run: wsl --shutdown",
        )
    files = []
    if os.path.exists(below(root, f"{LIBRARIES}/libdxcore.so")):
        path = f"{LIBRARIES}/libdxcore.so"
        files.append(DriverFile(path, below(root, path), "library", soname="libdxcore.so"))
    present = sorted(os.listdir(below(root, store)))
    for name in present:
        if name in REQUIRED or ".so" in name or name.endswith((".bin", ".dll")):
            path = f"{store}/{name}"
            links = ((path, "/usr/bin/nvidia-smi"),) if name == "nvidia-smi" else ()
            soname = {"libcuda.so.1.1": "libcuda.so.1"}.get(name, name if ".so" in name else "")
            if soname and soname != name:
                links = ((name, f"{store}/{soname}"),)
            files.append(DriverFile(path, below(root, path), _kind(name), soname=soname, links=links))
    missing = [Missing(name, (store,)) for name in REQUIRED if name not in present]
    if not files or files[0].soname != "libdxcore.so":
        missing.append(Missing("libdxcore.so", (LIBRARIES,)))
    return DriverFiles(root, version, tuple(files), tuple(missing), (store,))
