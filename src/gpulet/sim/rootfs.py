"""Small root file systems for containers, made of what this machine has: busybox, a C library and the probe."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gpulet.errors import NodeError, UsageError
from gpulet.sim import compiler
from gpulet.sim.tree import TRIPLET
from gpulet.sim.workplace import whole

PROBE = "/usr/bin/gpulet-probe"
FOLDERS = (
    "bin",
    "dev",
    "etc",
    "home",
    "lib",
    "lib64",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "tmp",
    "usr/bin",
    "usr/lib",
    "var",
)
LIBC_PARTS = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
# fmt: off
APPLETS = (
    "sh", "cat", "chmod", "cp", "cut", "date", "echo", "env", "false", "find", "grep", "head", "id", "kill", "ln",
    "ls", "mkdir", "mknod", "mount", "mv", "ps", "pwd", "readlink", "rm", "sed", "sleep", "sort", "stat", "tail",
    "test", "touch", "tr", "true", "umount", "uname", "wc",
)
# fmt: on
MUSL_LOADER = f"ld-musl-{platform.machine()}.so.1"


def create(folder: Path, libc: str = "glibc", *, cuda_compat: str | None = None) -> Path:
    """Make a root file system in `folder` (new or empty) and return it.

    libc: "glibc" (this machine's), "musl" (Debian's package musl) or "none" (nothing but static programs).
    cuda_compat: a driver version; the image then has forward-compatibility libraries of it in /usr/local/cuda/compat.
    UsageError for another libc; NodeError where the machine lacks a part.
    """
    makers = {"glibc": _glibc, "musl": _musl, "none": _none}
    if libc not in makers:
        raise UsageError("unknown C library", seen=libc, wanted=", ".join(makers))
    folder = Path(folder).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise NodeError(f"{folder} isn't empty", remedy="choose another folder")
    with whole(folder):
        for name in FOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        _busybox(folder)
        _accounts(folder, libc)
        makers[libc](folder)
        if cuda_compat:
            add_compat(folder, cuda_compat)
    return folder


def _busybox(folder: Path) -> None:
    busybox = shutil.which("busybox", path="/bin:/usr/bin:/usr/local/bin")
    if not busybox:
        raise NodeError("no busybox on this machine", wanted="a static busybox", remedy="apt install busybox-static")
    shutil.copy2(busybox, folder / "bin/busybox")
    for applet in APPLETS:
        (folder / "bin" / applet).symlink_to("busybox")


def _accounts(folder: Path, libc: str) -> None:
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (folder / "etc/group").write_text("root:x:0:\nvideo:x:44:\nnogroup:x:65534:\n")
    (folder / "etc/os-release").write_text(f'ID=gpulet-{libc}\nNAME="gpulet test image ({libc})"\nVERSION_ID=1\n')
    (folder / "etc/hostname").write_text("gpulet\n")


def _glibc(folder: Path) -> None:
    for name, source in _glibc_files():
        target = folder / name.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    debian = Path("/etc/debian_version")
    if debian.exists():
        shutil.copy2(debian, folder / "etc/debian_version")
    (folder / "etc/ld.so.conf.d").mkdir()
    (folder / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    (folder / f"etc/ld.so.conf.d/{TRIPLET}.conf").write_text(f"/lib/{TRIPLET}\n/usr/lib/{TRIPLET}\n")
    (folder / "usr/lib" / TRIPLET).mkdir(parents=True, exist_ok=True)
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    if not ldconfig:
        raise NodeError("no ldconfig on this machine", remedy="install libc-bin")
    # Ubuntu's ldconfig is a shell script around ldconfig.real
    real = Path(f"{ldconfig}.real")
    shutil.copy2(real if real.exists() else ldconfig, folder / "sbin/ldconfig")
    done = subprocess.run([ldconfig, "-X", "-r", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise NodeError(f"ldconfig -r {folder} failed", seen=done.stderr.strip())
    _install(folder, compiler.build([compiler.SOURCES / "probe.c"], ("-ldl",)))


def _glibc_files() -> Iterable[tuple[str, Path]]:
    """glibc's loader and libraries: the path that programs ask for, and the file here."""
    loader = "/lib64/ld-linux-x86-64.so.2" if platform.machine() == "x86_64" else "/lib/ld-linux-aarch64.so.1"
    yield loader, Path(loader).resolve()
    for name in LIBC_PARTS:
        for base in (f"/lib/{TRIPLET}", f"/usr/lib/{TRIPLET}", "/lib64", "/usr/lib64"):
            path = Path(base, name)
            if path.exists():
                yield f"/lib/{TRIPLET}/{name}", path.resolve()
                break
        else:
            raise NodeError(f"this machine has no {name}", wanted="glibc's libraries")


def _musl(folder: Path) -> None:
    loader = Path("/lib") / MUSL_LOADER
    if not loader.exists():
        raise NodeError("musl isn't installed here", remedy="apt install musl musl-tools")
    shutil.copy2(loader.resolve(), folder / "lib" / MUSL_LOADER)
    (folder / f"lib/libc.musl-{platform.machine()}.so.1").symlink_to(MUSL_LOADER)
    (folder / "etc/alpine-release").write_text("3.20.0\n")
    musl_gcc = shutil.which("musl-gcc")
    if not musl_gcc:
        raise NodeError("no musl-gcc on this machine", wanted="a compiler for musl", remedy="apt install musl-tools")
    _install(folder, compiler.build([compiler.SOURCES / "probe.c"], cc=musl_gcc))


def _none(folder: Path) -> None:
    _install(folder, compiler.build([compiler.SOURCES / "probe.c"], ("-static", "-DSTATIC")))


def _install(folder: Path, probe: Path) -> None:
    target = folder / PROBE.lstrip("/")
    shutil.copy2(probe, target)
    os.chmod(target, 0o755)


def add_compat(folder: Path, driver: str) -> None:
    """Put CUDA's forward-compatibility libraries of a driver version into a root file system, where its images have
    them."""
    from gpulet.sim import elf

    compat = folder / "usr/local/cuda/compat"
    compat.mkdir(parents=True)
    for name, number in (
        ("libcuda", 1),
        ("libnvidia-ptxjitcompiler", 1),
        ("libcudadebugger", 1),
        ("libnvidia-nvvm", 4),
    ):
        path = compat / f"{name}.so.{driver}"
        path.write_bytes(elf.shared_object(f"{name}.so.{number}"))
        (compat / f"{name}.so.{number}").symlink_to(path.name)
    (compat / "libcuda.so").symlink_to("libcuda.so.1")
