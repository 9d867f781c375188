"""The config.json that containerd wrote for a Pod with two GPUs, in each way the device plugin can answer, through the
runtime; and what is in the specification stays when something applies its device rules anew, as systemd does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpulet.sim.cgroups import hierarchies
from support import containers, driver_tree, real_container
from support.driver_tree import uuid
from support.machine import Machine
from support.real_container import Bundle

V = "NVIDIA_VISIBLE_DEVICES"
LIB = "/usr/lib/x86_64-linux-gnu"
FILES = ("ro", "nosuid", "nodev", "rbind", "rprivate")
BOTH = f"{uuid(0)},{uuid(1)}"
MEMORY = {"destination": "/dev/shm", "type": "bind", "source": "/run/shm", "options": ["rbind", "rprivate", "rw"]}


def containerd(machine: Machine, *env: str, mounts: tuple[str, ...] = (), name: str = "main") -> dict[str, Any]:
    """A config.json with the parts that containerd 2 writes for Kubernetes."""
    made = containers.config(*env, mounts=mounts, annotations=containers.pod(container=name))
    made["mounts"][1:1] = [
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": ["nosuid", "noexec"]},
        MEMORY,
        {"destination": "/etc/hosts", "type": "bind", "source": "/var/lib/kubelet/hosts", "options": ["rbind", "rw"]},
    ]
    made["linux"]["maskedPaths"] = ["/proc/kcore"]
    return made


def by_cdi(machine: Machine) -> dict[str, Any]:
    """With its own CDI: containerd has put in devices, mounts and NVIDIA's hooks, one for each step."""
    made = containerd(machine, f"NVIDIA_CTK_LIBCUDA_DIR={LIB}", f"{V}=void")
    version = driver_tree.VERSION
    names = (f"libcuda.so.{version}", f"libnvidia-ml.so.{version}")
    made["mounts"] += [
        {"destination": f"{LIB}/{name}", "source": f"{machine.root}{LIB}/{name}", "options": list(FILES)}
        for name in names
    ]
    for minor in (0, 1, 255):
        path = "/dev/nvidiactl" if minor == 255 else f"/dev/nvidia{minor}"
        node = {"path": path, "type": "c", "major": 195, "minor": minor}
        made["linux"].setdefault("devices", []).append({**node, "fileMode": 0o666})
        rule = {"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rwm"}
        made["linux"]["resources"]["devices"].append(rule)
    steps = [
        ["create-symlinks", "--link", f"libcuda.so.{version}::{LIB}/libcuda.so.1"],
        ["enable-cuda-compat", f"--host-driver-version={version}"],
        ["update-ldcache", "--folder", LIB],
        ["disable-device-node-modification"],
    ]
    program, env = "/usr/bin/nvidia-cdi-hook", ["NVIDIA_CTK_DEBUG=false"]
    hooks = [{"path": program, "args": ["nvidia-cdi-hook", *step], "env": env} for step in steps]
    return {**made, "hooks": {"createContainer": hooks}}


def gpus(config: dict[str, Any]) -> list[str]:
    nodes = [node["path"] for node in config["linux"].get("devices", [])]
    return sorted(path for path in nodes if path.removeprefix("/dev/nvidia").isdigit())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.configure(
        "accept-nvidia-visible-devices-as-volume-mounts = true", rest=f"[gpulet]\nstate-dir = '{tmp_path}/state'\n"
    )
    return made


@pytest.mark.parametrize("way", ["envvar", "volume-mounts", "cdi-cri"])
def test_each_strategys_container_gets_its_two_gpus(machine: Machine, way: str) -> None:
    before = {
        "envvar": containerd(machine, f"{V}={BOTH}"),
        "volume-mounts": containerd(machine, f"{V}=/var/run/nvidia-container-devices", mounts=(uuid(0), uuid(1))),
        "cdi-cri": by_cdi(machine),
    }[way]
    after = machine.create(before)
    assert gpus(after) == ["/dev/nvidia0", "/dev/nvidia1"]
    assert f"{V}=void" in after["process"]["env"]
    assert "hooks" not in after
    assert f"{LIB}/libcuda.so.{driver_tree.VERSION}" in [mount["destination"] for mount in after["mounts"]]
    assert MEMORY in after["mounts"]
    assert after["linux"]["maskedPaths"] == ["/proc/kcore"]
    assert (machine.bundle / f"rootfs{LIB}/libcuda.so.1").is_symlink()
    assert machine.create({}, again=True) == after


@pytest.mark.parametrize(
    ("env", "rest", "stays"),
    [
        ((), "", False),
        (("NVIDIA_DRIVER_CAPABILITIES=compute,utility",), "", False),
        (("NVIDIA_DRIVER_CAPABILITIES=video",), "", True),
        (("NVIDIA_DRIVER_CAPABILITIES=all",), "", True),
        ((), "[gpulet]\ncapabilities = 'all'\n", True),
    ],
)
def test_capabilities_narrow_what_an_engine_took_from_a_specification(
    machine: Machine, env: tuple[str, ...], rest: str, stays: bool
) -> None:
    machine.configure(rest=rest)
    made = by_cdi(machine)
    made["process"]["env"] += env
    encode = f"{LIB}/libnvidia-encode.so.{driver_tree.VERSION}"
    made["mounts"].append({"destination": encode, "source": f"{machine.root}{encode}", "options": list(FILES)})
    link = f"{driver_tree.LIBRARIES['libnvidia-encode']}"
    made["hooks"]["createContainer"][0]["args"] += ["--link", f"{encode[len(LIB) + 1 :]}::{LIB}/libencode.so.{link}"]
    after = machine.create(made)
    assert [mount["destination"] for mount in after["mounts"] if "encode" in mount["destination"]] == [encode] * stays
    assert (machine.bundle / f"rootfs{LIB}/libencode.so.1").is_symlink() is stays
    assert gpus(after) == ["/dev/nvidia0", "/dev/nvidia1"]


@pytest.mark.parametrize(
    "changed",
    [{"source": "{folder}/own.so"}, {"options": ["rbind", "rprivate", "ro"]}, {"destination": "/opt/libmine.so.1"}],
)
def test_a_mount_of_the_users_own_stays_whatever_its_name(machine: Machine, changed: dict[str, Any]) -> None:
    made = by_cdi(machine)
    encode = f"{LIB}/libnvidia-encode.so.{driver_tree.VERSION}"
    own = {"destination": encode, "source": f"{machine.root}{encode}", "options": list(FILES), **changed}
    own["source"] = own["source"].format(folder=machine.folder)
    (machine.folder / "own.so").touch()
    made["mounts"].append(own)
    assert own in machine.create(made)["mounts"]


def test_without_a_specification_nothing_is_taken_away(machine: Machine) -> None:
    made = by_cdi(machine)
    del made["hooks"]
    encode = f"{LIB}/libnvidia-encode.so.{driver_tree.VERSION}"
    made["mounts"].append({"destination": encode, "source": f"{machine.root}{encode}", "options": list(FILES)})
    assert machine.create(made)["mounts"] == made["mounts"]


def test_the_sidecar_that_sets_all_gets_none_under_policy_kubelet(machine: Machine) -> None:
    book = machine.folder / "ledger"
    entry = {
        "PodUID": containers.UID,
        "ContainerName": "main",
        "ResourceName": "nvidia.com/gpu",
        "DeviceIDs": {"-1": [uuid(1)]},
    }
    book.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 0}))
    side = containerd(machine, f"{V}=all", name="side")
    assert gpus(machine.create(side)) == ["/dev/nvidia0", "/dev/nvidia1"]
    machine.configure(rest=f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{book}'\n")
    assert machine.create(side) == side
    assert gpus(machine.create(containerd(machine, f"{V}=all"))) == ["/dev/nvidia1"]


@pytest.mark.root
def test_c12_a_specification_of_a_driver_that_is_gone(machine: Machine) -> None:
    """The driver has been upgraded; one clear line, with the command that writes the specification anew."""
    edits = {"mounts": [{"hostPath": f"{machine.root}{LIB}/libcuda.so.550.90.07", "containerPath": "/x"}]}
    device = {"name": "0", "containerEdits": {"env": ["A=1"]}}
    spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [device], "containerEdits": edits}
    (machine.folder / "cdi").mkdir()
    (machine.folder / "cdi" / "nvidia.json").write_text(json.dumps(spec))
    machine.configure(rest=f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{machine.folder}/cdi']\n")
    machine.make(containers.config(f"{V}=nvidia.com/gpu=0"))
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert machine.called("low") is None
    (line,) = done.stderr.splitlines()
    assert "libcuda.so.550.90.07: no such file" in line
    assert "gpulet cdi generate" in line


@pytest.mark.root
@pytest.mark.e2e
def test_c29_device_rules_that_are_applied_anew_keep_the_gpus(tmp_path: Path, machine: Machine) -> None:
    """`systemctl daemon-reload` has systemd write the rules that it was given at the container's start once more. What
    a hook has allowed behind the specification's back is lost then (runc issue 3708); what is in it stays."""
    devices = [mount for mount, kind in hierarchies() if kind == "cgroup" and "devices" in mount.name.split(",")]
    if not devices:
        pytest.skip("no cgroup v1 device controller here")
    given = machine.create(containers.config(f"{V}=1"))
    rules = [rule for rule in given["linux"]["resources"]["devices"] if rule["allow"]]
    assert {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rwm"} in rules
    (tmp_path / "real").mkdir()
    real = Bundle(tmp_path / "real")
    made = real_container.config(["/bin/sh", "-c", "sleep 60"])
    made["linux"] |= {"devices": given["linux"]["devices"], "cgroupsPath": f"/{real.id}"}
    made["linux"]["resources"]["devices"] += rules
    (real.bundle / "config.json").write_text(json.dumps(made))
    runc = ["runc", "--root", str(tmp_path / "runc")]
    try:
        with open(tmp_path / "out", "w") as out:
            started = subprocess.run(
                [*runc, "run", "--detach", "--bundle", str(real.bundle), real.id], stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, timeout=60, check=False,
            )  # fmt: skip
        assert started.returncode == 0, (tmp_path / "out").read_text()
        group = devices[0] / real.id
        assert _opened(runc, real.id) == {1: True, 0: False}
        (group / "devices.deny").write_text("a")
        assert _opened(runc, real.id) == {1: False, 0: False}, "the rules count here"
        for rule in rules:
            (group / "devices.allow").write_text(f"c {rule['major']}:{rule['minor']} {rule['access']}")
        assert _opened(runc, real.id) == {1: True, 0: False}
    finally:
        subprocess.run([*runc, "delete", "--force", real.id], capture_output=True, check=False)


def _opened(runc: list[str], name: str) -> dict[int, bool]:
    """Minor -> whether the cgroup lets its node through: without a driver the answer is then ENXIO, else EPERM."""
    script = "for m in 0 1; do [ -e /tmp/n$m ] || mknod /tmp/n$m c 195 $m; (: < /tmp/n$m) 2>&1; done"
    done = subprocess.run([*runc, "exec", name, "/bin/sh", "-c", script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done
    return {minor: "No such device" in line for minor, line in enumerate(lines)}
