"""The kinds of specs beside plain GPUs; what engines can read; whether a spec still fits; a spec's root changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpulet.errors import CdiError, DriverNotFound, UsageError
from gpulet.injection import build, cdi, cdi_fingerprint, cdi_modes, cdi_rules, cdi_targets, cdi_transform, csv_files
from gpulet.node import driver, procfs
from gpulet.node.driver_files import lacking
from gpulet.node.gpu import CharDevice, Gpu, MigDevice, NodeFacts
from gpulet.request.model import Request
from support import driver_tree as tree

LIB = "/usr/lib/x86_64-linux-gnu"


def device(path: str, major: int = 240, minor: int = 0, mode: int = 0o666, gid: int = 0) -> CharDevice:
    return CharDevice(path, path, major, minor, mode, 0, gid)


def paths(edits: dict[str, Any]) -> list[str]:
    return [node["path"] for node in edits.get("deviceNodes", ())]


# -- devices that must be asked for --

GATED = NodeFacts(
    (Gpu(0, 0, "GPU-a", "00000000:19:00.0"),),
    "nvml",
    nodes=tuple(
        device(path)
        for path in (
            "/dev/gdrdrv", "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0", "/dev/nvidia-fs0",
            "/dev/nvidia-nvlink", "/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitchctl", "/dev/nvidia0", "/dev/nvidiactl",
        )
    ),
    imex=(3,),
    majors=(("nvidia-caps-imex-channels", 510),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gds", ["/dev/nvidia-fs0"]),
        ("mofed", ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"]),
        ("gdrcopy", ["/dev/gdrdrv"]),
        ("nvswitch", ["/dev/nvidia-nvswitch0", "/dev/nvidia-nvswitchctl"]),
    ],
)
def test_gated_specs(name: str, wanted: list[str]) -> None:
    spec = cdi_modes.gated_spec(GATED, name)
    assert spec["kind"] == f"nvidia.com/{name}"
    (only,) = spec["devices"]
    assert only["name"] == "all" and paths(only["containerEdits"]) == wanted
    assert spec["containerEdits"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    with pytest.raises(CdiError, match="kernel module"):
        cdi_modes.gated_spec(GATED.replace(nodes=()), name)


def test_gds_brings_its_files_as_far_as_they_are_there(tmp_path: Path) -> None:
    def mounts() -> list[str]:
        (only,) = cdi_modes.gated_spec(GATED, "gds", root=str(tmp_path))["devices"]
        return [mount["containerPath"] for mount in only["containerEdits"].get("mounts", ())]

    assert mounts() == []
    (tmp_path / "run/udev").mkdir(parents=True)
    assert mounts() == ["/run/udev"]
    tree.write(tmp_path / "etc/cufile.json")
    assert mounts() == ["/etc/cufile.json", "/run/udev"]


def test_management_has_every_node_of_the_driver_and_leaves_node_making_alone(tmp_path: Path) -> None:
    files = driver.find(str(tree.create(tmp_path)))
    spec = cdi_modes.management_spec(GATED, files)
    assert spec["kind"] == "management.nvidia.com/gpu"
    (only,) = spec["devices"]
    wanted = ["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-caps-imex-channels/channel3"]
    assert paths(only["containerEdits"]) == wanted
    (hook,) = spec["containerEdits"]["hooks"]
    assert "--freeze-device-nodes" not in hook["args"] and "--link" in hook["args"]
    mounts = [mount["containerPath"] for mount in spec["containerEdits"]["mounts"]]
    assert f"{LIB}/libcuda.so.{tree.VERSION}" in mounts and "/usr/bin/nvidia-smi" in mounts
    assert not [path for path in mounts if path.endswith(".json") or "libnvidia-egl-" in path]  # only for drawing


# -- WSL --


def wsl_tree(root: Path, *stores: str) -> Path:
    tree.write(root / "usr/lib/wsl/lib/libdxcore.so")
    for age, name in enumerate(stores):
        for file in ("libcuda.so.1.1", "libnvidia-ml.so.1", "nvidia-smi", "nvcubins.bin", "extra.txt"):
            tree.write(root / "usr/lib/wsl/drivers" / name / file)
        os.utime(root / "usr/lib/wsl/drivers" / name / "libcuda.so.1.1", (age + 1, age + 1))
    (root / "dev").mkdir()
    os.mknod(root / "dev/dxg", stat.S_IFCHR | 0o666, os.makedev(10, 125))
    return root


@pytest.mark.root
def test_wsl_has_one_device_and_the_newest_driver_store(tmp_path: Path) -> None:
    root = str(wsl_tree(tmp_path, "nv_old", "nv_new"))
    facts, files = procfs.facts(root), driver.find(root)
    store = "/usr/lib/wsl/drivers/nv_new"
    names = ["libcuda.so.1.1", "libnvidia-ml.so.1", "nvcubins.bin", "nvidia-smi"]
    assert [file.path for file in files.files] == [
        "/usr/lib/wsl/lib/libdxcore.so",
        *(f"{store}/{name}" for name in names),
    ]
    assert "libnvdxgdmal.so.1" in [missing.name for missing in files.missing]
    assert lacking(files, ("compute", "utility", "video")) == ()  # no file is of one capability there
    spec = cdi_modes.wsl_spec(facts, files)
    (only,) = spec["devices"]
    assert only["name"] == "all" and paths(only["containerEdits"]) == ["/dev/dxg"]
    (hook,) = spec["containerEdits"]["hooks"]
    assert f"{store}/nvidia-smi::/usr/bin/nvidia-smi" in hook["args"]
    assert f"libcuda.so.1.1::{store}/libcuda.so.1" in hook["args"]
    assert not {"--freeze-device-nodes", "--host-driver-version", "--application-profile"} & set(hook["args"])


@pytest.mark.root
def test_on_wsl_every_request_means_the_one_node(tmp_path: Path) -> None:
    root = str(wsl_tree(tmp_path, "nv"))
    request = Request("environment", ("0",), capabilities=("compute", "utility"))
    injection = build.build(procfs.facts(root), driver.find(root), request)
    assert [node.path for node in injection.devices] == ["/dev/dxg"]
    assert len(injection.mounts) == 5


@pytest.mark.root
def test_wsl_without_a_driver_store_says_where_to_install_it(tmp_path: Path) -> None:
    with pytest.raises(DriverNotFound, match="in Windows"):
        driver.find(str(wsl_tree(tmp_path)))


# -- Tegra --


def test_lines_of_the_lists() -> None:
    text = (
        "dev, /dev/nvmap\n lib , /usr/lib/libx.so.1\n# no\n\ndev /dev/bad\nfoo, /x\nsym,relative\ndir, /lib/firmware\n"
    )
    for mark in ("", "\ufeff"):
        rows = [("dev", "/dev/nvmap"), ("lib", "/usr/lib/libx.so.1"), ("dir", "/lib/firmware")]
        assert csv_files.parse(mark + text) == rows


@pytest.mark.root
def test_tegra_lists_become_nodes_mounts_and_links(tmp_path: Path) -> None:
    os.makedirs(tmp_path / "dev")
    os.mknod(tmp_path / "dev/nvmap", stat.S_IFCHR | 0o660, os.makedev(10, 60))
    tree.write(tmp_path / f"{LIB[1:]}/tegra/libcuda.so.1.1")
    tree.link(tmp_path / f"{LIB[1:]}/tegra/libcuda.so.1", "libcuda.so.1.1")
    tree.link(tmp_path / f"{LIB[1:]}/libcuda.so", f"{LIB}/tegra/libcuda.so.1")
    tree.link(tmp_path / f"{LIB[1:]}/libskip.so", f"{LIB}/tegra/libcuda.so.1.1")
    tree.write(tmp_path / "lib/firmware/tegra/x.bin")
    tree.write(tmp_path / "etc/nv_tegra_release", "# R36")
    rows = [
        ("dev", "/dev/nvmap"), ("dev", "/dev/absent"), ("lib", f"{LIB}/tegra/libcuda.so.1"),
        ("lib", "/usr/lib/absent.so"), ("sym", f"{LIB}/libcuda.so"),
        ("sym", f"{LIB}/libskip.so"), ("dir", "/lib/firmware/tegra"),
    ]  # fmt: skip
    found = csv_files.injection(rows, str(tmp_path), ignore=["**/libskip.so"], cuda="12.6")
    assert [node.path for node in found.devices] == ["/dev/nvmap"]
    wanted = {f"{LIB}/tegra/libcuda.so.1.1", "/lib/firmware/tegra", "/etc/nv_tegra_release"}
    assert {mount.path for mount in found.mounts} == wanted
    assert {(link.target, link.path) for link in found.rootfs.links} == {
        ("libcuda.so.1.1", f"{LIB}/tegra/libcuda.so.1"),
        (f"{LIB}/tegra/libcuda.so.1", f"{LIB}/libcuda.so"),
    }
    assert (found.rootfs.folders, found.rootfs.host_cuda) == ((f"{LIB}/tegra",), "12.6")
    spec = csv_files.spec(found)
    assert [item["name"] for item in spec["devices"]] == ["0", "all"]
    with pytest.raises(CdiError, match="no device node"):
        csv_files.spec(found.replace(devices=()))


# -- what engines read --


@pytest.mark.parametrize(
    ("target", "highest"),
    [("podman=4.2", "0.4.0"), ("podman=4.9.3", "0.6.0"), ("containerd=1.7", "0.5.0"), ("cri-o=1.28", "0.5.0"),
     ("docker=28.3.1", "0.8.0"), ("docker=27.0.3", "0.7.0"), ("containerd=2.3", "1.1.0"),
     ("podman=6", "0.8.0"), ("0.5.0", "0.5.0"), ("v1.0.0", "1.0.0")],
)  # fmt: skip
def test_limits(target: str, highest: str) -> None:
    assert cdi_targets.limit(target) == highest


@pytest.mark.parametrize("target", ["podman", "podman=", "podman=x.y", "lxc=1.0", "0.9.0", "podman=3.4", ""])
def test_targets_that_are_none(target: str) -> None:
    with pytest.raises(UsageError):
        cdi_targets.limit(target)


def test_every_row_names_a_version_that_exists_and_engines_only_learn() -> None:
    for rows in cdi_targets.ENGINES.values():
        assert rows == tuple(sorted(rows))
        versions = [cdi_rules.parse_version(cdi) for _since, cdi in rows]
        assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    ("engine", "folders"),
    [("podman", 2), ("podman=5.4.2", 2), ("podman=5.5.1", 1), ("podman=5.6", 2), ("docker=5.5", 2), ("cri-o", 2)],
)
def test_folders_that_engines_scan(engine: str, folders: int) -> None:
    assert cdi_targets.folders(engine) == ("/etc/cdi", "/var/run/cdi")[:folders]


def test_what_is_above_a_limit() -> None:
    edits = {"deviceNodes": [{"path": "/dev/x", "hostPath": "/y"}], "additionalGids": [4]}
    spec = {"cdiVersion": "0.7.0", "kind": "a/b", "devices": [{"name": "0", "containerEdits": edits}]}
    assert cdi_targets.above(spec, "0.7.0") == []
    assert cdi_targets.above(spec, "0.5.0") == ["additionalGids (needs 0.7.0)"]
    assert len(cdi_targets.above(spec, "0.4.0")) == 3


# -- does a spec still fit --


@pytest.mark.root
def test_a_fresh_spec_fits_and_each_change_of_the_node_is_seen(tmp_path: Path) -> None:
    root = tree.create(tmp_path, 2, with_nodes=True)
    facts, files = procfs.facts(str(root)), driver.find(str(root))
    stamp = cdi_fingerprint.fingerprint(facts)
    spec = cdi.make_spec(facts, files, annotations=stamp, calls=cdi.HookCalls("/bin/true"))
    assert cdi_fingerprint.problems(spec, facts) == []
    upgraded = facts.replace(driver="580.1.2")
    assert cdi_fingerprint.problems(spec, upgraded) == ["made for driver '570.86.15', the node has '580.1.2'"]
    mig = MigDevice("", 0, 0, 0, 1, 0)
    split = facts.replace(gpus=(facts.gpus[0].replace(mig=(mig,)), facts.gpus[1]))
    assert cdi_fingerprint.problems(spec, split) == ["made for mig 'none', the node has '0:1/0'"]
    assert "made for gpus" in cdi_fingerprint.problems(spec, facts.replace(gpus=facts.gpus[:1]))[0]
    (root / LIB[1:] / f"libcuda.so.{tree.VERSION}").unlink()
    (root / "dev/nvidia1").unlink()
    found = cdi_fingerprint.problems(spec, facts)
    assert f"mount of {root}{LIB}/libcuda.so.{tree.VERSION}: no such file" in found
    assert any(line.startswith(f"device node {root}/dev/nvidia1:") for line in found)


@pytest.mark.root
def test_a_wrong_major_of_anothers_spec_is_seen(tmp_path: Path) -> None:
    os.mknod(tmp_path / "uvm", stat.S_IFCHR | 0o666, os.makedev(509, 0))
    node = {"path": "/dev/nvidia-uvm", "hostPath": str(tmp_path / "uvm"), "major": 510}
    spec = {"cdiVersion": "0.5.0", "kind": "a/b", "devices": [{"name": "x", "containerEdits": {"deviceNodes": [node]}}]}
    assert cdi_fingerprint.problems(spec) == [f"device node {tmp_path}/uvm is 509:0, the spec says 510:0"]
    node["major"] = 509
    assert cdi_fingerprint.problems(spec) == []


# -- another root --

SPEC: dict[str, Any] = {
    "cdiVersion": "0.3.0",
    "kind": "a/b",
    "devices": [
        {"name": "x", "containerEdits": {"deviceNodes": [{"path": "/dev/x"}, {"path": "/y", "hostPath": "/rooty"}]}}
    ],
    "containerEdits": {
        "mounts": [
            {"hostPath": "/root/lib/a", "containerPath": "/lib/a"},
            {"hostPath": "/rootless", "containerPath": "/b"},
        ],
        "hooks": [
            {"hookName": "createContainer", "path": "/root/h", "args": ["h", "--link", "/root/t::/lib/l"]},
            {"hookName": "startContainer", "path": "/root/inside"},
            {"hookName": "poststop", "path": "/usr/h", "args": ["/root", "/root/a::/b"]},
        ],
    },
}


def test_host_paths_below_a_root_move_and_nothing_else() -> None:
    moved = cdi_transform.change_root(SPEC, "/root", "/host/driver/")
    edits = moved["containerEdits"]
    assert [mount["hostPath"] for mount in edits["mounts"]] == ["/host/driver/lib/a", "/rootless"]
    assert [hook["path"] for hook in edits["hooks"]] == ["/host/driver/h", "/root/inside", "/usr/h"]
    assert edits["hooks"][0]["args"][-1] == "/root/t::/lib/l"
    assert edits["hooks"][2]["args"] == ["/host/driver", "/host/driver/a::/b"]
    assert moved["cdiVersion"] == "0.5.0"  # because of the hostPath that was there
    cdi.check(moved)


def test_container_paths_move() -> None:
    moved = cdi_transform.change_root(SPEC, "/lib", "/usr/lib", relative_to="container")
    assert moved["containerEdits"]["mounts"][0] == {"hostPath": "/root/lib/a", "containerPath": "/usr/lib/a"}
    assert moved["containerEdits"]["hooks"][0]["args"][-1] == "/root/t::/usr/lib/l"
    nodes = cdi_transform.change_root(SPEC, "/dev", "/devices", relative_to="container")["devices"][0]["containerEdits"]
    assert nodes["deviceNodes"][0] == {"path": "/devices/x", "hostPath": "/dev/x"}


def test_there_and_back_again_and_the_original_untouched() -> None:
    before = repr(SPEC)
    there = cdi_transform.change_root(SPEC, "/root", "/elsewhere")
    back = cdi_transform.change_root(there, "/elsewhere", "/root")
    assert back == {**SPEC, "cdiVersion": "0.5.0"}
    assert repr(SPEC) == before
    with pytest.raises(UsageError, match="host or container"):
        cdi_transform.change_root(SPEC, "/a", "/b", relative_to="both")
