"""What people reported in public about CDI specifications and driver files, each by the name of its case.

C05 all; C07 versions; C08 to C10 the registry; C12 to C16 stale and partial specs; C47, C48 capabilities and graphics;
C49 IMEX channels; C50, C53 MIG.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulet.commands import cdi_why
from gpulet.commands.cdi_generate import Options, gaps, generate_spec
from gpulet.commands.main import main
from gpulet.errors import CdiError, GpuletError, RequestError, UnknownDevice
from gpulet.injection import build, cdi, cdi_fingerprint, cdi_targets
from gpulet.node import driver, nvml, procfs
from gpulet.node.gpu import CharDevice, Gpu, NodeFacts
from gpulet.plugin import specs
from gpulet.plugin.config import Config
from gpulet.plugin.resources import inventory
from gpulet.request.model import Request
from gpulet.sim import node
from support import driver_tree as tree
from support import hand_made

V = tree.VERSION
LIB = "/usr/lib/x86_64-linux-gnu"
GPU_A = Gpu(0, 0, "GPU-aaaa", "00000000:19:00.0")
PLAIN = NodeFacts((GPU_A,), "nvml", driver=V, dev_root="/", nodes=(CharDevice("/dev/nvidia0", "/dev/nvidia0", 195, 0),))


def spec_text(version: str = "0.6.0", name: str = "0", env: str = "X=1", extra: str = "") -> str:
    return (
        f"cdiVersion: {version}\nkind: nvidia.com/gpu\n{extra}"
        f"devices:\n- {{name: '{name}', containerEdits: {{env: [{env}]}}}}\n"
    )


def test_c05_the_plugins_own_spec_has_all(tmp_path: Path) -> None:
    root = tree.create(tmp_path / "root", 2)
    config = Config(cdi_spec_dir=str(tmp_path / "cdi"), driver_root=str(root), dev_root=str(root))
    specs.publish(config, procfs.facts(str(root)), ())
    registry = cdi.Registry([str(tmp_path / "cdi")])
    kind = "k8s.device-plugin.nvidia.com/gpu"
    assert registry.names() == [f"{kind}={name}" for name in (tree.uuid(0), tree.uuid(1), "all")]


def test_c07_no_host_path_where_it_is_the_path_and_the_lowest_version_that_fits(tmp_path: Path) -> None:
    files = driver.find(str(tree.create(tmp_path)))
    spec = cdi.make_spec(PLAIN, files, names=("index", "uuid"))
    assert "hostPath" not in str(spec["devices"])
    assert spec["cdiVersion"] == "0.5.0"  # "0" begins with a digit
    assert cdi_targets.above(spec, cdi_targets.limit("podman=4.2"))  # 0.4.0: neither name nor version
    older = cdi.make_spec(PLAIN, files, names=("type-index", "uuid"))
    assert older["cdiVersion"] == "0.3.0" and not cdi_targets.above(older, cdi_targets.limit("podman=4.2"))
    assert [device["name"] for device in older["devices"]] == ["GPU-aaaa", "all", "gpu0"]


@pytest.mark.root
@pytest.mark.parametrize("target", ["podman=4.6", "podman=4.9.3", "containerd=1.7", "cri-o=1.29"])
def test_c07_nothing_newer_than_the_target_reads(tmp_path: Path, target: str) -> None:
    """The stamp (0.6.0), the groups of DRM nodes (0.7.0) are given up, and nothing else."""
    made = node.create(tmp_path / "n", "t4x1")
    newest, _facts = generate_spec(Options(root=str(made.root)))
    assert newest["cdiVersion"] == "0.7.0"
    spec, _facts = generate_spec(Options(root=str(made.root), target=target))
    assert cdi_targets.above(spec, cdi_targets.limit(target)) == []
    assert spec["cdiVersion"] == cdi.minimum_version(spec)
    assert ("annotations" in spec) == (cdi_targets.limit(target) >= "0.6.0")
    assert [device["name"] for device in spec["devices"]] == [device["name"] for device in newest["devices"]]


def test_c08_one_name_twice_in_a_folder_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(spec_text() + "- {name: '1', containerEdits: {env: [X=2]}}\n")
    (tmp_path / "nvidia-old.yaml").write_text(spec_text())
    registry = cdi.Registry([str(tmp_path)])
    assert registry.names() == ["nvidia.com/gpu=1"]
    with pytest.raises(CdiError) as caught:
        registry.resolve(["nvidia.com/gpu=0"])
    assert f"{tmp_path}/nvidia.yaml" in str(caught.value) and f"{tmp_path}/nvidia-old.yaml" in str(caught.value)


def test_c09_the_later_folder_wins(tmp_path: Path) -> None:
    folders = [tmp_path / "etc", tmp_path / "run"]
    for folder, version in zip(folders, ("535", "570"), strict=True):
        folder.mkdir()
        (folder / "nvidia.yaml").write_text(spec_text(env=f"DRIVER={version}"))
    assert cdi.Registry(list(map(str, folders))).resolve(["nvidia.com/gpu=0"]).env == (("DRIVER", "570"),)
    answer = cdi_why.explain("nvidia.com/gpu=0", folders=tuple(map(str, folders)))
    assert answer["ok"]
    assert f"{folders[0]}/nvidia.yaml defines it too, but {folders[1]} has priority" in answer["lines"]


def test_c10_a_broken_file_is_told_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(spec_text(name="x", extra="colour: green\n"))
    (tmp_path / "good.yaml").write_text(spec_text())
    registry = cdi.Registry([str(tmp_path)])
    assert registry.names() == ["nvidia.com/gpu=0"]
    with pytest.raises(CdiError) as caught:
        registry.resolve(["nvidia.com/gpu=x"])
    for word in ("nvidia.com/gpu=x", f"{tmp_path}/bad.yaml", "colour", str(tmp_path)):
        assert word in str(caught.value)


def test_c10_the_folders_that_were_looked_into_are_named(tmp_path: Path) -> None:
    """Written to /run/cdi while /var/run is no link to it."""
    with pytest.raises(CdiError) as caught:
        cdi.Registry([f"{tmp_path}/etc/cdi", f"{tmp_path}/var/run/cdi"]).resolve(["nvidia.com/gpu=0"])
    assert f"{tmp_path}/etc/cdi {tmp_path}/var/run/cdi" in str(caught.value)


def test_c12_a_spec_of_the_driver_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree.create(tmp_path / "root")
    library = root / LIB[1:] / f"libcuda.so.{V}"
    path = tmp_path / "cdi/nvidia.yaml"
    words = ["cdi", "generate", "--mode", "procfs", "--driver-root", str(root), "--hook-path", "/bin/true"]
    assert main([*words, "--output", str(path)]) == 0
    library.rename(library.with_name("libcuda.so.580.1.2"))
    (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  x\n")
    for other in list((root / LIB[1:]).glob(f"*.so.{V}")):
        other.rename(str(other).replace(V, "580.1.2"))
    capsys.readouterr()
    assert main(["cdi", "verify", "--driver-root", str(root), str(path)]) == 1
    told = capsys.readouterr().out
    assert f"mount of {library}: no such file" in told and "made for driver" in told and "gpulet cdi generate" in told
    with pytest.raises(CdiError, match=r"doesn't fit this node any more.*write it anew: gpulet cdi generate"):
        cdi.Registry([str(path.parent)]).resolve(["nvidia.com/gpu=all"])
    before = path.stat().st_ino
    assert main([*words, "--output", str(path)]) == 0
    assert path.stat().st_ino != before and os.listdir(path.parent) == ["nvidia.yaml"]  # renamed into its place
    assert "libcuda.so.580.1.2" in path.read_text()


@pytest.mark.root
def test_c13_the_major_of_uvm(tmp_path: Path) -> None:
    root = tree.create(tmp_path / "root", 1, with_nodes=True)
    spec = cdi.make_spec(procfs.facts(str(root)), driver.find(str(root)), calls=cdi.HookCalls("/bin/true"))
    (uvm,) = [one for one in spec["containerEdits"]["deviceNodes"] if one["path"] == "/dev/nvidia-uvm"]
    assert "major" not in uvm  # whoever applies it looks at the node
    assert cdi_fingerprint.problems(spec) == []
    uvm |= {"type": "c", "major": 510, "minor": 0}
    (told,) = cdi_fingerprint.problems(spec)
    assert told == f"device node {root}/dev/nvidia-uvm is {tree.UVM_MAJOR}:0, the spec says 510:0"


@pytest.mark.root
def test_c13_a_node_that_an_earlier_boot_left(tmp_path: Path) -> None:
    """Its major is in /dev, in every spec that looks there, and no longer in /proc/devices."""
    root = tree.create(tmp_path / "root", 1, with_nodes=True)
    (root / "dev/nvidia-uvm").unlink()
    os.mknod(root / "dev/nvidia-uvm", stat.S_IFCHR | 0o666, os.makedev(400, 0))
    facts = procfs.facts(str(root))
    spec = cdi.make_spec(facts, driver.find(str(root)), calls=cdi.HookCalls("/bin/true"))
    told = f"device node {root}/dev/nvidia-uvm is 400:0, its driver has major {tree.UVM_MAJOR} since this boot"
    assert cdi_fingerprint.problems(spec, facts) == [told]
    (gap,) = gaps(facts, Options("procfs", str(root)))
    assert gap.startswith(f"/dev/nvidia-uvm has major 400, its driver {tree.UVM_MAJOR}")


@pytest.mark.root
def test_c14_no_uvm_when_the_spec_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    for name in ("nvidia-uvm", "nvidia-uvm-tools"):
        (made.root / "dev" / name).unlink()
    options = Options(root=str(made.root))
    _spec, facts = generate_spec(options)
    assert any("CUDA won't work" in text and "modprobe nvidia_uvm" in text for text in gaps(facts, options))
    words = ["cdi", "generate", "--driver-root", str(made.root), "--output", str(tmp_path / "x.yaml")]
    assert main([*words, "--strict"]) == 1 and not (tmp_path / "x.yaml").exists()
    assert main(words) == 0
    capsys.readouterr()


@pytest.mark.root
def test_c16_driver_root_dev_root_and_the_containers_path(tmp_path: Path) -> None:
    """The host's /host/nvidia/driver is mounted at the tool's driver root; the nodes are in another place."""
    root = tree.create(tmp_path / "driver-root", 1, libs="lib64")
    (root / "dev").rmdir()
    (tmp_path / "host/dev").mkdir(parents=True)
    tree.nodes(tmp_path / "host", [0])
    options = Options(mode="procfs", root=str(root), dev_root=str(tmp_path / "host"), host_root="/host/nvidia/driver")
    spec, _facts = generate_spec(options)
    mounts = {one["containerPath"]: one["hostPath"] for one in spec["containerEdits"]["mounts"]}
    assert mounts[f"/lib64/libcuda.so.{V}"] == f"/host/nvidia/driver/lib64/libcuda.so.{V}"
    (gpu,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert (gpu["path"], gpu["hostPath"]) == ("/dev/nvidia0", f"{tmp_path}/host/dev/nvidia0")
    # and where the nodes lie in the driver root, they move with it
    tree.nodes(root, [0])
    spec, _facts = generate_spec(Options(mode="procfs", root=str(root), host_root="/host/nvidia/driver"))
    (gpu,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert (gpu["path"], gpu["hostPath"]) == ("/dev/nvidia0", "/host/nvidia/driver/dev/nvidia0")


def libraries(root: Path, *capabilities: str) -> set[str]:
    files = driver.find(str(root))
    return {
        mount.path.rpartition("/")[2].partition(".so")[0] for mount in build.common(PLAIN, files, capabilities).mounts
    }


def test_c47_capabilities_choose_the_libraries(tmp_path: Path) -> None:
    root = tree.create(tmp_path)
    usual = libraries(root, "utility", "compute")
    assert {"libnvidia-ml", "libcuda", "nvidia-smi"} <= usual
    assert not {"libnvcuvid", "libGLX_nvidia", "libnvidia-glcore"} & usual
    assert {"libnvcuvid", "libnvidia-encode"} <= libraries(root, "video")
    for drawing in ("graphics", "display"):
        assert {"libGLX_nvidia", "libEGL_nvidia", "nvidia_icd.json", "10_nvidia.json"} <= libraries(root, drawing)
    assert libraries(root, "all") >= libraries(root, "utility", "compute", "video", "graphics", "ngx")
    (root / LIB[1:] / f"libnvcuvid.so.{V}").unlink()
    assert "libnvcuvid.so" in [missing.name for missing in driver.find(str(root)).missing]


@pytest.mark.parametrize(
    ("value", "supported", "wanted"),
    [
        (None, "all", {"compute", "utility"}),
        ("video", "all", {"video"}),
        ("all", "compute,utility", {"compute", "utility"}),
        ("compute,vidoe", "all", "vidoe"),
        ("compute,graphics", "compute,utility", "graphics"),
    ],
)
def test_c47_what_is_asked_for(value: str | None, supported: str, wanted: set[str] | str) -> None:
    from gpulet.request.capabilities import capabilities
    from gpulet.request.trace import Trace
    from gpulet.settings import Settings
    from support.containers import container

    env = () if value is None else (f"NVIDIA_DRIVER_CAPABILITIES={value}",)
    one, settings = container("NVIDIA_VISIBLE_DEVICES=0", *env), Settings(supported_capabilities=supported)
    if isinstance(wanted, set):
        assert set(capabilities(one, settings, Trace(), strict=True)) == wanted
        return
    with pytest.raises(RequestError, match=wanted) as caught:
        capabilities(one, settings, Trace(), strict=True)
    assert "allowed" in str(caught.value)


@pytest.mark.parametrize("icd", ["usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", "etc/vulkan/icd.d/nvidia_icd.json"])
def test_c48_graphics_files_in_either_place_and_the_same_bytes_each_time(tmp_path: Path, icd: str) -> None:
    root = tree.create(tmp_path)
    (root / "etc/vulkan/icd.d/nvidia_icd.json").unlink()
    tree.write(root / icd)
    texts = set()
    for _ in range(20):
        spec = cdi.make_spec(PLAIN, driver.find(str(root)))
        texts.add(cdi.to_text(spec, "yaml"))
    assert len(texts) == 1
    mounts = {one["containerPath"]: one["hostPath"] for one in spec["containerEdits"]["mounts"]}
    assert mounts[f"/etc/vulkan/icd.d/{icd.rpartition('/')[2]}"] == f"{root}/{icd}"
    assert "/usr/share/glvnd/egl_vendor.d/10_nvidia.json" in mounts
    assert yaml.safe_load(texts.pop()) == spec


@pytest.mark.root
def test_c49_imex_channels(tmp_path: Path) -> None:
    root = tree.create(tmp_path, 1, with_nodes=True)
    (root / "dev/nvidia-caps-imex-channels").mkdir()
    for number in (0, 1, 2047):
        path = root / f"dev/nvidia-caps-imex-channels/channel{number}"
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(tree.IMEX_MAJOR, number))
    facts, files = procfs.facts(str(root)), driver.find(str(root))

    def numbers(*imex: str) -> list[tuple[int, int]]:
        built = build.build(facts, files, Request("environment", ("0",), imex=imex))
        return [(one.major, one.minor) for one in built.devices if "imex" in one.path]

    assert numbers("0", "1", "2047") == [(tree.IMEX_MAJOR, number) for number in (0, 1, 2047)]
    for strange in ("bogus", "2048", "-1", "2", ""):
        with pytest.raises(UnknownDevice, match="IMEX channel"):
            numbers(strange)
    kind = cdi.channel_spec(facts)
    assert [device["name"] for device in kind["devices"]] == ["0", "1", "2047", "all"]


def test_c50_single_strategy_and_profiles_of_two_kinds() -> None:
    facts = hand_made.facts(hand_made.mig_gpu(0, "1g.6gb", "1g.6gb", "2g.12gb"), hand_made.mig_gpu(1, "1g.6gb"))
    found = inventory(facts, Config(mig_strategy="single"))
    assert [device.gpu for resource in found.resources for device in resource.devices] == [1]
    (reason,) = found.problems
    assert reason.startswith("GPU 0") and "1g.6gb×2, 2g.12gb×1" in reason


@pytest.mark.root
def test_c53_a_slice_has_its_own_capabilities_alone(tmp_path: Path) -> None:
    root = str(node.create(tmp_path / "n", "a100x8", gpus=1, mig=["gpu0: 1g.5gb x7"]).root)
    facts, files = nvml.facts(root), driver.find(root)
    one = facts.gpus[0].mig[2]
    built = build.build(facts, files, Request("environment", ("0:2",), capabilities=("compute", "utility")))
    caps = {f"/dev/nvidia-caps/nvidia-cap{one.gi_minor}", f"/dev/nvidia-caps/nvidia-cap{one.ci_minor}"}
    control = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}
    assert {device.path for device in built.devices} == {"/dev/nvidia0", *control, *caps}
    spec: dict[str, Any] = cdi.make_spec(facts, files)
    (by_cdi,) = [device for device in spec["devices"] if device["name"] == "0:2"]
    assert {item["path"] for item in by_cdi["containerEdits"]["deviceNodes"]} == {"/dev/nvidia0", *caps}


def test_every_refusal_is_one_line() -> None:
    with pytest.raises(GpuletError) as caught:
        cdi_why.explain("nvidia.com/gpu=0", "lxc=1")
    assert "\n" not in str(caught.value)
