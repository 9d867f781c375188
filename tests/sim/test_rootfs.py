"""Root file systems and the probe in them, run for real in namespaces of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpulet.errors import NodeError, UsageError
from gpulet.sim import node, rootfs
from gpulet.sim.tree import TRIPLET

MUSL = pytest.param("musl", marks=pytest.mark.skipif(not shutil.which("musl-gcc"), reason="needs musl-tools"))
LIBCS = ("glibc", MUSL, "none")

# As a container would be set up, but by hand: driver files and two GPUs' nodes mounted into the root file system.
ENTER = """
set -e
mount -t proc proc "$ROOTFS/proc"
mount -t tmpfs none "$ROOTFS/dev"
mkdir -p "$ROOTFS/usr/lib/$TRIPLET"
for node in nvidiactl nvidia2 nvidia5; do
    : > "$ROOTFS/dev/$node"
    mount --bind "$DRIVER/dev/$node" "$ROOTFS/dev/$node"
done
for name in libnvidia-ml.so.1 libcuda.so.1; do
    : > "$ROOTFS/usr/lib/$TRIPLET/$name"
    mount --bind "$DRIVER/usr/lib/$TRIPLET/$name" "$ROOTFS/usr/lib/$TRIPLET/$name"
    mount -o remount,bind,ro,nosuid,nodev "$ROOTFS/usr/lib/$TRIPLET/$name"
done
exec chroot "$ROOTFS" /usr/bin/gpulet-probe "$@"
"""


def _probe(root: Path, driver: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", ENTER, "sh", *arguments]
    values = {"PATH": os.environ["PATH"], "ROOTFS": str(root), "DRIVER": str(driver), "TRIPLET": TRIPLET, **environment}
    done = subprocess.run(command, env=values, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> node.SimNode:
    return node.create(tmp_path_factory.mktemp("driver") / "n", "h100x8")


@pytest.fixture(scope="module", params=LIBCS)
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, rootfs.create(tmp_path_factory.mktemp(request.param) / "r", request.param)


@pytest.mark.root
def test_the_probe_says_what_the_container_got(image: tuple[str, Path], made: node.SimNode) -> None:
    libc, root = image
    folder = f"/usr/lib/{TRIPLET}"
    got = _probe(root, made.root, "--minors", "0-7", LD_LIBRARY_PATH=folder, NVIDIA_VISIBLE_DEVICES='2,"5"')
    assert got["devices"] == ["/dev/nvidia2", "/dev/nvidia5", "/dev/nvidiactl"]
    assert got["env"] == {"NVIDIA_VISIBLE_DEVICES": '2,"5"', "CUDA_VISIBLE_DEVICES": None}
    assert (got["opened"], got["denied"]) == (list(range(8)), []), "no device cgroup here"
    flags = {one["path"]: set(one["flags"]) for one in got["files"]}
    assert {"ro", "nosuid", "nodev"} <= flags[f"{folder}/libnvidia-ml.so.1"]
    assert "rw" in flags["/dev/nvidia2"]
    if libc == "none":
        assert got["nvml"] == [] and "static" in got["nvml_error"]
        return
    assert got["nvml_error"] is None
    assert got["nvml"] == [{"uuid": made.gpus[at].uuid, "name": made.gpus[at].name} for at in (2, 5)]
    assert got["libraries"] == {name: f"{folder}/{name}" for name in ("libcuda.so.1", "libnvidia-ml.so.1")}


@pytest.mark.root
def test_without_a_driver_the_probe_says_what_the_loader_said(image: tuple[str, Path]) -> None:
    done = subprocess.run(
        ["chroot", image[1], "/usr/bin/gpulet-probe", "--minors", "3"], capture_output=True, text=True
    )
    got = json.loads(done.stdout)
    assert got["devices"] == [] and got["nvml"] == [] and got["files"] == []
    assert got["opened"] == [3]
    assert got["libraries"] == {"libcuda.so.1": None, "libnvidia-ml.so.1": None}
    assert ("libnvidia-ml.so.1" in got["nvml_error"]) == (image[0] != "none")


@pytest.mark.root
def test_a_refused_mknod_or_open_counts_as_denied(tmp_path: Path) -> None:
    """Without CAP_MKNOD the probe can't make its own node: that is what refuses it, as a cgroup would."""
    root = rootfs.create(tmp_path / "r")
    done = subprocess.run(
        ["setpriv", "--bounding-set=-mknod", "chroot", root, "/usr/bin/gpulet-probe", "--minors", "0-2"],
        capture_output=True,
        text=True,
    )
    got = json.loads(done.stdout)
    assert (got["opened"], got["denied"]) == ([], [0, 1, 2])
    assert not list((root / "tmp").iterdir())


@pytest.mark.root
def test_hold_waits_for_a_signal_even_as_first_process(image: tuple[str, Path]) -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "chroot", image[1], "/usr/bin/gpulet-probe", "--hold"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdout is not None
        json.loads(outer.stdout.readline())
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        assert outer.poll() is None
        os.kill(int(children[0]), signal.SIGTERM)
        assert outer.wait(timeout=10) == 0


@pytest.mark.root
def test_the_same_line_goes_to_a_file(image: tuple[str, Path]) -> None:
    command = ["chroot", image[1], "/usr/bin/gpulet-probe", "--json-file", "/tmp/answer"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (image[1] / "tmp/answer").read_text() == done.stdout
    bad = subprocess.run(["chroot", image[1], "/usr/bin/gpulet-probe", "--what"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (2, "")


@pytest.mark.root
def test_a_shell_and_the_loaders_cache_work(tmp_path: Path) -> None:
    root = rootfs.create(tmp_path / "r")
    done = subprocess.run(
        ["chroot", root, "/bin/sh", "-c", "ls /bin | wc -l; /sbin/ldconfig -p"], capture_output=True, text=True
    )
    assert int(done.stdout.splitlines()[0]) > 30
    assert f"libc.so.6 (libc6,x86-64) => /lib/{TRIPLET}/libc.so.6" in done.stdout
    assert (root / "etc/debian_version").exists() == Path("/etc/debian_version").exists()


def test_compatibility_libraries_are_laid_where_cuda_images_have_them(tmp_path: Path) -> None:
    root = rootfs.create(tmp_path / "r", cuda_compat="580.65.06")
    compat = root / "usr/local/cuda/compat"
    assert os.readlink(compat / "libcuda.so.1") == "libcuda.so.580.65.06"
    assert (compat / "libcuda.so").resolve() == compat / "libcuda.so.580.65.06"


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown C library: uclibc"):
        rootfs.create(tmp_path / "r", "uclibc")
    assert not (tmp_path / "r").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(NodeError, match="isn't empty"):
        rootfs.create(tmp_path / "full")
