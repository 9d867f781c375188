"""The driver tree and device nodes of a simulated node."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from gpulet.errors import ConfigError, NodeError, UsageError
from gpulet.node import procfs
from gpulet.sim import description, devices, elf, files, node, tree

DISCRETE = [name for name in description.profiles() if description.load_profile(name).platform == "discrete"]


def _dynamic(path: Path) -> tuple[int, int, list[str]]:
    """Class, machine and the DT_SONAMEs of an ELF file, by a reader that isn't ours."""
    with path.open("rb") as file:
        image = ELFFile(file)
        section = image.get_section_by_name(".dynamic")
        names = [tag.soname for tag in section.iter_tags() if tag.entry.d_tag == "DT_SONAME"]
        return image.elfclass, image.header.e_machine, names


def _ldconfig(root: Path) -> dict[tuple[str, str], str]:
    """(name, kind) -> path, from the system's own reader of the loader's cache."""
    text = subprocess.run(
        ["ldconfig", "-p", "-C", root / "etc/ld.so.cache"], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.strip().split(" => ") for line in text.splitlines()[1:] if "=>" in line)
    return {(head.split(" ")[0], head.split("(")[1].rstrip(")")): path for head, path in rows}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> node.SimNode:
    return node.create(tmp_path_factory.mktemp("tree") / "n", "h100x8")


def test_every_library_has_its_soname_and_its_links(made: node.SimNode) -> None:
    version = made.description.driver
    for name, soname, links in files.LIBRARIES:
        path = made.library_folder / f"{name}.so.{version}"
        assert _dynamic(path)[2] == [soname or path.name], name
        for link in (*links, *([soname] if soname else [])):
            assert path.with_name(link).resolve().name in (path.name, Path(soname).name), link
            assert path.with_name(link).resolve() == path.resolve()
    for name, soname in (*files.OTHERS, *files.COMPANY):
        assert _dynamic(made.library_folder / name)[2] == [soname]


def test_32_bit_libraries_are_32_bit(made: node.SimNode) -> None:
    folder = made.root / "usr/lib" / tree.TRIPLET_32
    found = sorted(str(path.relative_to(folder)).split(".so")[0] for path in folder.rglob("*.so.5*"))
    assert found == sorted(files.LIBRARIES_32)
    assert _dynamic(folder / f"libcuda.so.{made.description.driver}") == (32, "EM_386", ["libcuda.so.1"])


def test_the_loader_cache_lists_both_classes(made: node.SimNode) -> None:
    cache = _ldconfig(made.root)
    assert cache[("libcuda.so.1", "libc6,x86-64")] == f"/lib/{tree.TRIPLET}/libcuda.so.1"
    assert ("libnvidia-ml.so.1", "libc6,x86-64") in cache
    assert any(name == "libcuda.so.1" and tree.TRIPLET_32 in path for (name, _), path in cache.items())


def test_only_libnvidia_tls_has_the_abi_tag(made: node.SimNode) -> None:
    def note(name: str) -> object:
        with (made.library_folder / f"{name}.so.{made.description.driver}").open("rb") as file:
            section = ELFFile(file).get_section_by_name(".note.ABI-tag")
            return section and next(section.iter_notes())["n_desc"]

    tag = note("libnvidia-tls")
    assert (tag.abi_major, tag.abi_minor, tag.abi_tiny) == (2, 3, 99)
    assert note("libcuda") is None


def test_written_libraries_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "libtry.so.1"
    path.write_bytes(elf.shared_object("libtry.so.1"))
    code = f"import ctypes; ctypes.CDLL({str(path)!r})"
    assert subprocess.run(["python3", "-c", code], capture_output=True).returncode == 0


def test_the_rest_of_the_driver_is_there(made: node.SimNode) -> None:
    version = made.description.driver
    for path in (
        f"lib/firmware/nvidia/{version}/gsp_ga10x.bin",
        "usr/bin/nvidia-persistenced",
        "usr/bin/nv-fabricmanager",
        "etc/OpenCL/vendors/nvidia.icd",
        "etc/vulkan/icd.d/nvidia_icd.json",
        "usr/share/nvidia/nvoptix.bin",
        f"usr/lib/{tree.TRIPLET}/gbm/nvidia-drm_gbm.so",
        f"usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{version}",
    ):
        assert (made.root / path).exists(), path
    for service in ("nvidia-persistenced", "nvidia-fabricmanager"):
        assert stat.S_ISSOCK((made.root / "run" / service / "socket").stat().st_mode)


def test_nvidia_smi_lists_gpus_and_mig_devices(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "a100x8", gpus=2, mig=["gpu1: 3g.20gb"])
    done = subprocess.run(
        [made.root / "usr/bin/nvidia-smi", "-L"],
        capture_output=True,
        text=True,
        env={"LD_LIBRARY_PATH": str(made.library_folder)},
    )
    assert done.stdout.splitlines() == [
        f"GPU 0: NVIDIA A100-SXM4-40GB (UUID: {made.gpus[0].uuid})",
        f"GPU 1: NVIDIA A100-SXM4-40GB (UUID: {made.gpus[1].uuid})",
        f"  MIG 3g.20gb      Device  0: (UUID: {made.gpus[1].mig[0].uuid})",
    ]


def test_the_mps_stand_in_keeps_what_it_is_told(made: node.SimNode, tmp_path: Path) -> None:
    environment = {"CUDA_MPS_LOG_DIRECTORY": str(tmp_path / "log"), "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipe")}
    control = made.root / "usr/bin/nvidia-cuda-mps-control"
    subprocess.run([control, "-d"], env=environment, check=True)
    words = "set_default_active_thread_percentage 25\nget_default_active_thread_percentage\nquit\n"
    done = subprocess.run([control], env=environment, input=words, capture_output=True, text=True, check=True)
    assert done.stdout == "25\n25\n"
    assert (tmp_path / "log/control.log").read_text() == f"start\n{words}"
    assert not (tmp_path / "pipe/control").exists()
    done = subprocess.run([control], env=environment, input=words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "there is no control daemon\n")
    subprocess.run([control, "-d"], env=environment, check=True)
    done = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "a control daemon is there already\n")


@pytest.mark.root
@pytest.mark.parametrize("profile", DISCRETE)
def test_device_nodes_are_those_of_the_description(tmp_path: Path, profile: str) -> None:
    made = node.create(tmp_path / "n", profile)
    majors = made.description.majors
    dev = made.root / "dev"
    seen = {
        str(path.relative_to(dev)): (os.major(info.st_rdev), os.minor(info.st_rdev), stat.S_IMODE(info.st_mode))
        for path in dev.rglob("*")
        if stat.S_ISCHR((info := path.stat()).st_mode)
    }
    assert not made.placeholders
    assert seen["nvidiactl"] == (195, 255, 0o666)
    assert seen["nvidia-modeset"] == (195, 254, 0o666)
    assert seen["nvidia-uvm-tools"] == (majors["nvidia-uvm"], 1, 0o666)
    gpus = {name: number for name, number in seen.items() if name.removeprefix("nvidia").isdigit()}
    assert gpus == {f"nvidia{gpu.minor}": (195, gpu.minor, 0o666) for gpu in made.gpus}
    switches = {f"nvidia-nvswitch{number}": number for number in range(made.description.nvswitches)}
    if switches:
        switches["nvidia-nvswitchctl"] = 255
    assert {name: number[1] for name, number in seen.items() if "nvswitch" in name} == switches
    channels = sorted(name for name in seen if "imex" in name)
    assert channels == [f"nvidia-caps-imex-channels/channel{number}" for number in made.description.imex]
    listed = (made.root / "proc/devices").read_text()
    assert f"{majors['nvidia-uvm']} nvidia-uvm\n" in listed
    assert f"{majors['nvidia-caps']} nvidia-caps\n" in listed


@pytest.mark.root
def test_each_gpu_has_its_drm_nodes_and_links_to_them(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "gb200x4")
    dri = made.root / "dev/dri"
    for gpu in made.gpus:
        nodes = sorted(path.name for path in (made.root / "sys/bus/pci/devices" / gpu.proc_name / "drm").iterdir())
        assert nodes == [f"card{gpu.index + 1}", f"renderD{128 + gpu.index}"]
        for name, kind, minor, group in (
            (nodes[0], "card", gpu.index + 1, 44),
            (nodes[1], "render", 128 + gpu.index, 105),
        ):
            info = (dri / name).stat()
            assert (info.st_rdev, info.st_gid, stat.S_IMODE(info.st_mode)) == (os.makedev(226, minor), group, 0o660)
            assert os.readlink(dri / f"by-path/pci-{gpu.proc_name}-{kind}") == f"../{name}"
    assert len(list((dri / "by-path").iterdir())) == 2 * len(made.gpus)


def test_facts_know_the_drm_nodes_by_both_ways(tmp_path: Path) -> None:
    """What the product finds on the tree, so that graphics containers have something to be given."""
    made = node.create(tmp_path / "n", "l40sx4")
    gpus = procfs.facts(str(made.root)).gpus
    assert [gpu.drm for gpu in gpus] == [(f"card{n + 1}", f"renderD{128 + n}") for n in range(4)]
    assert gpus[2].drm_links[0] == ("../card3", "/dev/dri/by-path/pci-0000:ca:00.0-card")


def test_libdxcore_leads_to_the_driver_store(tmp_path: Path) -> None:
    """Asked as NVIDIA's programs do: adapters, the driver model's version, then the store's path in two calls."""
    made = node.create(tmp_path / "n", "wsl", gpus=2)
    done = subprocess.run(
        [sys.executable, "-c", DXCORE, made.root / "usr/lib/wsl/lib/libdxcore.so"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"3000 /{tree.WSL_STORE}"] * 2
    assert (made.root / tree.WSL_STORE / "libcuda.so.1.1").is_file()


DXCORE = """
import ctypes, sys
U = ctypes.c_uint
class Adapter(ctypes.Structure):
    _fields_ = [("handle", U), ("low", U), ("high", ctypes.c_int), ("sources", U), ("moves", U)]
class List(ctypes.Structure):
    _fields_ = [("filter", ctypes.c_ulonglong), ("count", U), ("adapters", ctypes.POINTER(Adapter))]
class Query(ctypes.Structure):
    _fields_ = [("handle", U), ("type", U), ("data", ctypes.c_void_p), ("size", U)]
class Registry(ctypes.Structure):
    _fields_ = [("type", U), ("flags", U), ("name", ctypes.c_wchar * 260), ("value", U), ("index", U), ("size", U),
                ("status", U), ("output", ctypes.c_ulonglong)]
library = ctypes.CDLL(sys.argv[1])
found = List()
assert library.D3DKMTEnumAdapters3(ctypes.byref(found)) == 0
room = (Adapter * found.count)()
found.adapters = room
assert library.D3DKMTEnumAdapters3(ctypes.byref(found)) == 0
def query(handle, kind, data, size):
    assert library.D3DKMTQueryAdapterInfo(ctypes.byref(Query(handle, kind, ctypes.addressof(data), size))) == 0
for adapter in room:
    version = U()
    query(adapter.handle, 13, version, 4)
    first = Registry(type=2)
    query(adapter.handle, 48, first, ctypes.sizeof(first))
    assert first.status == 1, "too small"
    size = ctypes.sizeof(Registry) + first.size
    memory = ctypes.create_string_buffer(size)
    second = Registry.from_buffer(memory)
    second.type = 2
    query(adapter.handle, 48, memory, size)
    assert second.status == 0
    at = ctypes.addressof(memory) + Registry.output.offset
    print(version.value, ctypes.wstring_at(at, second.size // ctypes.sizeof(ctypes.c_wchar)))
assert library.D3DKMTQueryAdapterInfo(ctypes.byref(Query(1, 13, ctypes.addressof(version), 4))) != 0, "no such handle"
"""


def test_dynamic_majors_keep_clear_of_those_in_use() -> None:
    listing = "Character devices:\n  1 mem\n511 something\n509 other\n\nBlock devices:\n  7 loop\n"
    found = devices.dynamic_majors("discrete", listing)
    assert found == {"nvidia-nvswitch": 510, "nvidia-uvm": 508, "nvidia-caps": 507, "nvidia-caps-imex-channels": 506}


def test_proc_says_what_the_kernel_module_says(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "sparse", mig=["gpu1: 1g.10gb"])
    proc = made.root / "proc/driver/nvidia"
    assert f"Kernel Module  {made.description.driver}  " in (proc / "version").read_text()
    assert "ModifyDeviceFiles: 1\n" in (proc / "params").read_text()
    for gpu in made.gpus:
        text = (proc / "gpus" / gpu.bus_id.removeprefix("0000") / "information").read_text()
        facts = dict(line.split(":", 1) for line in text.splitlines())
        assert facts["Model"].strip() == gpu.name
        assert facts["GPU UUID"].strip() == gpu.uuid
        assert facts["Device Minor"].strip() == str(gpu.minor)
    mig = made.gpus[1].mig[0]
    minors = dict(
        line.split(" ") for line in (made.root / "proc/driver/nvidia-caps/mig-minors").read_text().splitlines()
    )
    access = proc / f"capabilities/gpu{made.gpus[1].minor}/mig/gi{mig.gi}/ci{mig.ci}/access"
    number = minors[f"gpu{made.gpus[1].minor}/gi{mig.gi}/ci{mig.ci}/access"]
    assert f"DeviceFileMinor: {number}\n" in access.read_text()
    assert (made.root / f"dev/nvidia-caps/nvidia-cap{number}").exists()
    # the driver's own numbering, as seen on machines with several GPUs
    assert (minors["config"], minors["gpu0/gi0/access"], minors["gpu2/gi0/access"]) == ("1", "3", "273")


def test_sys_names_the_pci_devices(made: node.SimNode) -> None:
    folder = made.root / "sys/bus/pci/devices" / made.gpus[5].proc_name
    assert (folder / "numa_node").read_text() == "1\n"
    assert (folder / "device").read_text() == "0x2330\n"


def test_wsl_and_tegra_have_their_own_trees(tmp_path: Path) -> None:
    wsl = node.create(tmp_path / "wsl", "wsl")
    assert (wsl.root / "dev/dxg").exists()
    assert not list((wsl.root / "dev").glob("nvidia*"))
    store = next((wsl.root / "usr/lib/wsl/drivers").iterdir())
    assert {"libcuda.so.1.1", "libnvidia-ml.so.1", "nvidia-smi", "nvcubins.bin"} <= {p.name for p in store.iterdir()}
    assert any(path == "/usr/lib/wsl/lib/libdxcore.so" for path in _ldconfig(wsl.root).values())
    tegra = node.create(tmp_path / "tegra", "tegra")
    csv = tegra.root / "etc/nvidia-container-runtime/host-files-for-container.d"
    for line in (csv / "drivers.csv").read_text().splitlines() + (csv / "devices.csv").read_text().splitlines():
        assert (tegra.root / line.split(", ")[1].lstrip("/")).exists(), line
    assert (tegra.root / "etc/nv_tegra_release").is_file()
    assert not list(tegra.root.rglob("libnvidia-ml*"))


def test_create_twice_gives_the_same_node(tmp_path: Path) -> None:
    one, two = node.create(tmp_path / "a", "b200x8"), node.create(tmp_path / "b", "b200x8")
    assert one.description == two.description
    assert node.load(one.folder) == one
    other = description.load_profile("h200x8")
    assert not {gpu.uuid for gpu in one.gpus} & {gpu.uuid for gpu in other.gpus}


def test_gpus_may_be_fewer_or_more_than_the_profile_has(tmp_path: Path) -> None:
    assert len(node.create(tmp_path / "two", "h100x8", gpus=2).gpus) == 2
    many = node.create(tmp_path / "many", "h100x8", gpus=20)
    assert len({gpu.bus_id for gpu in many.gpus}) == len({gpu.uuid for gpu in many.gpus}) == 20
    assert [gpu.bus_id for gpu in many.gpus] == sorted(gpu.bus_id for gpu in many.gpus)


def test_a_mesh_cut_short_keeps_links_to_those_that_are_left() -> None:
    cut = description.load_profile("dgx-1v", gpus=4)
    assert [gpu.links.count("3") for gpu in cut.gpus] == [2, 1, 2, 0]
    assert {end for gpu in cut.gpus for end in gpu.links} == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"profile": "h100"}, "unknown profile: h100 (wanted one of a100x8"),
        ({"gpus": 65}, "number of GPUs out of range: 65"),
        ({"mig": ["gpu9: 1g.10gb"]}, "MIG layout names a GPU that isn't there: gpu9"),
        ({"mig": ["gpu0: 1g.5gb"]}, "unknown MIG profile: 1g.5gb (wanted one of 1g.10gb"),
        ({"profile": "t4x1", "mig": ["gpu0: 1g.5gb"]}, "gpu0 can't do MIG: Tesla T4"),
        ({"mig": ["gpu0: 3g.40gb x3"]}, "this MIG layout doesn't fit on gpu0"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(tmp_path: Path, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("(", r"\(")):
        node.create(tmp_path / "n", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "n").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    node.create(tmp_path / "n", "t4x1")
    with pytest.raises(NodeError, match="holds a simulated node already"):
        node.create(tmp_path / "n", "l40sx4")
    assert node.load(tmp_path / "n").description.profile == "t4x1"
    with pytest.raises(ConfigError, match="no simulated node in"):
        node.load(tmp_path / "elsewhere")


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    """As "/" does, whose root/ is somebody's home."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root/letter").touch()
    with pytest.raises(NodeError, match=f"{tmp_path} isn't empty"):
        node.create(tmp_path, "t4x1")
    assert [path.name for path in tmp_path.rglob("*")] == ["root", "letter"]


@pytest.mark.root
def test_a_file_system_without_devices_is_refused(tmp_path: Path) -> None:
    code = (
        "import os, sys; from gpulet.errors import NodeError; from gpulet.sim import node\n"
        "try: node.create(sys.argv[1] + '/n', 't4x1')\n"
        "except NodeError as error: print(error)\n"
        "print(os.listdir(sys.argv[1]))\n"
    )
    script = 'mount -t tmpfs -o nodev none "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", tmp_path, sys.executable, code],
        capture_output=True,
        text=True,
    )
    assert "lies on a file system mounted nodev" in done.stdout, done.stderr
    assert done.stdout.endswith("\n[]\n"), "nothing is left there"


@pytest.mark.root
def test_without_root_plain_files_stand_in() -> None:
    code = (
        "import sys; from gpulet.sim import node; made = node.create(sys.argv[1] + '/n', 'l40sx4')\n"
        "print(made.placeholders, (made.root / 'dev/nvidia3').is_file(), len(node.load(made.folder).gpus))\n"
    )
    with tempfile.TemporaryDirectory(prefix="gp") as folder:  # pytest's own folders are closed to others than root
        Path(folder).chmod(0o777)
        # nobody, but able to read: the interpreter and the checkout may lie in a folder of root's own
        reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *reading]
        command = [*nobody, sys.executable, "-c", code, folder]
        environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "True True 4\n", done.stderr


def test_where_nothing_can_be_kept_the_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without a home."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/absent")
    with pytest.raises(NodeError, match=r"/proc/absent/gpulet/sim: .*; set XDG_CACHE_HOME"):
        node.create(tmp_path / "n", "t4x1")
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize(
    "profile", [name for name in description.profiles() if description.load_profile(name).platform == "discrete"]
)
def test_more_gpus_than_a_profile_has(profile: str) -> None:
    """Repeated GPUs keep their kind and get addresses, minors and UUIDs of their own."""
    gpus = description.load_profile(profile, gpus=20).gpus
    for what in ("bus_id", "minor", "uuid", "index"):
        assert len({getattr(gpu, what) for gpu in gpus}) == 20
