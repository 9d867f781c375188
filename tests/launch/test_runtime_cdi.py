"""gpulet-runtime with CDI specifications: names, annotations, mounts, hooks.

The outcomes are those that nvidia-container-runtime 1.20 was seen to have in mode cdi; where ours differs on purpose,
the row says why.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from support.containers import config
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"
UUIDS = ("GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeee0", "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeee1")
NETWORK = """\
cdiVersion: 0.6.0
kind: example.com/net
devices:
- name: eth
  containerEdits:
    deviceNodes:
    - {path: /dev/exnet0, type: c, major: 240, minor: 3, permissions: rw}
    env: [NET=1]
"""


def node(path: str, major: int, minor: int) -> dict[str, Any]:
    return {"path": path, "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "permissions": "rwm"}


def spec(root: Path, hooks: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """A specification of two GPUs as nvidia-ctk makes it, with a library of the simulated driver."""
    devices = []
    for index, uuid in enumerate(UUIDS):
        edits = {"deviceNodes": [node(f"/dev/nvidia{index}", 195, index)]}
        devices += [{"name": name, "containerEdits": edits} for name in (str(index), uuid)]
    both = [node("/dev/nvidia0", 195, 0), node("/dev/nvidia1", 195, 1)]
    devices.append({"name": "all", "containerEdits": {"deviceNodes": both}})
    options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
    files = [f"/usr/lib/x86_64-linux-gnu/{name}.so.570.86.15" for name in ("libcuda", "libGLX_nvidia")]
    common: dict[str, Any] = {
        "env": [f"{V}=void"],
        "deviceNodes": [node("/dev/nvidiactl", 195, 255), node("/dev/nvidia-uvm", 510, 0)],
        "mounts": [{"hostPath": f"{root}{path}", "containerPath": path, "options": options} for path in files],
        "hooks": list(hooks),
    }
    return {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices, "containerEdits": common}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi" / "nvidia.json").write_text(json.dumps(spec(made.root)))
    (tmp_path / "cdi" / "net.yaml").write_text(NETWORK)
    mode(made, "cdi")
    return made


def mode(machine: Machine, name: str, top: str = "") -> None:
    cdi = f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{machine.folder}/cdi']\n"
    cdi += f"[gpulet]\nstate-dir = '{machine.folder}/state'\n"
    machine.configure(top, runtime=f"mode = '{name}'", rest=cdi)


def nodes(config: dict[str, Any]) -> list[str]:
    return sorted(entry["path"].removeprefix("/dev/") for entry in config["linux"].get("devices", []))


GPU0, GPU1 = ["nvidia-uvm", "nvidia0", "nvidiactl"], ["nvidia-uvm", "nvidia1", "nvidiactl"]
BOTH = ["nvidia-uvm", "nvidia0", "nvidia1", "nvidiactl"]
ACCEPT = "accept-nvidia-visible-devices-as-volume-mounts = true"


@pytest.mark.parametrize(
    ("env", "annotation", "mounts", "wanted"),
    [
        ("0", None, (), GPU0),
        ("0,1", None, (), BOTH),
        ("0,0", None, (), GPU0),  # the peer loses the GPU, and fails
        ("all", None, (), BOTH),
        (UUIDS[1], None, (), GPU1),
        ("nvidia.com/gpu=0", None, (), GPU0),
        ("0,nvidia.com/gpu=1", None, (), BOTH),
        ("example.com/net=eth", None, (), ["exnet0"]),
        ("void", None, (), []),
        ("", None, (), []),
        ("0", "nvidia.com/gpu=1", (), GPU1),
        ("void", "nvidia.com/gpu=1", (), GPU1),
        ("0", "nvidia.com/gpu=1,example.com/net=eth", (), ["exnet0", *GPU1]),
        ("0", None, (UUIDS[1],), GPU1),
        ("0", None, ("cdi/nvidia.com/gpu/1",), GPU1),
        ("void", "nvidia.com/gpu=0", ("1",), GPU1),  # the peer takes annotations before mounts
        ("1", "", (), GPU1),  # the peer makes a device of the empty annotation, and fails
    ],
)
def test_requests(
    machine: Machine, env: str, annotation: str | None, mounts: tuple[str, ...], wanted: list[str]
) -> None:
    mode(machine, "cdi", ACCEPT)
    notes = None if annotation is None else {"cdi.k8s.io/nvidia-device-plugin_x": annotation}
    made = config(f"{V}={env}", annotations=notes, mounts=mounts)
    after = machine.create(made)
    assert nodes(after) == wanted
    assert machine.create({}, again=True) == after
    if "nvidiactl" in wanted:
        assert f"{V}=void" in after["process"]["env"]
        assert (f"{V}={env}" in after["process"]["env"]) is (env == "void")
    if not wanted:
        assert after == made


@pytest.mark.parametrize(
    ("env", "annotation", "message"),
    [
        ("7", None, "unresolvable CDI devices nvidia.com/gpu=7"),
        ("none", None, "unresolvable CDI devices nvidia.com/gpu=none"),
        ("GPU-nope", None, "nvidia.com/gpu=GPU-nope"),
        ("0", "nvidia.com/gpu=9", "nvidia.com/gpu=9"),
        ("0", "bad", "nvidia.com/gpu=bad"),
        ("a/b=c", None, "unresolvable CDI devices a/b=c"),  # the peer panics on names of one letter
    ],
)
def test_what_no_specification_has(machine: Machine, env: str, annotation: str | None, message: str) -> None:
    path = machine.make(config(f"{V}={env}", annotations={"cdi.k8s.io/x": annotation} if annotation else None))
    before = path.read_bytes()
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert message in done.stderr
    assert path.read_bytes() == before


def test_two_files_that_define_one_device_give_it_to_nobody(machine: Machine) -> None:
    twice = {"name": "0", "containerEdits": {"env": ["X=1"]}}
    (machine.folder / "cdi" / "twice.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [twice]})
    )
    machine.make(config(f"{V}=0"))
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert "twice.json" in done.stderr
    assert nodes(machine.create(config(f"{V}=1"))) == GPU1


def test_a_broken_file_stops_only_what_needs_it(machine: Machine) -> None:
    (machine.folder / "cdi" / "broken.yaml").write_text("nonsense: [")
    assert nodes(machine.create(config(f"{V}=1"))) == GPU1


def test_names_choose_the_mode_where_it_is_auto(machine: Machine) -> None:
    mode(machine, "auto")
    assert nodes(machine.create(config(f"{V}=nvidia.com/gpu=1"))) == GPU1
    notes = {"cdi.k8s.io/x": "nvidia.com/gpu=1"}
    assert nodes(machine.create(config(f"{V}=0", annotations=notes))) == GPU1


def test_capabilities_narrow_what_a_specification_brings(machine: Machine) -> None:
    def libraries(*env: str) -> list[str]:
        after = machine.create(config(f"{V}=0", *env))
        names = [mount["destination"].rpartition("/")[2] for mount in after["mounts"]]
        return sorted(name.partition(".")[0] for name in names if ".so" in name)

    assert libraries() == ["libcuda"]
    assert libraries("NVIDIA_DRIVER_CAPABILITIES=all") == ["libGLX_nvidia", "libcuda"]
    assert libraries("NVIDIA_DRIVER_CAPABILITIES=utility") == []


def test_names_come_from_specifications_where_plain_ids_come_from_the_node(machine: Machine) -> None:
    mode(machine, "jit-cdi")
    assert "libcuda" in json.dumps(machine.create(config(f"{V}=nvidia.com/gpu={UUIDS[1]}"))["mounts"])


def test_yaml_is_parsed_once(machine: Machine) -> None:
    path = machine.folder / "cdi" / "net.yaml"
    time.sleep(2.1)  # what has just changed isn't kept
    once = machine.create(config(f"{V}=example.com/net=eth"))
    (kept,) = (machine.folder / "state").glob("cdi-*.json")
    assert machine.create(config(f"{V}=example.com/net=eth")) == once
    kept.write_text(kept.read_text().replace("NET=1", "NET=2"))  # it is this file that counts the next time
    assert "NET=2" in machine.create(config(f"{V}=example.com/net=eth"))["process"]["env"]
    path.write_text(NETWORK.replace("NET=1", "NET=3"))
    assert "NET=3" in machine.create(config(f"{V}=example.com/net=eth"))["process"]["env"]


def test_foreign_hooks_stay_and_the_stale_prestart_hook_goes(machine: Machine) -> None:
    site = {"path": "/opt/other/site-hook", "args": ["site-hook", "go"], "env": ["A=1"]}
    made = spec(machine.root, ({"hookName": "createContainer", **site},))
    (machine.folder / "cdi" / "nvidia.json").write_text(json.dumps(made))
    stale = {"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook", "prestart"]}
    own = {"path": "/opt/mine", "timeout": 3, "unknown": True}
    before = config(f"{V}=0") | {"hooks": {"prestart": [stale, own], "poststop": [own]}}
    after = machine.create(before)
    assert after["hooks"] == {"prestart": [own], "createContainer": [site], "poststop": [own]}
    assert machine.create({}, again=True) == after


def test_the_stale_prestart_hook_goes_without_a_request_too(machine: Machine) -> None:
    stale = {"path": "/usr/bin/nvidia-container-toolkit", "args": ["nvidia-container-toolkit", "prestart"]}
    after = machine.create(config("A=1") | {"hooks": {"prestart": [stale]}})
    assert after == config("A=1")


@pytest.mark.parametrize("program", ["nvidia-cdi-hook", "nvidia-ctk", "gpulet-cdi-hook"])
def test_an_engines_hooks_are_taken_over(machine: Machine, program: str) -> None:
    words = [program, "hook"] if program == "nvidia-ctk" else [program]
    folder = "/usr/lib/x86_64-linux-gnu"
    hooks = [
        {"path": f"/usr/bin/{program}", "args": [*words, *args], "env": ["NVIDIA_CTK_DEBUG=false"]}
        for args in (
            ["create-symlinks", "--link", f"libcuda.so.570.86.15::{folder}/libcuda.so.1"],
            ["enable-cuda-compat", "--host-driver-version=570.86.15"],
            ["update-ldcache", "--folder", folder],
            ["disable-device-node-modification"],
            ["update-application-profile"],
        )
    ]
    made = config(f"{V}=void") | {"hooks": {"createContainer": hooks}}
    after = machine.create(made)
    assert after == config(f"{V}=void")
    rootfs = machine.bundle / "rootfs"
    assert (rootfs / folder[1:] / "libcuda.so.1").readlink() == Path("libcuda.so.570.86.15")
    assert (rootfs / "etc/ld.so.cache").exists()
    unknown = {"path": f"/usr/bin/{program}", "args": [*words, "something-new"], "env": ["A=1"]}
    made["hooks"]["createContainer"].append(unknown)
    assert machine.create(made)["hooks"] == {"createContainer": [unknown]}


def test_legacy_leaves_an_engines_hooks(machine: Machine) -> None:
    mode(machine, "legacy")
    hook = {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache", "--folder", "/x"]}
    made = config("A=1") | {"hooks": {"createContainer": [hook]}}
    assert machine.create(made) == made


def test_requirements_are_held_in_mode_cdi_too(machine: Machine) -> None:
    machine.make(config(f"{V}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99"))
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert "unsatisfied condition: cuda>=99" in done.stderr


@pytest.fixture
def tegra(machine: Machine) -> Machine:
    """A node with a Tegra's signs and lists instead of a driver."""
    lists = machine.folder / "lists"
    lists.mkdir()
    root = machine.folder / "tegra"
    library = "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1"
    for name in (library, "/etc/nv_tegra_release", "/usr/share/more"):
        path = root / name[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (root / "dev").mkdir()
    os.mknod(root / "dev/nvhost-gpu", 0o020666, os.makedev(505, 1))
    (root / "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so").symlink_to("libcuda.so.1.1")
    link = "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so"
    (lists / "l4t.csv").write_text(f"lib, {library}\ndev, /dev/nvhost-gpu\nsym, {link}\ndir, /nowhere\n")
    (lists / "other.csv").write_text("lib, /usr/share/more\n")
    machine.root = root
    machine.configure(rest=f"[nvidia-container-runtime.modes.csv]\nmount-spec-path = '{lists}'\n")
    return machine


@pytest.mark.root
@pytest.mark.parametrize(
    ("env", "nodes_wanted", "more"),
    [
        ((f"{V}=all",), ["nvhost-gpu"], False),
        ((f"{V}=0",), ["nvhost-gpu"], False),
        ((f"{V}=tegra",), ["nvhost-gpu"], False),  # as device plugins name it, with UUIDs
        ((f"{V}=none",), [], False),  # the peer gives all GPUs
        ((f"{V}=all", "NVIDIA_REQUIRE_JETPACK=csv-mounts=all"), ["nvhost-gpu"], True),
    ],
)
def test_a_tegra_goes_by_its_lists(tegra: Machine, env: tuple[str, ...], nodes_wanted: list[str], more: bool) -> None:
    after = tegra.create(config(*env))
    assert nodes(after) == nodes_wanted
    places = [mount["destination"] for mount in after["mounts"]]
    assert "/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1" in places
    assert ("/usr/share/more" in places) is more
    assert f"{V}=void" in after["process"]["env"]
    assert (tegra.bundle / "rootfs/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so").is_symlink()


@pytest.mark.root
@pytest.mark.parametrize("mode", ["jit-cdi", "cdi"])
def test_a_tegra_goes_by_its_lists_in_every_mode_that_asks_the_node(tegra: Machine, mode: str) -> None:
    lists = f"[nvidia-container-runtime.modes.csv]\nmount-spec-path = '{tegra.folder}/lists'\n"
    tegra.configure(runtime=f"mode = '{mode}'", rest=lists)
    assert nodes(tegra.create(config(f"{V}=runtime.nvidia.com/gpu=all"))) == ["nvhost-gpu"]


@pytest.mark.root
def test_a_tegra_has_one_gpu(tegra: Machine) -> None:
    tegra.make(config(f"{V}=1"))
    done = tegra.run("gpulet-runtime", "create", "--bundle", str(tegra.bundle), "x")
    assert done.returncode == 1
    assert "unknown device of a Tegra" in done.stderr


@pytest.mark.root
def test_in_a_user_namespace_a_node_that_an_engine_took_is_bound_from_the_driver_root(machine: Machine) -> None:
    """The engine's config.json doesn't say where the specification's node is, and nobody may make one there."""
    for name, minor in (("theirs", 1), ("another", 2)):
        os.mknod(machine.root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(195, minor))
    made = config("A=1")
    made["linux"]["devices"] = [node("/dev/theirs", 195, 1), node("/dev/another", 195, 3), node("/dev/null", 1, 3)]
    assert machine.create(made) == made
    made["linux"]["namespaces"] = [{"type": "user"}]
    after = machine.create(made)
    assert nodes(after) == ["another", "null"]
    (bound,) = [mount for mount in after["mounts"] if mount not in made["mounts"]]
    assert (bound["destination"], bound["source"]) == ("/dev/theirs", f"{machine.root}/dev/theirs")
    assert machine.create({}, again=True) == after
