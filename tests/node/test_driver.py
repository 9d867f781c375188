"""The driver's files beneath a root."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpulet.errors import DriverNotFound
from gpulet.node import driver, elf
from gpulet.node.driver_files import lacking
from gpulet.node.paths import resolve
from support import driver_tree as tree

LIB = "/usr/lib/x86_64-linux-gnu"


def by_name(files: driver.DriverFiles, kind: str = "") -> dict[str, driver.DriverFile]:
    return {file.path.rpartition("/")[2]: file for file in files.files if kind in ("", file.kind)}


def test_libraries_with_capability_soname_and_links(tmp_path: Path) -> None:
    files = driver.find(str(tree.create(tmp_path)))
    assert (files.version, files.folders) == (tree.VERSION, (LIB,))
    found = by_name(files, "library")
    cuda = found[f"libcuda.so.{tree.VERSION}"]
    assert (cuda.path, cuda.source) == (
        f"{LIB}/libcuda.so.{tree.VERSION}",
        f"{tmp_path}{LIB}/libcuda.so.{tree.VERSION}",
    )
    assert (cuda.capability, cuda.soname) == ("compute", "libcuda.so.1")
    assert cuda.links == ((f"libcuda.so.{tree.VERSION}", f"{LIB}/libcuda.so.1"), ("libcuda.so.1", f"{LIB}/libcuda.so"))
    assert found[f"libvdpau_nvidia.so.{tree.VERSION}"].folder == f"{LIB}/vdpau"
    assert found["libnvidia-egl-gbm.so.1.1.2"].soname == "libnvidia-egl-gbm.so.1"
    assert found[f"libnvidia-tls.so.{tree.VERSION}"].links == ()
    gbm = ("../libnvidia-allocator.so.1", f"{LIB}/gbm/nvidia-drm_gbm.so")
    assert gbm in found[f"libnvidia-allocator.so.{tree.VERSION}"].links


def test_a_distributions_library_with_a_version_of_its_own_is_found_apart_from_the_driver(tmp_path: Path) -> None:
    tree.create(tmp_path, libs="usr/lib/x86_64-linux-gnu/nvidia/current")
    for name in ("libnvidia-egl-wayland.so.1.1.9", "libnvidia-egl-gbm.so.1.1.0", "libcuda.so.1.0"):
        tree.write(tmp_path / LIB[1:] / name)
    tree.link(tmp_path / LIB[1:] / "libnvidia-egl-wayland.so.1", "libnvidia-egl-wayland.so.1.1.9")
    found = [file.path for file in driver.find(str(tmp_path)).files if file.folder == LIB]
    assert found == [f"{LIB}/libnvidia-egl-wayland.so.1.1.9"]  # gbm is the driver's own, libcuda isn't this version


def test_only_files_of_the_running_version(tmp_path: Path) -> None:
    tree.create(tmp_path)
    tree.libraries(tmp_path / "usr/lib64", "535.1.2")
    assert {
        file.path.rpartition("so.")[2] for file in driver.find(str(tmp_path)).files if "libcuda.so" in file.path
    } == {tree.VERSION}
    assert driver.find(str(tmp_path), version="535.1.2").folders == ("/usr/lib64",)


def test_an_upgrade_on_disk_that_the_kernel_has_not_seen_is_told(tmp_path: Path) -> None:
    tree.libraries(tmp_path / "usr/lib64", "580.1.2")
    tree.proc(tmp_path, [])
    with pytest.raises(DriverNotFound, match=r"570\.86\.15.*580\.1\.2.*reboot or reload"):
        driver.find(str(tmp_path))


def test_the_version_comes_from_the_libraries_where_no_module_tells(tmp_path: Path) -> None:
    tree.libraries(tmp_path / "usr/lib64", "580.1.2")
    tree.write(tmp_path / "proc/driver/nvidia/version", "")
    assert driver.find(str(tmp_path)).version == "580.1.2"


def test_nothing_found_names_the_folders(tmp_path: Path) -> None:
    with pytest.raises(DriverNotFound, match="/usr/lib64"):
        driver.find(str(tmp_path), version="1.2.3")


def test_folder_known_to_the_loader_cache_alone(tmp_path: Path) -> None:
    from gpulet.node.ldcache import Cache, Entry, write

    tree.create(tmp_path, libs="opt/nvidia/lib")
    with pytest.raises(DriverNotFound):
        driver.find(str(tmp_path))
    (tmp_path / "etc/ld.so.cache").write_bytes(write(Cache((Entry("libcuda.so.1", "/opt/nvidia/lib/libcuda.so.1"),))))
    assert driver.find(str(tmp_path)).folders == ("/opt/nvidia/lib",)


def test_search_paths_with_and_without_the_root(tmp_path: Path) -> None:
    tree.create(tmp_path, libs="lib/there")
    for folder in ("/lib/there", f"{tmp_path}/lib/there"):
        assert driver.find(str(tmp_path), search=[folder]).folders == ("/lib/there",)
    tree.libraries(tmp_path / "usr/lib64")
    assert driver.find(str(tmp_path), search=["/lib/there"]).folders == ("/lib/there", "/usr/lib64")


def test_a_loader_cache_that_is_named_lies_beneath_the_root(tmp_path: Path) -> None:
    from gpulet.node.ldcache import Cache, Entry, write

    tree.create(tmp_path, libs="opt/lib")
    (tmp_path / "other.cache").write_bytes(write(Cache((Entry("libcuda.so.1", "/opt/lib/libcuda.so.1"),))))
    assert driver.find(str(tmp_path), ldcache="/other.cache").folders == ("/opt/lib",)


def test_what_capabilities_stand_on_is_missed_though_other_files_of_theirs_are_there(tmp_path: Path) -> None:
    tree.create(tmp_path)
    tree.libraries(tmp_path / "usr/lib32")
    assert lacking(driver.find(str(tmp_path)), ("utility", "compute", "video", "display")) == ()
    for path in [*tmp_path.glob(f"{LIB[1:]}/libcuda.so*"), *tmp_path.glob(f"{LIB[1:]}/libnv[ci][du][ve]*")]:
        path.unlink()
    files = driver.find(str(tmp_path))
    assert lacking(files) == ("compute: no libcuda.so.1",)
    assert lacking(files, ("utility", "compute", "ngx")) == ("compute: no libcuda.so.1",)
    (tmp_path / f"{LIB[1:]}/libnvidia-ngx.so.{tree.VERSION}").unlink()
    assert lacking(driver.find(str(tmp_path)), ("utility", "ngx")) == ("ngx: no file of it",)


def test_links_to_absolute_places_stay_beneath_the_root(tmp_path: Path) -> None:
    """NixOS and alternatives: the known folder is a link into a store."""
    store = "/nix/store/abc-nvidia/lib"
    tree.create(tmp_path, libs=store.lstrip("/"))
    tree.link(tmp_path / "run/opengl-driver", "/nix/store/abc-nvidia")
    files = driver.find(str(tmp_path))
    assert files.folders == (store,)
    assert all(file.source == f"{tmp_path}{file.path}" for file in files.files if file.kind == "library")


def test_binaries_firmware_configuration_and_what_is_missing(tmp_path: Path) -> None:
    tree.create(tmp_path)
    (tmp_path / "usr/bin/nvidia-debugdump").chmod(0o644)  # not executable: not a program
    files = driver.find(str(tmp_path))
    assert by_name(files)["nvidia-smi"].path == "/usr/bin/nvidia-smi"
    assert by_name(files)["gsp_ga10x.bin"].path == f"/lib/firmware/nvidia/{tree.VERSION}/gsp_ga10x.bin"
    assert by_name(files)["nvidia_icd.json"].capability == "graphics"
    missing = {item.name: item.looked for item in files.missing}
    assert "/usr/bin" in missing["nvidia-debugdump"]
    assert missing["libnvidia-nscq.so"] == (LIB,)
    assert "libcuda.so" not in missing


def test_configuration_is_found_in_each_folder_and_put_in_one_place(tmp_path: Path) -> None:
    tree.create(tmp_path)
    (tmp_path / "etc/vulkan/icd.d/nvidia_icd.json").unlink()
    tree.write(tmp_path / "usr/share/vulkan/icd.d/nvidia_icd.x86_64.json")
    (found,) = [file for file in driver.find(str(tmp_path)).files if "vulkan" in file.path]
    assert found.path == "/etc/vulkan/icd.d/nvidia_icd.x86_64.json"
    assert found.source == f"{tmp_path}/usr/share/vulkan/icd.d/nvidia_icd.x86_64.json"


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_soname_out_of_the_file_where_no_link_tells(tmp_path: Path) -> None:
    tree.create(tmp_path)
    (tmp_path / LIB[1:] / "libcuda.so.1").unlink()
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    library = tmp_path / LIB[1:] / f"libcuda.so.{tree.VERSION}"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    assert by_name(driver.find(str(tmp_path)))[library.name].soname == "libcuda.so.1"
    assert (elf.soname(str(library)), elf.bits(str(library))) == ("libcuda.so.1", 64)


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 80, b"#!/bin/sh\n" * 9])
def test_no_soname_out_of_what_is_no_library(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert elf.soname(str(tmp_path / "x")) == ""


def test_32_bit_libraries_are_set_apart(tmp_path: Path) -> None:
    tree.create(tmp_path)
    tree.libraries(tmp_path / "usr/lib/i386-linux-gnu")
    kinds = {file.folder: file.kind for file in driver.find(str(tmp_path)).files if file.kind.startswith("library")}
    assert kinds[LIB] == "library" and kinds["/usr/lib/i386-linux-gnu"] == "library32"


def test_sockets_where_they_are(tmp_path: Path) -> None:
    tree.create(tmp_path)
    tree.write(tmp_path / "run/nvidia-persistenced/socket")
    tree.link(tmp_path / "var/run", "/run")
    tree.write(tmp_path / "run/nvidia-fabricmanager/socket")
    (tmp_path / "tmp/nvidia-mps").mkdir(parents=True)
    found = [(file.path, file.capability) for file in driver.find(str(tmp_path)).files if file.kind == "socket"]
    assert found == [
        ("/run/nvidia-persistenced/socket", "utility"),
        ("/run/nvidia-fabricmanager/socket", "utility"),
        ("/tmp/nvidia-mps", "compute"),
    ]


def test_resolving_never_leaves_the_root(tmp_path: Path) -> None:
    tree.link(tmp_path / "a", "../../../etc/passwd")
    tree.link(tmp_path / "b", "/a")
    tree.link(tmp_path / "loop", "loop")
    assert resolve(str(tmp_path), "/b") == "/etc/passwd"
    assert resolve(str(tmp_path), "/x/../../y") == "/y"
    with pytest.raises(OSError, match="too many"):
        resolve(str(tmp_path), "/loop")
