"""gpulet-runtime as a program: what it makes of bundles, what it hands on, how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpulet.injection import cdi
from gpulet.node import driver, procfs
from support.containers import UID, config, pod
from support.driver_tree import uuid
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def gpus(config: dict[str, Any]) -> list[str]:
    """The GPUs' nodes in a config.json, each of which must have its rule too."""
    devices = config.get("linux", {}).get("devices", [])
    rules = config.get("linux", {}).get("resources", {}).get("devices", [])
    for node in devices:
        assert {"allow": True, "type": "c", "major": node["major"], "minor": node["minor"], "access": "rwm"} in rules
    return sorted(node["path"] for node in devices if node["path"].removeprefix("/dev/nvidia").isdigit())


def destinations(config: dict[str, Any]) -> str:
    return " ".join(mount["destination"] for mount in config["mounts"])


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ((f"{V}=1",), ["/dev/nvidia1"]),
        ((f"{V}=0,0",), ["/dev/nvidia0"]),
        ((f"{V}=all",), ["/dev/nvidia0", "/dev/nvidia1"]),
        ((f"{V}={uuid(1)}",), ["/dev/nvidia1"]),
        ((f"{V}=runtime.nvidia.com/gpu=1",), ["/dev/nvidia1"]),
        ((f"{V}=none",), []),
        (("CUDA_VERSION=11.0",), ["/dev/nvidia0", "/dev/nvidia1"]),
    ],
)
def test_gpus_go_in_with_their_driver(machine: Machine, env: tuple[str, ...], seen: list[str]) -> None:
    after = machine.create(config(*env))
    assert gpus(after) == seen
    assert "libcuda.so.570.86.15" in destinations(after)
    assert f"{V}=void" in after["process"]["env"]
    assert "hooks" not in after
    assert (machine.bundle / "rootfs/etc/ld.so.cache").exists()


def test_twice_is_once(machine: Machine) -> None:
    once = machine.create(config(f"{V}=1"))
    assert machine.create({}, again=True) == once


@pytest.mark.parametrize("env", [("A=1",), (f"{V}=void",), (f"{V}=",)])
def test_who_asks_for_nothing_is_left_alone(machine: Machine, env: tuple[str, ...]) -> None:
    path = machine.make(config(*env))
    before = path.read_bytes(), path.stat().st_ino
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.called("low")
    assert (path.read_bytes(), path.stat().st_ino) == before
    assert not (machine.folder / "log").exists()
    assert not (machine.bundle / "rootfs/etc/ld.so.cache").exists()


def test_capabilities_decide_what_is_mounted(machine: Machine) -> None:
    few = destinations(machine.create(config(f"{V}=0", "NVIDIA_DRIVER_CAPABILITIES=utility")))
    assert "libnvidia-ml" in few
    assert "libcuda" not in few
    machine.configure(rest='[gpulet]\ncapabilities = "all"\n')
    every = destinations(machine.create(config(f"{V}=0", "NVIDIA_DRIVER_CAPABILITIES=utility")))
    assert "libcuda" in every
    assert "libGLX_nvidia" in every


@pytest.mark.parametrize(
    ("hooks", "links", "cache"),
    [("'update-ldcache'", True, False), ("'create-symlinks', 'update-ldcache'", False, False), ("'all'", False, False)],
)
def test_what_hooks_would_do_is_left_out_where_configured(
    machine: Machine, hooks: str, links: bool, cache: bool
) -> None:
    machine.configure(rest=f"[nvidia-container-runtime.modes.jit-cdi]\nnvcdi-disable-hooks = [{hooks}]\n")
    assert gpus(machine.create(config(f"{V}=1"))) == ["/dev/nvidia1"]
    root = machine.bundle / "rootfs"
    assert (root / "usr/lib/x86_64-linux-gnu/libcuda.so.1").is_symlink() is links
    assert (root / "etc/ld.so.cache").exists() is cache


def test_a_pause_container_goes_straight_through(machine: Machine) -> None:
    before = config(f"{V}=all", annotations=pod(kind="sandbox"))
    assert machine.create(before) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["state", "x"],
        ["--root", "/r", "delete", "--force", "create"],
        ["exec", "x", "sh", "-c", "a b"],
        [],
        ["run", "x"],
    ],
)
def test_everything_else_goes_through_untouched(machine: Machine, arguments: list[str]) -> None:
    done = machine.run("gpulet-runtime", *arguments, NAMESPACE="k8s.io", TTRPC_ADDRESS="/run/x")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.called("low") == (arguments or [""])
    assert machine.environment("low")["TTRPC_ADDRESS"] == "/run/x"


def test_no_signal_stays_ignored(machine: Machine) -> None:
    """Python ignores SIGPIPE; a container in which it were ignored would have `yes | head` complain."""
    machine.low.write_text("#!/bin/sh\nexec grep SigIgn /proc/self/status\n")
    done = machine.run("gpulet-runtime", "state", "x")
    # what whoever started the tests had ignored (a shell's background job: SIGINT) is his to ignore
    bare = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True)
    assert done.stdout == bare.stdout


@pytest.mark.parametrize("given", [{}, {"LC_CTYPE": "C.UTF-8"}, {"LANG": "C"}, {"LC_ALL": "C"}, {"LC_CTYPE": ""}])
def test_the_low_level_runtime_has_the_engines_environment(machine: Machine, given: dict[str, str]) -> None:
    """Python sets LC_CTYPE where it finds no locale (PEP 538)."""
    machine.low.write_text("#!/bin/sh\nexec cat /proc/self/environ\n")
    expected = {"PATH": os.environ["PATH"], "GPULET_CONFIG": str(machine.config_file), **given}
    done = machine.run("gpulet-runtime", "state", "x", **given)
    seen = dict(entry.partition("=")[::2] for entry in done.stdout.split("\0") if entry)
    assert {name: seen[name] for name in seen if name not in ("PWD", "OLDPWD", "_", "SHLVL")} == expected


def test_with_a_broken_configuration_containers_can_still_be_stopped(machine: Machine) -> None:
    machine.config_file.write_text("[")
    low = machine.folder / "bin" / "low"
    low.rename(machine.folder / "bin" / "runc")
    path = f"{machine.folder}/bin:/usr/bin:/bin"
    assert machine.run("gpulet-runtime", "delete", "x", PATH=path).returncode == 0
    assert (machine.folder / "bin" / "runc.argv").read_text() == "delete\nx\n"
    machine.make(config())
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x", PATH=path)
    assert done.returncode == 1
    assert "config.toml" in done.stderr


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_failure_reaches_the_engine_and_changes_nothing(machine: Machine, form: str) -> None:
    path = machine.make(config(f"{V}=7"))
    before = path.read_bytes()
    log = machine.folder / "engine.log"
    arguments = ["--log", str(log), "--log-format", form, "create", "--bundle", str(machine.bundle), "x"]
    done = machine.run("gpulet-runtime", *arguments)
    assert done.returncode == 1
    assert machine.called("low") is None
    assert path.read_bytes() == before
    assert not (machine.bundle / "rootfs/etc/ld.so.cache").exists()
    assert len(done.stderr.splitlines()) == 1
    assert "level=error" in done.stderr
    lines = log.read_text().splitlines()
    if form == "json":
        told = [json.loads(line) for line in lines]
        assert [one["level"] for one in told] == ["error"]
        assert "7" in told[0]["msg"]
    else:
        assert lines[0].startswith('time="')
        assert "level=error msg=" in lines[0]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ((f"{V}=nvidia.com/gpu=0,1",), "mixed"),
        ((f"{V}=runtime.nvidia.com/gpu=0,1",), "mixed"),
        ((f"{V}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99"), "unsatisfied condition: cuda>=99"),
        ((f"{V}=GPU-nope",), "GPU-nope"),
        (("BROKEN",), "invalid environment variable"),
    ],
)
def test_what_cannot_be_given_starts_nothing(machine: Machine, env: tuple[str, ...], message: str) -> None:
    machine.make(config(*env))
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 1
    assert message in done.stderr
    assert machine.called("low") is None


def test_requirements_can_be_switched_off(machine: Machine) -> None:
    env = (f"{V}=0", "NVIDIA_REQUIRE_CUDA=cuda>=99")
    assert gpus(machine.create(config(*env, "NVIDIA_DISABLE_REQUIRE=true"))) == ["/dev/nvidia0"]
    machine.configure("disable-require = true")
    assert gpus(machine.create(config(*env))) == ["/dev/nvidia0"]


def test_no_low_level_runtime_lists_what_was_tried(machine: Machine) -> None:
    machine.low.unlink()
    done = machine.run("gpulet-runtime", "state", "x")
    assert done.returncode == 1
    assert f"tried {machine.low}" in done.stderr


def test_itself_is_no_low_level_runtime(machine: Machine) -> None:
    machine.low.unlink()
    machine.low.symlink_to("gpulet-runtime")
    done = machine.run("gpulet-runtime", "state", "x")
    assert "no low-level runtime" in done.stderr


def test_the_kubelets_ledger_decides(machine: Machine) -> None:
    book = machine.folder / "ledger"
    entry = {"PodUID": UID, "ContainerName": "main", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"-1": [uuid(1)]}}
    book.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 0}))
    machine.configure(rest=f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{book}'\n")
    assert gpus(machine.create(config(f"{V}=all", annotations=pod()))) == ["/dev/nvidia1"]
    assert gpus(machine.create(config(f"{V}=all", annotations=pod(container="side")))) == []
    assert "the kubelet allocated no GPU" in (machine.folder / "log").read_text()
    book.unlink()
    assert gpus(machine.create(config(f"{V}=all", annotations=pod()))) == []
    assert "can't be read" in (machine.folder / "log").read_text()


@pytest.mark.parametrize(
    ("value", "mounts", "inside"),
    [
        ("1", (), ["CUDA_VISIBLE_DEVICES=0"]),
        (uuid(1), (), [f"CUDA_VISIBLE_DEVICES={uuid(1)}"]),
        ("all", (), []),
        ("ALL", (), []),
        ("none", (), ["CUDA_VISIBLE_DEVICES="]),
        ("/var/run/nvidia-container-devices", (uuid(0),), [f"CUDA_VISIBLE_DEVICES={uuid(0)}"]),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_cuda_visible_devices_means_inside_what_cuda_reads(
    machine: Machine, value: str, mounts: tuple[str, ...], inside: list[str], mode: str
) -> None:
    machine.configure(
        "accept-nvidia-visible-devices-as-volume-mounts = true",
        cli="visible-devices-envvars = ['CUDA_VISIBLE_DEVICES']",
        runtime=f"mode = '{mode}'",
    )
    once = machine.create(config(f"CUDA_VISIBLE_DEVICES={value}", mounts=mounts))
    assert [entry for entry in once["process"]["env"] if entry.startswith("CUDA_")] == inside
    assert machine.create({}, again=True) == once  # index 1 has become 0: a second run must not take GPU 0
    if mode == "legacy":
        assert f"GPULET_VISIBLE_DEVICES={value}" in once["hooks"]["prestart"][0]["env"]


def test_legacy_adds_one_prestart_hook_with_an_environment_of_its_own(machine: Machine) -> None:
    machine.configure(runtime="mode = 'legacy'")
    once = machine.create(config(f"{V}=1"))
    (hook,) = once["hooks"]["prestart"]
    path = f"{machine.folder}/bin/gpulet-hook"
    assert (hook["path"], hook["args"]) == (path, ["gpulet-hook", "prestart"])
    names = [entry.partition("=")[0] for entry in hook["env"]]
    assert names == ["PATH", "GPULET_CONFIG"]
    assert once | {"hooks": {}} == config(f"{V}=1") | {"hooks": {}}
    assert machine.create({}, again=True) == once
    theirs = config(f"{V}=1") | {"hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook"}]}}
    assert machine.create(theirs) == theirs
    assert machine.create(config("A=1")) == config("A=1")


def test_policy_kubelet_lets_no_hook_of_the_peer_in(machine: Machine) -> None:
    """It would read NVIDIA_VISIBLE_DEVICES=all and give that."""
    entry = {"PodUID": UID, "ContainerName": "main", "ResourceName": "nvidia.com/gpu", "DeviceIDs": {"-1": [uuid(1)]}}
    book = machine.folder / "book"
    policy = f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{book}'\n"
    machine.configure(runtime="mode = 'legacy'", rest=policy)
    ours = machine.folder / "bin/gpulet-hook"
    peer = machine.folder / "bin/nvidia-container-runtime-hook"
    peer.write_text("#!/bin/sh\n")
    peer.chmod(0o755)
    text = machine.config_file.read_text()
    machine.config_file.write_text(text.replace(str(ours), str(peer)))
    asked = config(f"{V}=all", annotations=pod())
    served = asked | {"hooks": {"prestart": [{"path": str(peer)}], "poststop": [{"path": "/bin/true"}]}}
    book.write_text(json.dumps({"Data": {"PodDeviceEntries": []}}))
    assert machine.create(served)["hooks"] == {"poststop": [{"path": "/bin/true"}]}
    book.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}}))
    for one in (asked, served):
        once = machine.create(one)
        assert [hook["path"] for hook in once["hooks"]["prestart"]] == [str(ours)]
        assert machine.create({}, again=True) == once
    peer.unlink()
    peer.symlink_to("gpulet-hook")  # as `gpulet install --peer-names` makes it
    assert machine.create(asked)["hooks"]["prestart"][0]["path"] == str(peer)
    peer.unlink()
    ours.rename(ours.with_name("elsewhere"))
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x", PATH="/nowhere")
    assert "policy kubelet in mode legacy needs gpulet-hook" in done.stderr


@pytest.mark.root
def test_legacy_adds_at_once_what_the_container_cli_does_not_give(machine: Machine) -> None:
    machine.configure(runtime="mode = 'legacy'")
    os.mknod(machine.root / "dev/nvidia-nvswitchctl", 0o020666, os.makedev(235, 255))
    after = machine.create(config(f"{V}=0", "NVIDIA_NVSWITCH=enabled"))
    assert [node["path"] for node in after["linux"]["devices"]] == ["/dev/nvidia-nvswitchctl"]
    assert gpus(after) == []
    assert len(after["hooks"]["prestart"]) == 1


@pytest.mark.root
def test_legacy_adds_that_beside_an_engines_own_hook_too(machine: Machine) -> None:
    machine.configure(runtime="mode = 'legacy'")
    os.mknod(machine.root / "dev/nvidia-nvswitchctl", 0o020666, os.makedev(235, 255))
    hooks = {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}]}
    after = machine.create(config(f"{V}=0", "NVIDIA_NVSWITCH=enabled") | {"hooks": hooks})
    assert [node["path"] for node in after["linux"]["devices"]] == ["/dev/nvidia-nvswitchctl"]
    assert after["hooks"] == hooks
    assert machine.create(after) == after


@pytest.mark.parametrize(("feature", "groups"), [("", (44,)), ("no-additional-gids-for-device-nodes = true", ())])
@pytest.mark.root
def test_legacy_opens_the_nodes_for_drawing_to_the_user(
    machine: Machine, feature: str, groups: tuple[int, ...]
) -> None:
    machine.configure(runtime="mode = 'legacy'", rest=f"[features]\n{feature}\n")
    (machine.root / "dev/dri").mkdir()
    os.mknod(machine.root / "dev/dri/card1", 0o020660, os.makedev(226, 1))
    os.chown(machine.root / "dev/dri/card1", 0, 44)
    (machine.root / "sys/bus/pci/devices/0000:19:00.0/drm/card1").mkdir(parents=True)
    after = machine.create(config(f"{V}=0", "NVIDIA_DRIVER_CAPABILITIES=graphics"))
    assert [node["path"] for node in after["linux"]["devices"]] == ["/dev/dri/card1"]
    assert tuple(after["process"]["user"].get("additionalGids", ())) == groups


def test_forward_compatibility_by_hook_in_legacy(machine: Machine) -> None:
    rest = "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = 'hook'\n"
    machine.configure(runtime="mode = 'legacy'", rest=rest)
    after = machine.create(config(f"{V}=0"))
    assert list(after["hooks"]) == ["prestart"]  # weighed beneath the root at once: no other hook
    over = config(f"{V}=0")
    over["mounts"].append({"destination": "/etc", "type": "tmpfs", "source": "tmpfs"})
    (hook,) = machine.create(over)["hooks"]["createContainer"]
    assert hook["args"][1:] == ["prepare", "--host-driver-version", "570.86.15"]


def test_the_flavours_force_their_mode(machine: Machine) -> None:
    (machine.folder / "bin" / "nvidia-container-runtime.legacy").symlink_to("gpulet-runtime")
    path = machine.make(config(f"{V}=1"))
    done = machine.run("nvidia-container-runtime.legacy", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 0
    assert "prestart" in json.loads(path.read_text())["hooks"]


def test_a_link_elsewhere_finds_the_programs_beside_what_it_leads_to(machine: Machine) -> None:
    link = machine.folder / "elsewhere" / "nvidia-container-runtime"
    link.parent.mkdir()
    link.symlink_to("../bin/gpulet-runtime")
    covered = config(f"{V}=0")
    covered["mounts"].append({"destination": "/etc", "type": "tmpfs", "source": "tmpfs"})
    path = machine.make(covered)
    done = machine.run("../elsewhere/nvidia-container-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 0, done.stderr
    (hook,) = json.loads(path.read_text())["hooks"]["createContainer"]
    assert os.path.samefile(hook["path"], machine.folder / "bin" / "gpulet-cdi-hook")


@pytest.mark.parametrize(
    ("destination", "hidden"),
    [
        ("/lib/x86_64-linux-gnu", True),
        ("/lib", True),
        ("/alias/etc", True),
        ("//usr//lib/", True),
        ("usr/lib", True),
        ("/data", False),
        ("/lib/other", False),
        ("/data/etc", False),
    ],
)
def test_a_volume_that_hides_the_driver_by_another_name(machine: Machine, destination: str, hidden: bool) -> None:
    """Of a merged /usr, or of an image's own links: the low-level runtimes follow them."""
    asks = config(f"{V}=0")
    asks["mounts"].append({"destination": destination, "type": "tmpfs", "source": "tmpfs"})
    path = machine.make(asks)
    (machine.bundle / "rootfs/usr/lib/x86_64-linux-gnu").mkdir()
    (machine.bundle / "rootfs/lib").symlink_to("usr/lib")
    (machine.bundle / "rootfs/alias").symlink_to("/")
    assert machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x").returncode == 0
    assert bool(json.loads(path.read_text()).get("hooks")) is hidden


def test_the_low_level_runtime_is_the_next_of_its_name_where_the_first_is_ourselves(machine: Machine) -> None:
    folders = [machine.folder / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "runc").symlink_to(machine.folder / "bin" / "gpulet-runtime")
    for name in ("runc", "crun"):
        (folders[1] / name).write_text(f"#!/bin/sh\necho {name}\n")
        (folders[1] / name).chmod(0o755)
    machine.config_file.write_text("[nvidia-container-runtime]\nruntimes = ['runc', 'crun']\n")
    path = f"{folders[0]}:{folders[1]}:{os.environ['PATH']}"
    for _ in range(2):
        assert machine.run("gpulet-runtime", "state", "x", PATH=path).stdout == "runc\n"


def test_version(machine: Machine) -> None:
    done = machine.run("gpulet-runtime", "--version")
    assert "gpulet runtime version" in done.stdout
    assert machine.called("low") == ["--version"]


@pytest.mark.root
def test_one_line_of_log_for_a_container_with_gpus(machine: Machine) -> None:
    machine.create(config(f"{V}=1", "NVIDIA_DRIVER_CAPABILITIES=utility", annotations=pod()))
    (line,) = (machine.folder / "log").read_text().splitlines()
    for part in ("pod=default/two", "container=main", "source=environment", "devices=1", "mode=jit-cdi"):
        assert f" {part} " in line
    assert f'grant="1 by {V}"' in line
    assert [part.partition("=")[0] for part in line.split('ms="')[1][:-1].split()] == [
        "decide",
        "plan",
        "prepare",
        "write",
    ]


def test_a_requirement_of_which_nothing_is_known_is_told(machine: Machine) -> None:
    machine.create(config(f"{V}=1", "NVIDIA_REQUIRE_ARCH=arch>=7.0"))
    assert "requirement taken as met: arch>=7.0" in (machine.folder / "log").read_text()


SLOW = {
    "re", "json", "enum", "typing", "dataclasses", "argparse", "tomllib", "pathlib", "subprocess", "logging", "yaml",
    "collections", "functools", "contextlib", "tempfile", "shutil", "socket", "ctypes", "site",
}  # fmt: skip


def specification(machine: Machine) -> str:
    """A CDI specification of this machine in JSON; the lines of config.toml that name its folder."""
    facts = procfs.facts(str(machine.root))
    spec = cdi.make_spec(facts, driver.find(str(machine.root)), calls=cdi.HookCalls("/nowhere/nvidia-cdi-hook"))
    cdi.write_spec(spec, str(machine.folder / "cdi" / "nvidia.json"))
    return f"[nvidia-container-runtime.modes.cdi]\nspec-dirs = ['{machine.folder}/cdi']\n"


@pytest.mark.parametrize("mode", ["auto", "legacy", "cdi"])
def test_what_a_create_and_a_passing_command_load(machine: Machine, mode: str) -> None:
    """Each of these costs milliseconds for every container; here with the configuration compiled, as it is soon."""
    rest = f"[gpulet]\nstate-dir = '{machine.folder}/state'\n"
    machine.configure(runtime=f"mode = '{mode}'", rest=rest + (specification(machine) if mode == "cdi" else ""))
    time.sleep(2.1)  # what has just changed isn't kept
    machine.run("gpulet-runtime", "state", "x")
    machine.make(config(f"{V}=1"))
    program = (machine.folder / "bin/gpulet-runtime").read_text().partition("\n")[2]
    say = "import os\nos.execv = lambda *_: print(*sys.modules) or os._exit(sys.stdout.flush() or 0)\n"
    path = machine.folder / "bin/gpulet-watched"
    path.write_text(f"#!{sys.executable} -IS\nimport sys\n{say}{program}")
    path.chmod(0o755)
    for arguments in (["create", "--bundle", str(machine.bundle), "x"], ["state", "x"]):
        done = machine.run("gpulet-watched", *arguments)
        assert done.returncode == 0, done.stderr
        loaded = set(done.stdout.split())
        assert "gpulet.launch.runtime" in loaded
        assert not loaded & SLOW
