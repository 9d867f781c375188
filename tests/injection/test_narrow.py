"""narrow.py: driver files that weren't asked for stay out of what a CDI specification brings."""

from __future__ import annotations

import pytest

from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from gpulet.injection.narrow import capability_of, narrow

LIB = "/usr/lib/x86_64-linux-gnu"
FILES = (
    f"{LIB}/libcuda.so.570.86.15",
    f"{LIB}/libnvidia-ml.so.570.86.15",
    f"{LIB}/libGLX_nvidia.so.570.86.15",
    "/usr/bin/nvidia-smi",
    "/usr/bin/nvidia-cuda-mps-server",
    "/etc/vulkan/icd.d/nvidia_icd.json",
    "/lib/firmware/nvidia/570.86.15/gsp_ga10x.bin",
    "/opt/site/libsite.so.1",
)
LINKS = (
    SymLink("libcuda.so.1", f"{LIB}/libcuda.so"),
    SymLink("libcuda.so.570.86.15", f"{LIB}/libcuda.so.1"),
    SymLink("libnvidia-ml.so.570.86.15", f"{LIB}/libnvidia-ml.so.1"),
    SymLink("../x86_64-linux-gnu/libGLX_nvidia.so.570.86.15", f"{LIB}/libGLX_indirect.so.0"),
)
WHOLE = Injection(mounts=tuple(Mount("/host" + path, path) for path in FILES), rootfs=RootfsWork(links=LINKS))


@pytest.mark.parametrize(
    ("capabilities", "gone", "links"),
    [
        (("compute", "utility"), {FILES[2], FILES[5]}, LINKS[:3]),
        (("utility",), {FILES[0], FILES[2], FILES[4], FILES[5]}, LINKS[2:3]),
        (("graphics",), {FILES[0], FILES[1], FILES[3], FILES[4]}, LINKS[3:]),
        (("video",), {FILES[1], FILES[2], FILES[3], FILES[4], FILES[5]}, LINKS[:2]),  # video needs compute's libraries
        (("all",), set(), LINKS),
        ((), {*FILES[:6]}, ()),
    ],
)
def test_what_stays(capabilities: tuple[str, ...], gone: set[str], links: tuple[SymLink, ...]) -> None:
    kept = narrow(WHOLE, capabilities)
    assert {mount.path for mount in WHOLE.mounts} - {mount.path for mount in kept.mounts} == gone
    assert kept.rootfs.links == links


def test_a_file_that_is_not_in_the_table_has_no_capability() -> None:
    assert capability_of("/lib/firmware/nvidia/570.86.15/gsp_ga10x.bin") is None
    assert capability_of("/usr/lib/libcuda") is None
    assert capability_of("/usr/lib32/libcuda.so.1") == "compute"


@pytest.mark.parametrize(
    ("capabilities", "drm", "left"),
    [
        (("compute", "utility"), True, ["/dev/nvidia0"]),
        (("graphics",), True, ["/dev/nvidia0", "/dev/dri/card0"]),
        (("display",), True, ["/dev/nvidia0", "/dev/dri/card0"]),
        (("compute",), False, ["/dev/nvidia0", "/dev/dri/card0"]),
    ],
)
def test_who_does_not_draw_gets_no_nodes_for_drawing(capabilities: tuple[str, ...], drm: bool, left: list[str]) -> None:
    nodes = tuple(DeviceNode(path, path, 1, 0) for path in ("/dev/nvidia0", "/dev/dri/card0"))
    links = (SymLink("../card0", "/dev/dri/by-path/pci-0000:19:00.0-card"),)
    whole = Injection(nodes, rootfs=RootfsWork(links, profile_minors=(0,)))
    narrowed = narrow(whole, capabilities, drm=drm)
    assert [node.path for node in narrowed.devices] == left
    draws = len(left) > 1
    assert bool(narrowed.rootfs.links) is bool(narrowed.rootfs.profile_minors) is draws
