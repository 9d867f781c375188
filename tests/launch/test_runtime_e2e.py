"""What the runtime writes, started by a real runc on a simulated node: what the probe inside sees."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpulet.injection import cdi
from gpulet.node import driver, nvml, procfs
from gpulet.sim import node as sim
from gpulet.sim.node import SimNode
from support.namespaced import mounts
from support.real_container import Bundle, config

pytestmark = [pytest.mark.root, pytest.mark.e2e]

V = "NVIDIA_VISIBLE_DEVICES"
PROBE = ["/usr/bin/gpulet-probe"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


class Started:
    """A bundle that goes through gpulet-runtime and is then run by runc."""

    def __init__(self, folder: Path, node: SimNode) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.node = folder, node
        self.settings = folder / "config.toml"
        self.configure()

    def configure(self, rest: str = "") -> None:
        """Writes config.toml."""
        self.settings.write_text(
            f"[nvidia-container-cli]\nroot = '{self.node.root}'\n"
            f"[nvidia-container-runtime]\nruntimes = ['/bin/true']\n"
            f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{self.folder}/cdi']\n"
            f"[gpulet]\nstate-dir = '{self.folder}/state'\n{rest}\n"
        )

    def run(self, made: dict[str, Any], *env: str, libc: str = "glibc") -> dict[str, Any]:
        """What the probe tells. made: the config.json; env: more variables for it."""
        bundle = Bundle(self.folder, libc)
        made["process"]["env"] += env
        path = bundle.bundle / "config.json"
        path.write_text(json.dumps(made))
        done = subprocess.run(
            [str(bundle.programs["gpulet-runtime"]), "create", "--bundle", str(bundle.bundle), "x"],
            capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": os.environ["PATH"], "GPULET_CONFIG": str(self.settings)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.after = json.loads(path.read_text())
        ran = bundle.run(self.after)
        assert ran.returncode == 0, ran.stderr
        told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return told

    def check(self, seen: dict[str, Any], *indices: int, loaded: bool = True) -> None:
        """Holds what the probe saw against the GPUs that were to be seen."""
        every = {gpu.minor for gpu in self.node.gpus}
        wanted = {self.node.gpus[i].minor for i in indices}
        if loaded:
            assert [gpu["uuid"] for gpu in seen["nvml"]] == [self.node.gpus[i].uuid for i in indices]
        assert {f"/dev/nvidia{minor}" for minor in wanted} <= set(seen["devices"])
        assert set(seen["denied"]) >= every - wanted
        assert not set(seen["denied"]) & wanted


@pytest.fixture
def started(tmp_path: Path, node: SimNode) -> Started:
    return Started(tmp_path, node)


@pytest.mark.parametrize("libc", ["glibc", "musl", "none"])
def test_every_kind_of_image_sees_its_gpus(started: Started, libc: str) -> None:
    before = mounts()
    seen = started.run(config(PROBE), f"{V}=1,3", libc=libc)
    started.check(seen, 1, 3, loaded=libc != "none")
    assert "hooks" not in started.after
    assert mounts() == before


@pytest.mark.parametrize(("asked", "seen"), [("all", (2, 5)), ("1", (5,)), ("0", (2,))])
def test_on_a_node_that_is_a_container_there_are_the_gpus_that_it_was_given(
    tmp_path: Path, asked: str, seen: tuple[int, ...]
) -> None:
    nested = sim.create(tmp_path / "n", "h100x8")
    for gpu in nested.gpus:
        if gpu.index not in (2, 5):
            (nested.root / f"dev/nvidia{gpu.minor}").unlink()
    started = Started(tmp_path / "b", nested)
    started.check(started.run(config(PROBE), f"{V}={asked}"), *seen)


def test_a_root_that_is_read_only_in_the_container(started: Started) -> None:
    seen = started.run(config(PROBE, root={"path": "rootfs", "readonly": True}), f"{V}=2")
    started.check(seen, 2)


def test_a_mount_over_etc_leaves_the_work_to_one_hook(started: Started) -> None:
    made = config(PROBE)
    made["mounts"].append({"destination": "/etc", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]})
    seen = started.run(made, f"{V}=4")
    started.check(seen, 4)
    (hook,) = started.after["hooks"]["createContainer"]
    assert hook["args"][:2] == ["gpulet-cdi-hook", "prepare"]
    assert hook["env"]


def test_a_later_ldconfig_in_the_container_keeps_the_driver(started: Started) -> None:
    made = config(["/bin/sh", "-c", "/sbin/ldconfig && exec /usr/bin/gpulet-probe"])
    started.check(started.run(made, f"{V}=0"), 0)


def test_hooks_that_an_engine_took_from_a_specification_are_done_and_not_run(started: Started, node: SimNode) -> None:
    facts = procfs.facts(str(node.root))
    files = driver.find(str(node.root), version=facts.driver)
    spec = cdi.make_spec(facts, files, calls=cdi.HookCalls("/nowhere/nvidia-cdi-hook"))
    folder = started.folder / "cdi"
    folder.mkdir()
    cdi.write_spec(spec, str(folder / "nvidia.json"))
    seen = started.run(config(PROBE), f"{V}=nvidia.com/gpu=5")
    started.check(seen, 5)
    assert "/nowhere" not in json.dumps(started.after.get("hooks"))


def test_what_a_cdi_engine_has_put_in_already_is_finished(started: Started, tmp_path: Path) -> None:
    """containerd applies devices, mounts and NVIDIA's hooks itself; the runtime then does the hooks' work."""
    version, folder = (
        started.node.description.driver,
        str(started.node.library_folder).removeprefix(str(started.node.root)),
    )
    commands = [
        ["create-symlinks", "--link", f"libcuda.so.{version}::{folder}/libcuda.so.1"],
        ["enable-cuda-compat", f"--host-driver-version={version}"],
        ["update-ldcache", "--folder", folder],
        ["disable-device-node-modification"],
        ["update-application-profile"],
    ]
    engine = Started(tmp_path / "first", started.node)
    engine.run(config(PROBE), f"{V}=6")
    foreign = {"path": "/bin/true", "args": ["true"], "env": ["A=1"]}
    hooks = [
        {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", *command], "env": ["NVIDIA_CTK_DEBUG=false"]}
        for command in commands
    ]
    made = engine.after | {"hooks": {"createContainer": [*hooks, foreign]}}
    seen = started.run(made)
    started.check(seen, 6)
    assert started.after["hooks"] == {"createContainer": [foreign]}


def test_a_mig_device_by_its_uuid(tmp_path: Path) -> None:
    """Only NVML and specifications know these UUIDs: with a specification NVML isn't asked."""
    split = sim.create(tmp_path / "n", "h100x8", gpus=2, mig=["gpu0: 1g.10gb x7"])
    facts = nvml.facts(str(split.root))
    wanted = facts.gpus[0].mig[3]
    asked_nvml = Started(tmp_path / "a", split)
    seen = asked_nvml.run(config(PROBE), f"{V}={wanted.uuid}")
    caps = {f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (wanted.gi_minor, wanted.ci_minor)}
    assert {"/dev/nvidia0", *caps} <= set(seen["devices"])
    assert "/dev/nvidia1" not in seen["devices"]
    by_spec = Started(tmp_path / "b", split)
    (tmp_path / "b" / "cdi").mkdir()
    spec = cdi.make_spec(
        facts, driver.find(str(split.root), version=facts.driver), calls=cdi.HookCalls("/nowhere/nvidia-cdi-hook")
    )
    cdi.write_spec(spec, str(tmp_path / "b" / "cdi" / "nvidia.json"))
    (split.library_folder / "libnvidia-ml.so.1").rename(split.library_folder / "away")
    seen = by_spec.run(config(PROBE), f"{V}={wanted.uuid}")
    assert {"/dev/nvidia0", *caps} <= set(seen["devices"])
