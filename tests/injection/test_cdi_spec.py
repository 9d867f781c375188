"""CDI specs out of facts and driver files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpulet.errors import CdiError
from gpulet.injection import build, cdi
from gpulet.node import driver, procfs
from gpulet.node.driver import DriverFiles
from gpulet.node.gpu import CharDevice, Gpu, MigDevice, NodeFacts
from gpulet.request.model import Request
from support import driver_tree as tree

LIB = "/usr/lib/x86_64-linux-gnu"
H100 = "550.163.01"
# What NVIDIA's own generator puts in for eight H100 on a tree with these files: soname suffix of each library.
H100_LIBRARIES = {
    "libEGL_nvidia": 0, "libGLESv1_CM_nvidia": 1, "libGLESv2_nvidia": 2, "libGLX_nvidia": 0, "libcuda": 1,
    "libcudadebugger": 1, "libnvcuvid": 1, "libnvidia-allocator": 1, "libnvidia-cfg": 1, "libnvidia-eglcore": 0,
    "libnvidia-encode": 1, "libnvidia-fbc": 1, "libnvidia-glcore": 0, "libnvidia-glsi": 0, "libnvidia-glvkspirv": 0,
    "libnvidia-gpucomp": 0, "libnvidia-gtk3": 0, "libnvidia-ml": 1, "libnvidia-ngx": 1, "libnvidia-nvvm": 4,
    "libnvidia-opencl": 1, "libnvidia-opticalflow": 1, "libnvidia-pkcs11": 1, "libnvidia-ptxjitcompiler": 1,
    "libnvidia-rtcore": 0, "libnvidia-tls": 0, "libnvidia-wayland-client": 0, "libnvoptix": 1,
}  # fmt: skip
H100_BINARIES = (
    "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-debugdump", "nvidia-imex", "nvidia-imex-ctl",
    "nvidia-persistenced", "nvidia-smi",
)  # fmt: skip
H100_OTHERS = (
    f"/lib/firmware/nvidia/{H100}/gsp_ga10x.bin",
    f"/lib/firmware/nvidia/{H100}/gsp_tu10x.bin",
    "/etc/vulkan/icd.d/nvidia_icd.json",
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
)


def h100(root: Path) -> tuple[NodeFacts, DriverFiles]:
    for name, suffix in H100_LIBRARIES.items():
        tree.write(root / LIB[1:] / f"{name}.so.{H100}")
        tree.link(root / LIB[1:] / f"{name}.so.{suffix}", f"{name}.so.{H100}")
    tree.link(root / LIB[1:] / "libcuda.so", "libcuda.so.1")
    for name in H100_BINARIES:
        tree.write(root / "usr/bin" / name, mode=0o755)
    for path in H100_OTHERS:
        tree.write(root / path[1:])

    def node(name: str, major: int, minor: int) -> CharDevice:
        return CharDevice(f"/dev/{name}", f"{root}/dev/{name}", major, minor)

    nodes = [node(f"nvidia{index}", 195, index) for index in range(8)]
    nodes += [node("nvidiactl", 195, 255), node("nvidia-modeset", 195, 254)]
    nodes += [node("nvidia-uvm", 508, 0), node("nvidia-uvm-tools", 508, 1)]
    gpus = tuple(Gpu(index, index, tree.uuid(index), f"00000000:{index + 1:02x}:00.0") for index in range(8))
    facts = NodeFacts(gpus, "nvml", driver=H100, nodes=tuple(nodes), dev_root=str(root))
    return facts, driver.find(str(root), version=H100)


def hook_options(edits: dict[str, object], option: str) -> list[str]:
    (hook,) = edits["hooks"]  # type: ignore[misc]
    args = hook["args"]
    return [args[at + 1] for at, word in enumerate(args) if word == option]


def test_the_same_meaning_as_the_peers_spec_on_the_same_tree(tmp_path: Path) -> None:
    spec = cdi.make_spec(*h100(tmp_path))
    common = spec["containerEdits"]
    assert spec["cdiVersion"] == "0.5.0" and spec["kind"] == "nvidia.com/gpu"
    uuids = [tree.uuid(index) for index in range(8)]
    assert [device["name"] for device in spec["devices"]] == [*map(str, range(8)), *uuids, "all"]
    libraries = {f"{LIB}/{name}.so.{H100}" for name in H100_LIBRARIES}
    wanted = libraries | {f"/usr/bin/{name}" for name in H100_BINARIES} | set(H100_OTHERS)
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    assert {mount["containerPath"] for mount in common["mounts"]} == wanted
    assert all(mount["hostPath"] == f"{tmp_path}{mount['containerPath']}" for mount in common["mounts"])
    assert all(mount["options"] == options for mount in common["mounts"])
    links = {f"{name}.so.{H100}::{LIB}/{name}.so.{suffix}" for name, suffix in H100_LIBRARIES.items()}
    links |= {
        f"libcuda.so.1::{LIB}/libcuda.so",
        f"libGLX_nvidia.so.{H100}::{LIB}/libGLX_indirect.so.0",
        f"libnvidia-opticalflow.so.1::{LIB}/libnvidia-opticalflow.so",
        f"../libnvidia-allocator.so.1::{LIB}/gbm/nvidia-drm_gbm.so",
    }
    assert set(hook_options(common, "--link")) == links
    assert hook_options(common, "--folder") == [LIB]
    assert hook_options(common, "--host-driver-version") == [H100]
    assert common["env"] == [f"NVIDIA_CTK_LIBCUDA_DIR={LIB}", "NVIDIA_VISIBLE_DEVICES=void"]
    control = ["nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"]
    assert [node["path"] for node in common["deviceNodes"]] == [f"/dev/{name}" for name in control]
    every = spec["devices"][-1]["containerEdits"]["deviceNodes"]
    assert [(node["path"], node["hostPath"], node["major"], node["minor"]) for node in every] == [
        (f"/dev/nvidia{index}", f"{tmp_path}/dev/nvidia{index}", 195, index) for index in range(8)
    ]


def test_one_hook_for_everything_and_an_environment_of_its_own(tmp_path: Path) -> None:
    spec = cdi.make_spec(*h100(tmp_path), calls=cdi.HookCalls("/opt/bin/gpulet-cdi-hook"))
    (hook,) = spec["containerEdits"]["hooks"]
    assert (hook["hookName"], hook["path"], hook["args"][:2]) == (
        "createContainer", "/opt/bin/gpulet-cdi-hook", ["gpulet-cdi-hook", "prepare"],
    )  # fmt: skip
    assert hook["env"] == ["GPULET_HOOK=1"]
    assert {"--freeze-device-nodes", "--application-profile"} <= set(hook["args"])
    assert not any("hooks" in device["containerEdits"] for device in spec["devices"])


def test_byte_identical_from_run_to_run_in_both_formats(tmp_path: Path) -> None:
    facts, files = h100(tmp_path)
    for form in ("json", "yaml"):
        texts = {cdi.to_text(cdi.make_spec(facts, files.replace(files=files.files)), form) for _ in range(20)}
        assert len(texts) == 1


def test_numbers_that_change_with_the_boot_are_not_frozen(tmp_path: Path) -> None:
    nodes = {node["path"]: node for node in cdi.make_spec(*h100(tmp_path))["containerEdits"]["deviceNodes"]}
    assert "major" not in nodes["/dev/nvidia-uvm"]
    assert nodes["/dev/nvidiactl"]["major"] == 195


def test_no_host_path_where_it_is_the_path(tmp_path: Path) -> None:
    facts, files = h100(tmp_path)
    nodes = tuple(node.replace(host_path=node.path) for node in facts.nodes)
    spec = cdi.make_spec(facts.replace(nodes=nodes, dev_root="/"), files, names=["uuid"])
    assert "hostPath" not in json.dumps([device["containerEdits"] for device in spec["devices"]])
    assert spec["cdiVersion"] == "0.3.0"


def test_driver_root_and_dev_root_as_the_host_has_them(tmp_path: Path) -> None:
    """The program sees the tree in one place, the host has it in another; device nodes are the host's own."""
    facts, files = h100(tmp_path)
    spec = cdi.make_spec(facts, files, host_root="/host/driver", host_dev_root="/")
    mounts = {mount["containerPath"]: mount["hostPath"] for mount in spec["containerEdits"]["mounts"]}
    assert mounts[f"{LIB}/libcuda.so.{H100}"] == f"/host/driver{LIB}/libcuda.so.{H100}"
    node = spec["devices"][0]["containerEdits"]["deviceNodes"][0]
    assert node["path"] == "/dev/nvidia0" and "hostPath" not in node


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["index"], ["0", "all"]),
        (["uuid"], [tree.uuid(0), "all"]),
        (["type-index"], ["all", "gpu0"]),
        (["index", "type-index", "uuid"], ["0", tree.uuid(0), "all", "gpu0"]),
    ],
)
def test_names(tmp_path: Path, names: list[str], wanted: list[str]) -> None:
    facts, files = h100(tmp_path)
    spec = cdi.make_spec(facts.replace(gpus=facts.gpus[:1]), files, names=names)
    assert [device["name"] for device in spec["devices"]] == wanted


def test_unknown_naming_and_no_devices_are_refused(tmp_path: Path) -> None:
    facts, files = h100(tmp_path)
    with pytest.raises(CdiError, match="index, uuid, type-index"):
        cdi.make_spec(facts, files, names=["name"])
    with pytest.raises(CdiError, match="nothing to put"):
        cdi.make_spec(facts.replace(gpus=()), files)
    assert [d["name"] for d in cdi.make_spec(facts, files, all_device=False)["devices"]].count("all") == 0


def test_mig_devices_stand_for_their_gpu(tmp_path: Path) -> None:
    facts, files = h100(tmp_path)
    mig = MigDevice("MIG-aaaa1111-0000-0000-0000-000000000000", 1, 1, 2, 5, 0, gi_minor=30, ci_minor=31)
    gpus = (facts.gpus[0], facts.gpus[1].replace(mig_enabled=True, mig=(mig,)))
    spec = cdi.make_spec(facts.replace(gpus=gpus, majors=(("nvidia-caps", 509),)), files)
    edits = {device["name"]: device["containerEdits"] for device in spec["devices"]}
    assert sorted(edits) == ["0", "1:2", tree.uuid(0), mig.uuid, "all"]
    paths = [node["path"] for node in edits["1:2"]["deviceNodes"]]
    assert paths == ["/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"]
    assert edits["1:2"] == edits[mig.uuid]


def test_a_gpu_that_only_drives_a_screen_is_not_offered(tmp_path: Path) -> None:
    facts, files = h100(tmp_path)
    gpus = (facts.gpus[0], facts.gpus[1].replace(name="NVIDIA DGX Display"), facts.gpus[2])
    spec = cdi.make_spec(facts.replace(gpus=gpus), files, names=["index"])
    assert [device["name"] for device in spec["devices"]] == ["0", "2", "all"]


def test_groups_raise_the_version_and_can_be_left_out(tmp_path: Path) -> None:
    facts, files = h100(tmp_path)
    nodes = tuple(node.replace(mode=0o660, gid=44) if node.path == "/dev/nvidia0" else node for node in facts.nodes)
    spec = cdi.make_spec(facts.replace(nodes=nodes), files)
    assert spec["cdiVersion"] == "0.7.0"
    assert spec["devices"][0]["containerEdits"]["additionalGids"] == [44]
    assert cdi.make_spec(facts.replace(nodes=nodes), files, gids=False)["cdiVersion"] == "0.5.0"


def test_imex_channels_are_devices_of_their_own() -> None:
    facts = NodeFacts((), "nvml", imex=(0, 3), majors=(("nvidia-caps-imex-channels", 510),))
    spec = cdi.channel_spec(facts)
    assert spec["kind"] == "nvidia.com/imex-channel"
    assert [device["name"] for device in spec["devices"]] == ["0", "3", "all"]
    (node,) = spec["devices"][1]["containerEdits"]["deviceNodes"]
    assert node["path"] == "/dev/nvidia-caps-imex-channels/channel3" and "major" not in node


@pytest.mark.parametrize("extension", ["json", "yaml"])
def test_written_aside_readable_for_all_and_read_back_the_same(tmp_path: Path, extension: str) -> None:
    spec = cdi.make_spec(*h100(tmp_path / "root"), annotations={"made.by": "test"})
    path = tmp_path / "new/folder" / f"nvidia.{extension}"
    before = os.umask(0o077)
    try:
        cdi.write_spec(spec, str(path))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == [path.name]
    assert cdi.read_spec(str(path)) == spec
    assert yaml.safe_load(path.read_text()) == spec


def test_a_spec_that_is_wrong_is_not_written(tmp_path: Path) -> None:
    spec = cdi.make_spec(*h100(tmp_path / "root"))
    path = tmp_path / "nvidia.yaml"
    path.write_text("old")
    with pytest.raises(CdiError, match="too low"):
        cdi.write_spec({**spec, "cdiVersion": "0.3.0"}, str(path))
    with pytest.raises(CdiError, match="yaml or json"):
        cdi.write_spec(spec, str(tmp_path / "nvidia.toml"))
    assert path.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["nvidia.yaml", "root"]


# Words that some YAML reader takes for something else than a string.
TRAPS = st.sampled_from(["0", "0:1", "1e3", "0x1f", "010", "1.5", "y", "no", "on", "true", "null", "NULL", "Off"])


@given(
    st.lists(
        TRAPS | st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._:-]{0,6}[A-Za-z0-9])?", fullmatch=True), min_size=1, unique=True
    )
)
def test_generate_and_load_are_inverse_for_every_name(names: list[str]) -> None:
    devices = [{"name": name, "containerEdits": {"env": [f"A={name}", "B=: #x", "C= "]}} for name in names]
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "a.b/c",
        "annotations": {"n": names[0]},
        "devices": devices,
        "containerEdits": {},
    }
    cdi.check(spec)
    text = cdi.to_text(spec, "yaml")
    assert yaml.safe_load(text) == spec
    assert json.loads(cdi.to_text(spec, "json")) == spec
    assert f'name: "{names[0]}"' in text or names[0][0].isalpha()


@pytest.mark.root
def test_a_spec_applied_means_what_the_builder_meant(tmp_path: Path) -> None:
    """The registry on our own text gives the very devices, mounts, links and environment that were built."""
    root = tree.create(tmp_path / "root", 3, with_nodes=True)
    facts, files = procfs.facts(str(root)), driver.find(str(root))
    built = build.build(facts, files, Request("environment", ("2",), capabilities=("all",)), mps=False)
    cdi.write_spec(cdi.make_spec(facts, files), str(tmp_path / "cdi/gpus.json"))
    again = cdi.absorb(cdi.Registry([str(tmp_path / "cdi")]).resolve(["nvidia.com/gpu=2"]))

    def nodes(injection: build.Injection) -> set[tuple[object, ...]]:
        return {(n.path, n.host_path, n.type, n.major, n.minor, n.mode, n.access) for n in injection.devices}

    assert nodes(again) == nodes(built)
    assert {(m.source, m.path, m.options) for m in again.mounts} == {
        (m.source, m.path, m.options) for m in built.mounts
    }
    assert dict(again.env) == dict(built.env)
    links = {(link.target, link.path) for link in built.rootfs.links}
    assert {(link.target, link.path) for link in again.rootfs.links} == links
    assert again.rootfs.replace(links=()) == built.rootfs.replace(links=())
