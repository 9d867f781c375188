"""Drivers in the places where distributions for clusters put them, and what is only taken when asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulet.injection import cdi
from gpulet.node import driver, procfs
from gpulet.node.driver import DriverFiles
from gpulet.node.gpu import CharDevice, Gpu, NodeFacts
from gpulet.node.ldcache import Cache, Entry, write
from support import driver_tree as tree

V = tree.VERSION


def paths(files: DriverFiles, kind: str) -> list[str]:
    return [file.path for file in files.files if file.kind == kind]


def test_gke_has_all_in_one_folder_that_is_no_root_file_system(tmp_path: Path) -> None:
    """Container-Optimized OS: lib64, bin and vulkan below /home/kubernetes/bin/nvidia; the nodes are the host's."""
    root = tmp_path / "home/kubernetes/bin/nvidia"
    tree.libraries(root / "lib64")
    tree.write(root / "bin/nvidia-smi", mode=0o755)
    tree.write(root / "vulkan/icd.d/nvidia_icd.json")
    tree.write(root / f"firmware/nvidia/{V}/gsp_ga10x.bin")
    files = driver.find(str(root), version=V)
    assert files.folders == ("/lib64",)
    assert f"/lib64/libcuda.so.{V}" in paths(files, "library")
    assert paths(files, "binary") == ["/bin/nvidia-smi"]
    (icd,) = [file for file in files.files if file.kind == "config"]
    assert (icd.path, icd.source) == ("/etc/vulkan/icd.d/nvidia_icd.json", f"{root}/vulkan/icd.d/nvidia_icd.json")
    nodes = (CharDevice("/dev/nvidia0", "/dev/nvidia0", 195, 0),)
    facts = NodeFacts((Gpu(0, 0, "GPU-a", "00000000:19:00.0"),), "procfs", driver=V, nodes=nodes, dev_root="/")
    spec = cdi.make_spec(facts, files)
    cuda = [m for m in spec["containerEdits"]["mounts"] if m["containerPath"] == f"/lib64/libcuda.so.{V}"]
    assert [mount["hostPath"] for mount in cuda] == [f"{root}/lib64/libcuda.so.{V}"]
    assert spec["devices"][0]["containerEdits"]["deviceNodes"][0]["path"] == "/dev/nvidia0"
    assert "hostPath" not in spec["devices"][0]["containerEdits"]["deviceNodes"][0]


def test_gke_nodes_are_looked_up_beside_the_driver_folder(tmp_path: Path) -> None:
    tree.proc(tmp_path, [("0000:19:00.0", 0)])
    (tmp_path / "lib64").mkdir()
    assert procfs.facts(str(tmp_path)).dev_root == "/"


def test_bottlerocket_keeps_libraries_where_its_loader_cache_says(tmp_path: Path) -> None:
    usr = "/x86_64-bottlerocket-linux-gnu/sys-root/usr"
    libraries = f"{usr}/lib/nvidia/tesla"
    tree.libraries(tmp_path / libraries[1:])
    tree.write(tmp_path / f"{usr[1:]}/libexec/nvidia/tesla/bin/nvidia-smi", mode=0o755)
    tree.link(tmp_path / "usr", "x86_64-bottlerocket-linux-gnu/sys-root/usr")
    with pytest.raises(Exception, match="no driver library"):
        driver.find(str(tmp_path), version=V)
    tree.write(tmp_path / "etc/ld.so.cache")
    entry = Entry("libcuda.so.1", f"{libraries}/libcuda.so.1")
    (tmp_path / "etc/ld.so.cache").write_bytes(write(Cache((entry,))))
    files = driver.find(str(tmp_path), version=V)
    assert files.folders == (libraries,)
    (smi,) = [file for file in files.files if file.kind == "binary"]
    assert smi.path == "/usr/libexec/nvidia/tesla/bin/nvidia-smi"
    assert os.path.samefile(smi.source, tmp_path / usr[1:] / "libexec/nvidia/tesla/bin/nvidia-smi")


def test_vendor_neutral_libraries_only_when_asked_for(tmp_path: Path) -> None:
    tree.create(tmp_path)
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    tree.write(folder / "libGL.so.1.7.0")
    tree.link(folder / "libGL.so.1", "libGL.so.1.7.0")
    tree.link(folder / "libGL.so", "libGL.so.1")
    assert not [path for path in paths(driver.find(str(tmp_path)), "library") if "libGL.so" in path]
    (found,) = [file for file in driver.find(str(tmp_path), neutral=True).files if "libGL.so" in file.path]
    place = "/usr/lib/x86_64-linux-gnu"
    assert (found.path, found.soname) == (f"{place}/libGL.so.1.7.0", "libGL.so.1")
    assert found.links == (("libGL.so.1.7.0", f"{place}/libGL.so.1"), ("libGL.so.1", f"{place}/libGL.so"))


def test_configuration_from_a_folder_of_the_host_instead_of_the_roots(tmp_path: Path) -> None:
    root = tree.create(tmp_path / "root")
    tree.write(tmp_path / "elsewhere/glvnd/egl_vendor.d/10_nvidia.json")
    files = driver.find(str(root), config_search=[str(tmp_path / "elsewhere"), str(root / "usr/share")])
    assert [(file.path, file.source) for file in files.files if file.kind == "config"] == [
        ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", f"{tmp_path}/elsewhere/glvnd/egl_vendor.d/10_nvidia.json")
    ]
