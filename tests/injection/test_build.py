"""What goes into a container, decided from facts, files and a request alone."""

from __future__ import annotations

import pytest

from gpulet.errors import UnknownDevice
from gpulet.injection import build
from gpulet.injection.build import Layout
from gpulet.node.driver import DriverFile, DriverFiles
from gpulet.node.gpu import CharDevice, Gpu, Lost, MigDevice, NodeFacts
from gpulet.request.model import Request

LIB = "/usr/lib/x86_64-linux-gnu"
V = "570.86.15"


def library(name: str, capability: str, kind: str = "library", folder: str = LIB) -> DriverFile:
    file = f"{name}.so.{V}"
    return DriverFile(
        f"{folder}/{file}", f"/drv{folder}/{file}", kind, capability, f"{name}.so.1", ((file, f"{folder}/{name}.so.1"),)
    )


FILES = DriverFiles(
    "/drv",
    V,
    (
        library("libnvidia-ml", "utility"),
        library("libcuda", "compute"),
        library("libnvcuvid", "video"),
        library("libGLX_nvidia", "graphics"),
        library("libnvidia-ngx", "ngx"),
        library("libnvidia-gtk3", "all"),
        library("libvdpau_nvidia", "video", folder=f"{LIB}/vdpau"),
        library("libcuda", "compute", "library32", "/usr/lib/i386-linux-gnu"),
        DriverFile("/usr/bin/nvidia-smi", "/drv/usr/bin/nvidia-smi", "binary", "utility"),
        DriverFile("/usr/bin/nvidia-cuda-mps-server", "/drv/usr/bin/nvidia-cuda-mps-server", "binary", "compute"),
        DriverFile("/lib/firmware/nvidia/1/gsp.bin", "/drv/lib/firmware/nvidia/1/gsp.bin", "firmware"),
        DriverFile("/run/nvidia-persistenced/socket", "/drv/run/nvidia-persistenced/socket", "socket", "utility"),
        DriverFile("/tmp/nvidia-mps", "/drv/tmp/nvidia-mps", "socket", "compute"),
        DriverFile("/etc/vulkan/icd.d/nvidia_icd.json", "/drv/etc/vulkan/icd.d/nvidia_icd.json", "config", "graphics"),
    ),
)


def node(path: str, major: int, minor: int, mode: int = 0o666, gid: int = 0) -> CharDevice:
    return CharDevice(path, "/drv" + path, major, minor, mode, 0, gid)


MIG = (
    MigDevice("MIG-aaaa1111-0000-0000-0000-000000000000", 2, 9, 0, 1, 0, gi_minor=30, ci_minor=31),
    MigDevice("MIG-aaaa2222-0000-0000-0000-000000000000", 2, 9, 3, 2, 0, gi_minor=39, ci_minor=40),
)
FACTS = NodeFacts(
    (
        Gpu(
            0,
            4,
            "GPU-aaaa1111-2222",
            "00000000:19:00.0",
            drm=("card1", "renderD128"),
            drm_links=(("../card1", "/dev/dri/by-path/p"),),
        ),
        Gpu(1, 3, "GPU-aaaa3333-4444", "00000000:1a:00.0"),
        Gpu(2, 9, "GPU-bbbb5555-6666", "00000001:65:00.0", mig_enabled=True, mig=MIG),
    ),
    "nvml",
    driver=V,
    lost=(Lost(7, "GPU is lost"),),
    majors=(("nvidia-caps", 509), ("nvidia-caps-imex-channels", 510)),
    imex=(0, 1, 2047),
    nodes=(
        node("/dev/dri/card1", 226, 1, 0o660, 44),
        node("/dev/dri/renderD128", 226, 128, 0o660, 105),
        node("/dev/gdrdrv", 240, 0),
        node("/dev/nvidia-fs0", 241, 0),
        node("/dev/nvidia-modeset", 195, 254),
        node("/dev/nvidia-uvm", 508, 0),
        node("/dev/nvidia-uvm-tools", 508, 1),
        node("/dev/nvidia3", 195, 3),
        node("/dev/nvidiactl", 195, 255),
    ),
    mig_minors=(1, 2),
    dev_root="/drv",
)


def make(*devices: str, capabilities: tuple[str, ...] = ("compute", "utility"), **more: object) -> build.Injection:
    request = Request("environment", devices, capabilities=capabilities, **more)  # type: ignore[arg-type]
    return build.build(FACTS, FILES, request)


def paths(injection: build.Injection) -> set[str]:
    return {item.path for item in injection.devices}


def names(injection: build.Injection) -> set[str]:
    return {mount.path.rpartition("/")[2].removesuffix(f".{V}") for mount in injection.mounts}


CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}


@pytest.mark.parametrize(
    "name", ["1", "GPU-aaaa3333-4444", "gpu-AAAA3333-4444", "GPU-aaaa3", "0000:1a:00.0", "00000000:1A:00.0", "0:1a:0"]
)
def test_each_way_to_name_a_gpu(name: str) -> None:
    assert build.select(FACTS, [name]).gpus == (FACTS.gpus[1],)


@pytest.mark.parametrize(
    "name", ["2:3", "MIG-aaaa2222-0000-0000-0000-000000000000", "mig-aaaa2", "MIG-GPU-bbbb5555-6666/2/0"]
)
def test_each_way_to_name_a_mig_device(name: str) -> None:
    selection = build.select(FACTS, [name])
    assert (selection.gpus, selection.migs) == ((), (MIG[1],))


@pytest.mark.parametrize(
    "name",
    [
        "3",
        "-1",
        "2:1",
        "GPU-aaaa",
        "GPU-zzzz",
        "MIG-aaaa",
        "0000:ff:00.0",
        "0:0",
        "nvidia0",
        "1.0",
        "²",
        "2:²",
        pytest.param("9" * 5000, id="digits"),
        pytest.param("9" * 5000 + ":0", id="digits of a slot"),
    ],
)
def test_what_names_nothing_or_several_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(UnknownDevice, match=r"GPU-aaaa1111-2222.*2:3 \(MIG-aaaa2222.*lost: 7"):
        build.select(FACTS, ["0", name])


@pytest.mark.parametrize("name", ["7", "GPU-zzzz", "0000:99:00.0"])
def test_gpus_of_the_machine_that_this_node_was_not_given_are_told_of(name: str) -> None:
    facts = FACTS.replace(withheld=("00000000:99:00.0",) * 3, dev_root="/run/driver", lost=())
    with pytest.raises(
        UnknownDevice, match=f"{name}', and other GPUs of this machine .3. have no node in /run/driver/dev "
    ):
        build.select(facts, [name])


def test_a_lost_gpu_is_refused_with_its_reason() -> None:
    with pytest.raises(UnknownDevice, match="'7', GPU is lost"):
        build.select(FACTS, ["7"])


def test_nothing_everything_and_repetitions() -> None:
    assert build.select(FACTS, ["", "none", "void"]) == build.Selection()
    assert build.select(FACTS, ["0", "0", "GPU-aaaa1111-2222"]).gpus == (FACTS.gpus[0],)
    everything = build.select(FACTS, ["all"])
    assert (everything.gpus, everything.migs) == (FACTS.gpus, MIG)


def test_an_empty_request_gives_an_empty_injection() -> None:
    assert build.build(FACTS, FILES, Request()) == build.Injection()


def test_a_gpu_brings_its_minor_and_no_other() -> None:
    assert paths(make("0")) == CONTROL | {"/dev/nvidia4"}
    assert make("0").proc_gpus == ("0000:19:00.0",)
    assert make("2").proc_gpus == ("00000001:65:00.0"[4:],)


def test_no_gpu_still_brings_driver_and_control_nodes() -> None:
    assert paths(make()) == CONTROL
    assert "libcuda.so" in names(make())


def test_a_node_missing_from_dev_is_made_from_its_fixed_number() -> None:
    (found,) = [item for item in make("0").devices if item.path == "/dev/nvidia4"]
    assert (found.major, found.minor, found.host_path) == (195, 4, "/drv/dev/nvidia4")


def test_a_gpu_without_a_minor_brings_no_node() -> None:
    facts = FACTS.replace(gpus=(FACTS.gpus[0].replace(minor=-1),))
    assert not [item for item in build.device(facts, build.select(facts, ["0"])).devices if "nvidia" in item.path]


def test_a_mig_device_brings_its_own_capabilities_alone() -> None:
    injection = make("2:3")
    caps = {"/dev/nvidia-caps/nvidia-cap39", "/dev/nvidia-caps/nvidia-cap40"}
    assert paths(injection) == CONTROL | {"/dev/nvidia9"} | caps
    assert {item.major for item in injection.devices if item.path in caps} == {509}
    base = "/proc/driver/nvidia/capabilities/gpu9/mig/gi2"
    assert injection.proc_mig == (f"{base}/access", f"{base}/ci0/access")


def test_a_partitioned_gpu_draws_only_in_a_mig_device_made_for_it() -> None:
    drm = ("card1",)
    for profile, drawing in (("1g.10gb", False), ("1g.24gb+gfx", True)):
        gpu = FACTS.gpus[2].replace(drm=drm, mig=(MIG[0].replace(profile=profile),))
        facts = FACTS.replace(gpus=(gpu,))
        for name in ("2:0", "all"):
            request = Request("environment", (name,), capabilities=("graphics",))
            assert ("/dev/dri/card1" in paths(build.build(facts, FILES, request))) is drawing


def test_a_mig_device_without_capability_minors_is_refused() -> None:
    mig = MIG[0].replace(gi_minor=-1)
    facts = FACTS.replace(gpus=(FACTS.gpus[2].replace(mig=(mig,)),))
    with pytest.raises(UnknownDevice, match="nvidia-modprobe"):
        build.build(facts, FILES, Request("environment", ("2:0",), capabilities=("compute",)))


@pytest.mark.parametrize(
    ("capabilities", "files", "nodes"),
    [
        (("utility",), {"libnvidia-ml.so", "nvidia-smi", "socket"}, set()),
        (("compute",), {"libcuda.so", "nvidia-cuda-mps-server", "nvidia-mps"}, {"uvm"}),
        (("video",), {"libcuda.so", "libnvcuvid.so", "libvdpau_nvidia.so", "nvidia-mps"}, {"uvm"}),
        (("graphics",), {"libGLX_nvidia.so", "nvidia_icd.json"}, {"dri"}),
        (("display",), {"libGLX_nvidia.so", "nvidia_icd.json"}, {"dri", "modeset"}),
        (("ngx",), {"libnvidia-ngx.so"}, set()),
        ((), set(), set()),
    ],
)
def test_each_capability_brings_its_files_and_nodes(
    capabilities: tuple[str, ...], files: set[str], nodes: set[str]
) -> None:
    injection = make("0", capabilities=capabilities)
    assert names(injection) == files | {"gsp.bin"}
    extra = {
        "uvm": {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"},
        "dri": {"/dev/dri/card1", "/dev/dri/renderD128"},
        "modeset": {"/dev/nvidia-modeset"},
    }
    assert paths(injection) == {"/dev/nvidiactl", "/dev/nvidia4"}.union(*(extra[name] for name in nodes))


def test_all_brings_every_file_and_compat32_the_32_bit_ones() -> None:
    assert len(make(capabilities=("all",)).mounts) == len(FILES.files)
    with32 = make(capabilities=("compute", "compat32"))
    assert "/usr/lib/i386-linux-gnu" in with32.rootfs.folders
    assert "/usr/lib/i386-linux-gnu" not in make(capabilities=("compute",)).rootfs.folders


def test_mounts_are_read_only_but_sockets() -> None:
    options = {mount.path: mount.options for mount in make().mounts}
    assert options[f"{LIB}/libcuda.so.{V}"] == ("ro", "nosuid", "nodev", "rbind", "rprivate")
    assert (
        "ro" not in options["/run/nvidia-persistenced/socket"]
        and "noexec" in options["/run/nvidia-persistenced/socket"]
    )


def test_sockets_can_be_left_out() -> None:
    request = Request("environment", ("0",), capabilities=("compute", "utility"))
    assert not {"socket", "nvidia-mps"} & names(build.build(FACTS, FILES, request, sockets=False, mps=False))


def test_work_in_the_root_file_system() -> None:
    work = make("0", capabilities=("compute", "graphics")).rootfs
    assert {(link.target, link.path) for link in work.links} == {
        (f"libcuda.so.{V}", f"{LIB}/libcuda.so.1"),
        (f"libGLX_nvidia.so.{V}", f"{LIB}/libGLX_nvidia.so.1"),
        ("../card1", "/dev/dri/by-path/p"),
    }
    assert (work.folders, work.host_driver, work.freeze_device_nodes, work.profile_minors) == ((LIB,), V, True, (4,))
    assert make("0", capabilities=("utility",)).rootfs.host_driver == ""


def test_nodes_not_open_to_all_bring_their_group() -> None:
    assert make("0", capabilities=("graphics",)).gids == (44, 105)
    assert make("0").gids == ()


def test_a_group_that_our_own_user_namespace_hides_is_none() -> None:
    hidden = CharDevice("/dev/nvidia4", "/drv/dev/nvidia4", 195, 4, 0o660, 65534, 65534)
    request = Request("environment", ("0",), capabilities=("utility",))
    made = build.build(FACTS.replace(nodes=(*FACTS.nodes, hidden)), FILES, request)
    assert [node.mode for node in made.devices if node.path == hidden.path] == [0o660]
    assert made.gids == ()


def test_the_layout_moves_libraries_binaries_and_links() -> None:
    request = Request("environment", ("0",), capabilities=("all",))
    injection = build.build(FACTS, FILES, request, layout=Layout("/usr/lib64", "/usr/lib32", "/opt/bin"))
    moved = {mount.path for mount in injection.mounts}
    assert {f"/usr/lib64/libcuda.so.{V}", f"/usr/lib32/libcuda.so.{V}", "/opt/bin/nvidia-smi"} <= moved
    assert f"/usr/lib64/libvdpau_nvidia.so.{V}" in moved
    assert {"/usr/lib64/libcuda.so.1", "/usr/lib32/libcuda.so.1"} <= {link.path for link in injection.rootfs.links}
    assert injection.rootfs.folders == ("/usr/lib64", "/usr/lib32")
    assert dict(injection.env)["NVIDIA_CTK_LIBCUDA_DIR"] == "/usr/lib64"


def test_imex_channels() -> None:
    injection = make("0", imex=("0", "2047"))
    found = {item.path: (item.major, item.minor) for item in injection.devices if "imex" in item.path}
    folder = "/dev/nvidia-caps-imex-channels"
    assert found == {f"{folder}/channel0": (510, 0), f"{folder}/channel2047": (510, 2047)}
    assert len([path for path in paths(make(imex=("all",))) if "imex" in path]) == 3
    for bad in ("2048", "bogus", "-1", "5", "²"):
        with pytest.raises(UnknownDevice, match="IMEX channel"):
            make("0", imex=(bad,))


def test_gated_devices_come_only_when_asked_for() -> None:
    assert not {"/dev/gdrdrv", "/dev/nvidia-fs0"} & paths(make("all", capabilities=("all",)))
    injection = make("0", gated=("gds", "gdrcopy", "mofed"))
    assert {"/dev/gdrdrv", "/dev/nvidia-fs0"} <= paths(injection)
    assert not {"/run/udev", "/etc/cufile.json"} & {mount.path for mount in injection.mounts}  # not on this node


def test_mig_management_devices() -> None:
    injection = make("all", mig_config="all")
    assert "/dev/nvidia-caps/nvidia-cap1" in paths(injection)
    assert "/dev/nvidia-caps/nvidia-cap2" not in paths(injection)
    assert "/proc/driver/nvidia/capabilities/mig/config" in injection.proc_mig


def test_every_item_says_why() -> None:
    injection = make("0", "2:0", capabilities=("all",), imex=("0",), gated=("gds",))
    assert all(item.why for item in (*injection.devices, *injection.mounts, *injection.rootfs.links))
