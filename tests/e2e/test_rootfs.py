"""What the C library inside each kind of image makes of what the runtime prepared, on kinds of nodes that differ most.

Each container goes through gpulet-runtime as an engine would send it, and a real low-level runtime starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpulet.sim import node as sim
from gpulet.sim import rootfs
from gpulet.sim.node import SimNode
from support.real_container import Bundle, config

pytestmark = [pytest.mark.root, pytest.mark.e2e]

V, C = "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"
COMPAT = "/usr/local/cuda/compat/libcuda.so"


class Container:
    """One container of a node, from an image of one C library."""

    def __init__(self, folder: Path, node: SimNode, libc: str = "glibc") -> None:
        self.node, self.made = node, Bundle(folder, libc)
        self.settings = folder / "config.toml"
        self.settings.write_text(
            f"[nvidia-container-cli]\nroot = '{node.root}'\n[nvidia-container-runtime]\nruntimes = ['/bin/true']\n"
            f"[gpulet]\nstate-dir = '{folder}/state'\n"
        )

    def run(self, *env: str, command: tuple[str, ...] = (rootfs.PROBE,), low: str = "runc", seen: str = "") -> str:
        """What its process prints. env: asks for GPUs; low: the low-level runtime; seen: see `Bundle.run`."""
        made = config(list(command))
        made["process"]["env"] += env
        path = self.made.bundle / "config.json"
        path.write_text(json.dumps(made))
        done = subprocess.run(
            [str(self.made.programs["gpulet-runtime"]), "create", "--bundle", str(self.made.bundle), "x"],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], "GPULET_CONFIG": str(self.settings)},
        )
        assert done.returncode == 0, done.stderr
        ran = self.made.run(json.loads(path.read_text()), low, seen)
        if "RLIM_MEMLOCK" in ran.stderr:
            pytest.skip("crun can't load its own filter without CAP_SYS_RESOURCE")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def probe(self, *env: str, low: str = "runc", seen: str = "") -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.run(*env, low=low, seen=seen).splitlines()[-1])
        return told


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


@pytest.fixture(scope="module")
def rtx(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    layout = "gpu2: 1g.24gb+gfx x2, 2g.48gb-me"
    return sim.create(tmp_path_factory.mktemp("node") / "n", "rtxpro6000x8", mig=[layout])


@pytest.mark.parametrize("hierarchy", ["v1", "v2"])
@pytest.mark.parametrize("low", ["runc", "crun"])
@pytest.mark.parametrize("libc", ["glibc", "musl", "none"])
def test_images_by_runtime_and_cgroup_version(
    tmp_path: Path, node: SimNode, libc: str, low: str, hierarchy: str
) -> None:
    seen = Container(tmp_path, node, libc).probe(f"{V}=0,7", low=low, seen=hierarchy)
    gpus = [node.gpus[0], node.gpus[7]]
    assert seen["opened"] == [0, 7] and set(range(1, 7)) <= set(seen["denied"])
    if libc == "none":
        assert "/dev/nvidia7" in seen["devices"]
    else:
        assert [one["uuid"] for one in seen["nvml"]] == [gpu.uuid for gpu in gpus], seen["nvml_error"]
        assert seen["libraries"]["libcuda.so.1"].endswith("/libcuda.so.1")


@pytest.mark.parametrize(
    ("image", "wins"),
    [("580.65.06", True), ("535.54.03", False)],
    ids=["newer-than-the-driver", "older-than-the-driver"],
)
def test_the_loader_takes_forward_compatibility_libraries_where_they_are_newer(
    tmp_path: Path, node: SimNode, image: str, wins: bool
) -> None:
    container = Container(tmp_path, node)
    rootfs.add_compat(container.made.root, image)
    libraries = container.probe(f"{V}=3")["libraries"]
    assert libraries["libcuda.so.1"].startswith(COMPAT) is wins
    assert libraries["libnvidia-ml.so.1"], "which no compatibility package brings"


def test_a_mig_device_opens_its_capabilities_and_no_other(tmp_path: Path, rtx: SimNode) -> None:
    parent = rtx.gpus[2]
    for slot, mig in enumerate(parent.mig):
        folder = tmp_path / str(slot)
        folder.mkdir()
        seen = Container(folder, rtx).probe(f"{V}={parent.index}:{slot}")
        assert [one["uuid"] for one in seen["nvml"]] == [parent.uuid, mig.uuid]
        assert sum("/nvidia-caps/" in name for name in seen["devices"]) == 2
        assert seen["opened"] == [parent.minor]


def test_only_a_whole_gpu_and_a_graphics_slice_have_display_nodes(tmp_path: Path, rtx: SimNode) -> None:
    names = {mig.profile: f"2:{mig.slot}" for mig in rtx.gpus[2].mig}
    told = {}
    for kind, device in (("whole", "5"), ("graphics", names["1g.24gb+gfx"]), ("compute", names["2g.48gb-me"])):
        folder = tmp_path / kind
        folder.mkdir()
        command = ("/bin/sh", "-c", "ls /dev/dri 2>/dev/null; exit 0")
        told[kind] = Container(folder, rtx).run(f"{V}={device}", f"{C}=graphics,utility", command=command).split()
    assert told["whole"] == ["by-path", "card6", "renderD133"]
    assert told["compute"] == []
    assert told["graphics"] == ["by-path", "card3", "renderD130"]


def test_wsl_has_one_node_and_its_driver_store(tmp_path: Path) -> None:
    wsl = sim.create(tmp_path / "n", "wsl")
    (tmp_path / "c").mkdir()
    seen = Container(tmp_path / "c", wsl).probe(f"{V}=all")
    assert seen["devices"] == ["/dev/dxg"]
    assert [one["uuid"] for one in seen["nvml"]] == [wsl.gpus[0].uuid], seen["nvml_error"]
    assert seen["libraries"]["libcuda.so.1"].startswith("/usr/lib/wsl/drivers/")
