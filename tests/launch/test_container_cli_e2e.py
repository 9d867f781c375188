"""gpulet-container-cli configure and gpulet-cdi-hook called by a real runc, on a simulated node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from gpulet.sim import node as sim
from gpulet.sim.inject import inject
from gpulet.sim.node import SimNode
from gpulet.sim.nvmlfile import ci_cap, gi_cap
from support.namespaced import mounts, namespaced
from support.real_container import Bundle, config

pytestmark = [pytest.mark.root, pytest.mark.e2e]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


def configure(bundle: Bundle, node: SimNode, options: str) -> str:
    program = bundle.programs["gpulet-container-cli"]
    return f"exec {program} --root={node.root} configure {options} --pid=$PID {bundle.root}"


def probed(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_live_container_gets_its_gpus_and_no_other(bundle: Bundle, node: SimNode) -> None:
    before = mounts()
    hook = bundle.hook("prestart", configure(bundle, node, "--device=1,3 --compute --utility"))
    seen = probed(bundle.run(config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})))
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[1].uuid, node.gpus[3].uuid]
    assert {"/dev/nvidia1", "/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(seen["devices"])
    assert "/dev/nvidia0" not in seen["devices"]
    assert seen["libraries"]["libcuda.so.1"]
    assert {0, 2, 4, 5, 6, 7} <= set(seen["denied"])
    assert not {1, 3} & set(seen["denied"])
    flags = {item["path"]: set(item["flags"]) for item in seen["files"]}
    assert {"ro", "nosuid", "noexec"} <= flags["/dev/nvidia1"]
    assert {"ro", "nosuid", "nodev"} <= flags["/usr/bin/nvidia-smi"]
    assert mounts() == before


# beginning of the path -> the flags of every mount there; those of /proc/driver/nvidia are in injection/test_live.py,
# as a kernel without the driver has no such folder
FLAGS = {
    "/usr/": {"ro", "nosuid", "nodev"},
    "/lib/firmware/": {"ro", "nosuid", "nodev"},
    "/dev/": {"ro", "nosuid", "noexec"},
    "/run/": {"rw", "nosuid", "nodev", "noexec"},
    "/tmp/nvidia-mps": {"rw", "nosuid", "nodev", "noexec"},
    "/etc/nvidia/nvidia-application-profiles-rc.d": {"ro", "nosuid", "nodev", "noexec"},  # a file system of our own
    "/etc/": {"ro", "nosuid", "nodev"},
}


def test_every_mount_has_the_flags_of_its_kind(bundle: Bundle, node: SimNode) -> None:
    """... and is private, so that nothing mounted below it later comes to the host or from it."""
    everything = "--compute --utility --video --graphics --display --ngx"
    hook = bundle.hook("prestart", configure(bundle, node, f"--device=all {everything}"))
    plain = bundle.run(config(["/bin/cat", "/proc/self/mountinfo"])).stdout
    done = bundle.run(config(["/bin/cat", "/proc/self/mountinfo"], hooks={"prestart": [hook]}))
    assert done.returncode == 0, done.stderr
    before = {line.split()[4] for line in plain.splitlines()}
    kinds = set()
    for line in done.stdout.splitlines():
        fields = line.split()
        point, flags, optional = fields[4], set(fields[5].split(",")), fields[6 : fields.index("-")]
        if point not in before:
            kind = next(kind for kind in FLAGS if point.startswith(kind))
            kinds.add(kind)
            assert flags & {"ro", "rw", "nosuid", "nodev", "noexec"} == FLAGS[kind], line
            assert not [word for word in optional if word.startswith("shared")], line
    assert kinds >= FLAGS.keys() - {"/tmp/nvidia-mps"}


@pytest.mark.parametrize("hierarchy", ["v1", "v2"])
@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_rules_on_each_hierarchy(bundle: Bundle, node: SimNode, runtime: str, hierarchy: str) -> None:
    hook = bundle.hook("prestart", configure(bundle, node, "--device=4 --compute --utility"))
    made = config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})
    done = bundle.run(made, runtime, hierarchy)
    if "RLIM_MEMLOCK" in done.stderr:
        pytest.skip("crun can't load its own filter without CAP_SYS_RESOURCE")
    seen = probed(done)
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[4].uuid]
    assert {0, 1, 2, 3, 5, 6, 7} <= set(seen["denied"])
    assert 4 not in seen["denied"]


def test_without_cgroup_rules_the_nodes_stay_refused(bundle: Bundle, node: SimNode) -> None:
    hook = bundle.hook("prestart", configure(bundle, node, "--no-cgroups --device=1 --utility"))
    seen = probed(bundle.run(config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})))
    assert "/dev/nvidia1" in seen["devices"]
    assert 1 in seen["denied"]


def test_a_failing_hook_stops_the_container_with_one_line(bundle: Bundle, node: SimNode) -> None:
    hook = bundle.hook("prestart", configure(bundle, node, "--device=77 --utility"))
    done = bundle.run(config(["/bin/true"], hooks={"prestart": [hook]}))
    assert done.returncode != 0
    assert "device error: 77: unknown device" in done.stderr


def test_the_cdi_hook_prepares_a_container_in_one_process(bundle: Bundle, node: SimNode) -> None:
    folder = "/usr/lib/x86_64-linux-gnu"
    sources = sorted(path for path in node.library_folder.glob("lib*.so.*") if not path.is_symlink())
    binds = [
        {"destination": f"{folder}/{path.name}", "source": str(path), "type": "bind", "options": ["bind", "ro"]}
        for path in sources
    ]
    work = ["--link", f"libcuda.so.1::{folder}/libcuda.so", "--folder", folder]
    hook = {
        "path": str(bundle.programs["gpulet-cdi-hook"]),
        "args": ["gpulet-cdi-hook", "prepare", *work, "--freeze-device-nodes", "--application-profile"],
        "env": ["GPULET_HOOK=1"],
    }
    script = f"readlink {folder}/libcuda.so; readlink {folder}/libcuda.so.1; exec /usr/bin/gpulet-probe"
    made = config(["/bin/sh", "-c", script], hooks={"createContainer": [hook]}, root={"readonly": True})
    made["mounts"] += binds
    done = bundle.run(made)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first == "libcuda.so.1"
    assert second.startswith("libcuda.so.")
    assert json.loads(last)["libraries"]["libcuda.so.1"].startswith(folder)


def test_the_loader_finds_the_library_by_soname_through_the_merged_cache(bundle: Bundle, node: SimNode) -> None:
    hook = bundle.hook("prestart", configure(bundle, node, "--device=all --compute --utility"))
    seen = probed(bundle.run(config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})))
    assert seen["nvml_error"] is None
    assert len(seen["nvml"]) == 8


@pytest.mark.skipif(not Path("/sbin/ldconfig").exists(), reason="no ldconfig")
@pytest.mark.parametrize("whose", ["@/sbin/ldconfig", "/sbin/ldconfig"])
def test_a_cache_written_by_ldconfig_where_asked_for(bundle: Bundle, node: SimNode, whose: str) -> None:
    if not whose.startswith("@"):
        (bundle.root / "sbin").mkdir(exist_ok=True)
        real = Path("/sbin/ldconfig.real")  # Ubuntu's ldconfig is a shell script around it
        shutil.copy(real if real.exists() else "/sbin/ldconfig", bundle.root / "sbin/ldconfig")
    log = bundle.folder / "log"
    options = f"--loader-cache=ldconfig --ldconfig={whose} --device=all --compute --utility"
    program = f"{bundle.programs['gpulet-container-cli']} --debug={log}"
    script = configure(bundle, node, options).replace(str(bundle.programs["gpulet-container-cli"]), program)
    hook = bundle.hook("prestart", script)
    seen = probed(bundle.run(config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})))
    assert len(seen["nvml"]) == 8
    ran = [f"run {whose.lstrip('@')}{end}\n" in log.read_text() for end in ("", ".real")]
    assert any(ran)
    listed = subprocess.run(
        ["/sbin/ldconfig", "-p", "-C", str(bundle.root / "etc/ld.so.cache")], capture_output=True, text=True, check=True
    ).stdout
    assert "Cache generated by: ldconfig" in listed
    assert "libcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1" in listed


def test_a_driver_that_is_slow_to_initialise_slows_nothing(bundle: Bundle, node: SimNode) -> None:
    inject(node.folder, "nvml init takes 2s")
    try:
        command = [str(bundle.programs["gpulet-container-cli"]), f"--root={node.root}", "configure", "--no-cgroups"]
        with namespaced(bundle.root) as pid:
            start = time.monotonic()
            devices = ["--device=all", "--compute", "--utility", "--require=cuda>=11 driver>=400"]
            subprocess.run([*command, *devices, f"--pid={pid}", str(bundle.root)], check=True, timeout=20)
            assert time.monotonic() - start < 1.5
            assert f"{bundle.root}/dev/nvidia7" in mounts(pid)
    finally:
        inject(node.folder, "nvml init works")


def test_info_and_list_are_the_nodes(bundle: Bundle, node: SimNode) -> None:
    def said(*arguments: str) -> list[str]:
        command = [str(bundle.programs["gpulet-container-cli"]), f"--root={node.root}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    rows = [line.split(",") for line in said("info", "--csv")[4:]]
    assert [row[4] for row in rows] == [gpu.uuid for gpu in node.gpus]
    assert {row[6] for row in rows} == {"9.0"}
    assert [line for line in said("list", "-d", node.gpus[2].uuid) if line[-1].isdigit()] == ["/dev/nvidia2"]


def test_who_partitions_gpus_sees_the_capabilities_as_they_come(bundle: Bundle, tmp_path: Path) -> None:
    node = sim.create(tmp_path / "mig", "h100x8", gpus=2, mig=["gpu0: 1g.10gb x2"])
    hook = bundle.hook("prestart", configure(bundle, node, "--device=all --mig-config=all --utility"))
    script = "mount | grep -c nvidia-caps; ls /dev/nvidia-caps; for f in /dev/nvidia-caps/*; do cat $f; done"
    done = bundle.run(config(["/bin/sh", "-c", script], hooks={"prestart": [hook]}))
    count, *names = done.stdout.split()
    assert count == "1"
    assert set(names) == {path.name for path in (node.root / "dev/nvidia-caps").iterdir()}
    refused = [line for line in done.stderr.splitlines() if "No such device or address" not in line]
    assert len(refused) == 1  # config was asked for, not monitor
    assert "nvidia-cap2'" in refused[0]


def test_c53_a_slice_is_all_that_its_container_sees(bundle: Bundle, tmp_path: Path) -> None:
    node = sim.create(tmp_path / "mig", "h100x8", gpus=2, mig=["gpu0: 1g.10gb x2"])
    hook = bundle.hook("prestart", configure(bundle, node, "--device=0:1 --compute --utility"))
    seen = probed(bundle.run(config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})))
    assert len([gpu for gpu in seen["nvml"] if gpu["uuid"].startswith("MIG-")]) == 1
    mig = node.gpus[0].mig[1]
    caps = (gi_cap(0, mig.gi), ci_cap(0, mig.gi, mig.ci))
    assert {path for path in seen["devices"] if "nvidia" in path} == {
        *(f"/dev/{name}" for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")),
        *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in caps),
    }
    assert 1 in seen["denied"]


@pytest.mark.parametrize("libc", ["musl", "none"])
def test_c42_c43_images_without_glibc_start_and_see_their_nodes(tmp_path: Path, node: SimNode, libc: str) -> None:
    if libc == "musl" and not list(Path("/lib").glob("ld-musl-*")):
        pytest.skip("musl is not installed")
    bundle = Bundle(tmp_path, libc)
    hook = bundle.hook("prestart", configure(bundle, node, "--device=2 --compute --utility"))
    script = "ls /dev; cat /etc/ld-musl-*.path 2>/dev/null; ls -l /etc"
    done = bundle.run(config(["/bin/sh", "-c", script], hooks={"prestart": [hook]}))
    assert done.returncode == 0, done.stderr
    assert "nvidia2" in done.stdout.split()
    assert ("/usr/lib64" in done.stdout.split()) is (libc == "musl")
    assert ("ld.so.cache" in done.stdout) is (libc == "none")


def test_c44_a_read_only_container_starts(bundle: Bundle, node: SimNode) -> None:
    hook = bundle.hook("prestart", configure(bundle, node, "--device=2 --compute --utility"))
    seen = probed(bundle.run(config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]}, root={"readonly": True})))
    assert seen["libraries"]["libcuda.so.1"]


def test_a_container_in_a_user_namespace(bundle: Bundle, node: SimNode) -> None:
    for folder, folders, files in os.walk(bundle.root):
        for name in (folder, *folders, *files):
            os.lchown(Path(folder, name), 100000, 100000)
    for folder_above in list(bundle.root.parents)[:-2]:
        folder_above.chmod(0o755)
    hook = bundle.hook("prestart", configure(bundle, node, "--device=2 --compute --utility"))
    made = config(["/usr/bin/gpulet-probe"], hooks={"prestart": [hook]})
    made["linux"]["namespaces"].append({"type": "user"})
    ids = [{"containerID": 0, "hostID": 100000, "size": 65536}]
    made["linux"].update(uidMappings=ids, gidMappings=ids)
    seen = probed(bundle.run(made))
    assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[2].uuid]
    assert seen["libraries"]["libcuda.so.1"]
    for name in ("etc/ld.so.cache", "usr/lib/x86_64-linux-gnu/libcuda.so.1"):
        assert (bundle.root / name).lstat().st_uid == 100000
