"""gpulet-runtime on root file systems made to lead it astray: nothing outside the root is read into it or changed.

The cases are those of the public CVEs: links out of the root in every place that is written (CVE-2024-0134,
CVE-2025-23267), compatibility libraries that are links to the host's files (CVE-2024-0132, CVE-2025-23359), an
environment that would load the image's code into the runtime (CVE-2025-23266), the image's own ldconfig
(CVE-2024-0136).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.containers import config
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"
LIB = "usr/lib/x86_64-linux-gnu"
PLACES = (
    "etc",
    "usr",
    "usr/lib",
    LIB,
    *(f"etc/ld.so.{name}" for name in ("cache", "conf", "conf.d")),
    f"{LIB}/libcuda.so.1",
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.make(config(f"{V}=0"))
    return made


def absolute(root: Path, outside: Path, name: str) -> None:
    put(root / name, str(outside))


def climbing(root: Path, outside: Path, name: str) -> None:
    put(root / name, "../" * 30 + str(outside).lstrip("/"))


def magic(root: Path, outside: Path, name: str) -> None:
    put(root / name, "/proc/self/root" + str(outside))


def chain(root: Path, outside: Path, name: str) -> None:
    put(root / "hop", "/" + "../" * 10)
    put(root / name, "hop" + str(outside) if "/" not in name else "/hop" + str(outside))


def put(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        for item in sorted(path.rglob("*"), reverse=True):
            item.rmdir()
        path.rmdir()
    path.symlink_to(target)


def listing(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("way", [absolute, climbing, magic, chain])
@pytest.mark.parametrize(
    "name",
    ["etc", "usr", "usr/lib", LIB, "etc/ld.so.cache", "etc/ld.so.conf", "etc/ld.so.conf.d", f"{LIB}/libcuda.so.1"],
)
def test_links_out_of_the_root(machine: Machine, way: Callable[[Path, Path, str], None], name: str) -> None:
    outside = machine.folder / "outside"
    for folder in ("ld.so.conf.d", "x86_64-linux-gnu", "lib/x86_64-linux-gnu"):
        (outside / folder).mkdir(parents=True)
    (outside / "secret").write_text("secret")
    (outside / "ld.so.cache").write_text("secret")
    file = (name.startswith("etc/ld.so.c") and name != "etc/ld.so.conf.d") or name.endswith(".so.1")
    way(machine.bundle / "rootfs", outside / "secret" if file else outside, name)
    before = listing(outside)
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert listing(outside) == before
    if done.returncode:  # refusing is as good as staying inside
        assert machine.called("low") is None
        assert "internal error" not in done.stderr
    for path in (machine.bundle / "rootfs").rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"secret" not in path.read_bytes()


def test_compatibility_libraries_that_are_the_hosts_are_not_looked_at(machine: Machine) -> None:
    compat = machine.bundle / "rootfs/usr/local/cuda/compat"
    compat.mkdir(parents=True)
    secret = machine.folder / "secret.so"
    secret.write_text("secret")
    (compat / "libcuda.so.999.99.99").symlink_to(secret)
    after = machine.create(config(f"{V}=0"))
    assert "cuda/compat" not in json.dumps(after)
    conf = machine.bundle / "rootfs/etc/ld.so.conf.d"
    assert all("cuda/compat" not in path.read_text() for path in conf.iterdir())


def test_the_images_environment_and_programs_do_nothing_to_us(machine: Machine) -> None:
    rootfs = machine.bundle / "rootfs"
    trap = machine.folder / "trapped"
    for name in ("sbin/ldconfig", "usr/sbin/ldconfig", "usr/bin/nvidia-smi"):
        path = rootfs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\ntouch {trap}\n")
        path.chmod(0o755)
    (rootfs / "sitecustomize.py").write_text(f"open({str(trap)!r}, 'w')\n")
    (rootfs / "os.py").write_text(f"open({str(trap)!r}, 'w')\n")
    evil = [f"PYTHONPATH={rootfs}", f"PYTHONSTARTUP={rootfs}/os.py", "LD_PRELOAD=/proc/self/cwd/x.so", f"PATH={rootfs}"]
    machine.make(config(f"{V}=0", *evil))
    here = os.getcwd()
    os.chdir(rootfs)
    try:
        done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x", PYTHONPATH=str(rootfs))
    finally:
        os.chdir(here)
    assert done.returncode == 0, done.stderr
    assert not trap.exists()


def test_a_root_that_is_a_link_is_the_engines_own_affair_but_a_missing_one_stops(machine: Machine) -> None:
    broken = config(f"{V}=0") | {"root": {"path": "nowhere"}}
    path = machine.make(broken)
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert machine.called("low") is None
    assert json.loads(path.read_text()) == broken


def test_the_hosts_own_root_is_not_prepared(machine: Machine) -> None:
    """podman run --rootfs /: it would be the host's loader's cache."""
    before = os.stat("/etc/ld.so.cache")
    machine.make(config(f"{V}=0") | {"root": {"path": "/", "readonly": True}})
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert "the container's root is the host's own" in done.stderr
    assert (os.stat("/etc/ld.so.cache").st_mtime_ns, os.stat("/etc/ld.so.cache").st_ino) == (
        before.st_mtime_ns,
        before.st_ino,
    )


def test_two_containers_on_one_root_at_once(machine: Machine) -> None:
    """podman run --rootfs DIR, twice: neither stumbles over what the other makes."""
    bundles = [machine.folder / f"bundle{number}" for number in range(3)]
    for turn in range(8):
        root = machine.folder / f"root{turn}"
        (root / "etc").mkdir(parents=True)
        for bundle in bundles:
            bundle.mkdir(exist_ok=True)
            (bundle / "config.json").write_text(json.dumps(config(f"{V}=0") | {"root": {"path": str(root)}}))
        env = {"PATH": os.environ["PATH"], "GPULET_CONFIG": str(machine.config_file)}
        program = str(machine.folder / "bin/gpulet-runtime")
        started = [
            subprocess.Popen([program, "create", "--bundle", str(bundle), "x"], env=env, stderr=subprocess.PIPE)
            for bundle in bundles
        ]
        assert [process.communicate()[1] for process in started] == [b""] * len(bundles)
        assert (root / LIB / "libcuda.so.1").is_symlink()
        assert (root / "etc/ld.so.cache").is_file()
