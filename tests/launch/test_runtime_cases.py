"""Cases that people met with NVIDIA's stack, by the number under which we keep them: the ones of the runtime.

C12 and C29 are in test_runtime_bundles.py; the hook's and the CLI's in test_cases.py; more of CDI and driver files in
injection/test_public_cases.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpulet.injection import cdi
from gpulet.node import driver, procfs
from gpulet.sim import node as sim
from gpulet.sim.node import SimNode
from support.containers import config
from support.driver_tree import uuid
from support.machine import Machine
from support.real_container import Bundle
from support.real_container import config as real_config

V = "NVIDIA_VISIBLE_DEVICES"
BOTH = ["/dev/nvidia0", "/dev/nvidia1"]
RUNTIME = "[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{0}/etc-cdi', '{0}/run-cdi']\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    for folder in ("etc-cdi", "run-cdi"):
        (tmp_path / folder).mkdir()
    return made


def configure(machine: Machine, mode: str = "auto", top: str = "") -> None:
    rest = f"[gpulet]\nstate-dir = '{machine.folder}/state'\n"
    machine.configure(top, runtime=f"mode = '{mode}'", rest=RUNTIME.format(machine.folder) + rest)


def specification(machine: Machine, path: str = "run-cdi/nvidia.json") -> dict[str, Any]:
    """This node's, as the device plugin writes it."""
    facts = procfs.facts(str(machine.root))
    spec = cdi.make_spec(facts, driver.find(str(machine.root)), calls=cdi.HookCalls("/nowhere/nvidia-cdi-hook"))
    cdi.write_spec(spec, str(machine.folder / path))
    return spec


def marked(machine: Machine, path: str, mark: str, name: str = "0") -> None:
    edits = {"env": [f"MARK={mark}"]}
    spec = {"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "devices": [{"name": name, "containerEdits": edits}]}
    (machine.folder / path).write_text(json.dumps(spec))


def refused(machine: Machine, *env: str) -> str:
    before = machine.make(config(*env)).read_bytes()
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert machine.called("low") is None
    assert (machine.bundle / "config.json").read_bytes() == before
    (line,) = done.stderr.splitlines()
    return line


def gpus(config: dict[str, Any]) -> list[str]:
    nodes = [node["path"] for node in config["linux"].get("devices", [])]
    return sorted(path for path in nodes if path.removeprefix("/dev/nvidia").isdigit())


def told(machine: Machine) -> str:
    return (machine.folder / "log").read_text()


# -- CDI specifications


def test_c05_all_is_in_the_plugins_own_specification(machine: Machine) -> None:
    configure(machine, "cdi")
    specification(machine)
    assert gpus(machine.create(config(f"{V}=all"))) == BOTH


def test_c08_a_name_in_two_files_of_one_folder(machine: Machine) -> None:
    configure(machine)
    marked(machine, "etc-cdi/nvidia.json", "a")
    marked(machine, "etc-cdi/nvidia-old.json", "b")
    marked(machine, "etc-cdi/other.json", "c", name="1")
    line = refused(machine, f"{V}=nvidia.com/gpu=0")
    assert "etc-cdi/nvidia.json" in line
    assert "etc-cdi/nvidia-old.json" in line
    assert "MARK=c" in machine.create(config(f"{V}=nvidia.com/gpu=1"))["process"]["env"]


def test_c09_a_name_in_two_folders(machine: Machine) -> None:
    configure(machine)
    marked(machine, "etc-cdi/nvidia.json", "old")
    marked(machine, "run-cdi/nvidia.json", "new")
    assert "MARK=new" in machine.create(config(f"{V}=nvidia.com/gpu=0"))["process"]["env"]


def test_c10_a_broken_file_is_named_with_its_reason(machine: Machine) -> None:
    configure(machine)
    marked(machine, "etc-cdi/good.json", "good", name="1")
    (machine.folder / "etc-cdi/bad.yaml").write_text(
        "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\nunknown: 1\ndevices: []\n"
    )
    line = refused(machine, f"{V}=nvidia.com/gpu=0")
    assert "unresolvable CDI devices nvidia.com/gpu=0" in line
    assert "etc-cdi/bad.yaml" in line
    assert "unknown" in line
    assert f"{machine.folder}/etc-cdi {machine.folder}/run-cdi" in line
    assert "MARK=good" in machine.create(config(f"{V}=nvidia.com/gpu=1"))["process"]["env"]


# -- what a container asks for


@pytest.mark.parametrize("value", [None, "", "void"])
def test_c32_nothing_asked_for_nothing_changed(machine: Machine, value: str | None) -> None:
    before = config(*([] if value is None else [f"{V}={value}"]))
    assert machine.create(before) == before


@pytest.mark.parametrize(
    ("value", "seen"),
    [("none", []), ("0,1", BOTH), (uuid(1), BOTH[1:]), (uuid(1)[:12], BOTH[1:]), ("all", BOTH)],
)
def test_c32_values(machine: Machine, value: str, seen: list[str]) -> None:
    after = machine.create(config(f"{V}={value}"))
    assert gpus(after) == seen
    assert any("libcuda.so." in mount["destination"] for mount in after["mounts"])


@pytest.mark.parametrize(("value", "says"), [("GPU-0000000", "ambiguous"), ("GPU-ffff", uuid(0)), ("7", uuid(1))])
def test_c32_what_names_nothing_or_too_much_lists_what_there_is(machine: Machine, value: str, says: str) -> None:
    line = refused(machine, f"{V}={value}")
    assert value in line
    assert says in line or (says == "ambiguous" and uuid(0) in line and uuid(1) in line)


LEGACY = "CUDA_VERSION=8.0.61"


def test_c34_a_legacy_image_gets_all_and_no_imex_channel(machine: Machine) -> None:
    after = machine.create(config(LEGACY))
    assert gpus(after) == BOTH
    assert any("libGLX_nvidia" in mount["destination"] for mount in after["mounts"])
    assert not any("imex" in node["path"] for node in after["linux"]["devices"])
    assert "the image counts as asking for all GPUs" in told(machine)


def test_c34_a_hardened_node_gives_a_legacy_image_nothing(machine: Machine) -> None:
    configure(machine, top="accept-nvidia-visible-devices-envvar-when-unprivileged = false")
    assert machine.create(config(LEGACY)) == config(LEGACY)
    assert gpus(machine.create(config(LEGACY, privileged=True))) == BOTH


@pytest.mark.parametrize("mode", ["auto", "jit-cdi", "cdi", "legacy"])
def test_c35_what_swarm_assigned_counts_in_every_mode(machine: Machine, mode: str) -> None:
    configure(machine, mode, "swarm-resource = 'DOCKER_RESOURCE_GPU'")
    specification(machine)
    after = machine.create(config(f"DOCKER_RESOURCE_GPU={uuid(1)}", f"{V}=all"))
    if mode == "legacy":
        assert [hook["args"][1] for hook in after["hooks"]["prestart"]] == ["prestart"]
        state = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": os.getpid(), "bundle": str(machine.bundle)})
        machine.run("gpulet-hook", "prestart", stdin=state)
        assert f"--device={uuid(1)}" in (machine.called("cli") or [])
    else:
        assert gpus(after) == BOTH[1:]


def test_c35_a_resource_of_another_name_is_not_all(machine: Machine) -> None:
    configure(machine, top="swarm-resource = 'DOCKER_RESOURCE_GPU'")
    before = config(f"DOCKER_RESOURCE_NVIDIA-GPU={uuid(1)}", f"{V}=all")
    assert machine.create(before) == before
    assert "DOCKER_RESOURCE_NVIDIA-GPU" in told(machine)
    assert "swarm-resource (DOCKER_RESOURCE_GPU)" in told(machine)


def test_c36_the_value_that_the_kubelet_adds_stands_over_the_images(machine: Machine) -> None:
    after = machine.create(config(f"{V}=all", f"{V}={uuid(1)}"))
    assert gpus(after) == BOTH[1:]
    assert [entry for entry in after["process"]["env"] if entry.startswith(V)] == [f"{V}=void"]


def test_c36_no_gpu_asked_of_kubernetes_and_an_image_that_says_all(machine: Machine) -> None:
    configure(machine, top="accept-nvidia-visible-devices-envvar-when-unprivileged = false")
    assert machine.create(config(f"{V}=all")) == config(f"{V}=all")
    assert "the container isn't privileged" in told(machine)


# -- images


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8", mig=["gpu0: 1g.10gb x7"])


def probed(folder: Path, node: SimNode, libc: str, *env: str, readonly: bool = False) -> tuple[Path, dict[str, Any]]:
    """An image's root after the runtime, and what the probe tells inside a real container."""
    bundle = Bundle(folder, libc)
    (folder / "config.toml").write_text(
        f"[nvidia-container-cli]\nroot = '{node.root}'\n[nvidia-container-runtime]\nruntimes = ['/bin/true']\n"
        f"[gpulet]\nstate-dir = '{folder}/state'\n"
    )
    made = real_config(["/usr/bin/gpulet-probe"], root={"path": "rootfs", "readonly": readonly})
    made["process"]["env"] += env
    path = bundle.bundle / "config.json"
    path.write_text(json.dumps(made))
    import subprocess

    program = str(bundle.programs["gpulet-runtime"])
    done = subprocess.run(
        [program, "create", "--bundle", str(bundle.bundle), "x"], capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "GPULET_CONFIG": f"{folder}/config.toml"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = bundle.run(json.loads(path.read_text()))
    assert ran.returncode == 0, ran.stderr
    return bundle.root, json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.root
@pytest.mark.e2e
class TestImages:
    """With a real low-level runtime."""

    def test_c42_musl_gets_its_path_file(self, tmp_path: Path, node: SimNode) -> None:
        root, seen = probed(tmp_path, node, "musl", f"{V}=1")
        assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[1].uuid]
        (path,) = (root / "etc").glob("ld-musl-*.path")
        assert {"/lib", "/usr/local/lib", "/usr/lib"} < set(path.read_text().split())

    def test_c43_an_image_without_loader_files(self, tmp_path: Path, node: SimNode) -> None:
        root, seen = probed(tmp_path, node, "none", f"{V}=1")
        assert f"/dev/nvidia{node.gpus[1].minor}" in seen["devices"]
        assert (root / "etc/ld.so.cache").is_file()
        assert (root / "etc/ld.so.conf.d").is_dir()

    def test_c44_a_read_only_root(self, tmp_path: Path, node: SimNode) -> None:
        _root, seen = probed(tmp_path, node, "glibc", f"{V}=2", readonly=True)
        assert [gpu["uuid"] for gpu in seen["nvml"]] == [node.gpus[2].uuid]

    def test_c53_a_slice_has_its_own_capabilities_alone(self, tmp_path: Path, node: SimNode) -> None:
        from gpulet.node import nvml

        slices = nvml.facts(str(node.root)).gpus[0].mig
        mine, others = slices[2], [one for one in slices if one != slices[2]]
        _root, seen = probed(tmp_path, node, "glibc", f"{V}={mine.uuid}")
        assert {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (mine.gi_minor, mine.ci_minor)} <= set(
            seen["devices"]
        )
        assert not {f"/dev/nvidia-caps/nvidia-cap{one.gi_minor}" for one in others} & set(seen["devices"])


# -- capabilities, IMEX


@pytest.mark.parametrize(
    ("value", "there", "absent"),
    [
        (None, ["libcuda.so", "libnvidia-ml"], ["libnvcuvid", "libGLX_nvidia"]),
        ("video", ["libnvcuvid", "libnvidia-encode"], ["libGLX_nvidia"]),
        ("graphics", ["libGLX_nvidia", "nvidia_icd.json"], ["libnvcuvid"]),
        ("all", ["libcuda.so", "libnvcuvid", "libGLX_nvidia", "nvidia_icd.json"], []),
    ],
)
def test_c47_c48_capabilities_choose_the_files(
    machine: Machine, value: str | None, there: list[str], absent: list[str]
) -> None:
    env = [] if value is None else [f"NVIDIA_DRIVER_CAPABILITIES={value}"]
    mounted = " ".join(mount["destination"] for mount in machine.create(config(f"{V}=0", *env))["mounts"])
    assert [part for part in there if part not in mounted] == []
    assert [part for part in absent if part in mounted] == []


def test_c47_a_misspelt_capability(machine: Machine) -> None:
    env = (f"{V}=0", "NVIDIA_DRIVER_CAPABILITIES=compute,vidoe")
    configure(machine, "legacy")
    assert "vidoe" in refused(machine, *env)
    configure(machine)
    machine.create(config(*env))
    assert "vidoe: none of compat32,compute,display,graphics,ngx,utility,video, left out" in told(machine)


def test_c47_a_host_without_a_capabilitys_libraries(machine: Machine) -> None:
    """Distributions pack parts of a driver apart: said each time, also where the answer is remembered."""
    for name in ("libnvcuvid", "libnvidia-encode", "libnvidia-opticalflow", "libvdpau_nvidia"):
        for path in machine.root.rglob(f"{name}.so*"):
            path.unlink()
    for _ in range(2):
        machine.create(config(f"{V}=0", "NVIDIA_DRIVER_CAPABILITIES=utility,video"))
    assert told(machine).count("capability video: no file of it in this node's driver") == 2
    assert "capability utility" not in told(machine)


@pytest.mark.root
@pytest.mark.parametrize("asked", ["", "all", "compute,utility"])
def test_c47_a_host_without_the_library_that_cuda_is(machine: Machine, asked: str) -> None:
    """The container starts, and other files of the capability go in, so the log must say what is wrong."""
    for path in machine.root.rglob("libcuda.so*"):
        path.unlink()
    machine.create(config(f"{V}=0", *([f"NVIDIA_DRIVER_CAPABILITIES={asked}"] if asked else [])))
    assert "capability compute: no libcuda.so.1 in this node's driver; install its package" in told(machine)
    assert told(machine).count("level=warning") == 1


@pytest.mark.root
@pytest.mark.parametrize(
    ("value", "seen"), [("0,1", ["channel0", "channel1"]), ("bogus", None), ("2048", None), ("-1", None)]
)
def test_c49_imex_channels(machine: Machine, value: str, seen: list[str] | None) -> None:
    (machine.root / "dev/nvidia-caps-imex-channels").mkdir()
    for minor in (0, 1):
        os.mknod(machine.root / f"dev/nvidia-caps-imex-channels/channel{minor}", 0o020666, os.makedev(510, minor))
    env = (f"{V}=0", f"NVIDIA_IMEX_CHANNELS={value}")
    if seen is None:
        assert value in refused(machine, *env)
    else:
        nodes = [node["path"] for node in machine.create(config(*env))["linux"]["devices"]]
        assert [path.rpartition("/")[2] for path in nodes if "imex" in path] == seen
