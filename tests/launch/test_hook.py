"""gpulet-hook as a program: the container CLI's arguments, and who is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpulet.launch.hook import _compat_mode, environment
from gpulet.settings import Settings
from support.containers import config, pod
from support.machine import LOW, Machine

V = "NVIDIA_VISIBLE_DEVICES"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def prestart(machine: Machine, config: dict[str, Any] | None, *flags: str, pid: int = 123, **env: str) -> Any:
    if config is not None:
        machine.make(config)
    state = json.dumps({"ociVersion": "1.0.2", "id": "x", "pid": pid, "bundle": str(machine.bundle)})
    return machine.run("gpulet-hook", *flags, "prestart", stdin=state, **env)


def composed(machine: Machine, *env: str, top: str = "", cli: str = "", rest: str = "", **more: Any) -> list[str]:
    """The arguments between the first and the last of the container CLI, which are the same for all."""
    machine.configure(top, cli=f"ldconfig = '@/sbin/nothing'\n{cli}", runtime="mode = 'legacy'", rest=rest)
    done = prestart(machine, config(*env, **more))
    assert done.returncode == 0, done.stderr
    called = machine.called("cli")
    assert called[0] == f"--root={machine.root}"
    assert called[-2:] == ["--pid=123", f"{machine.bundle}/rootfs"]
    return called[1:-2]


LIKE = ["--load-kmods", "configure", "--cuda-compat-mode=ldconfig", "--ldconfig=@/sbin/nothing"]
EVERY = ["--compat32", "--compute", "--display", "--graphics", "--ngx", "--utility", "--video"]


@pytest.mark.parametrize(
    ("env", "tail"),
    [
        ((f"{V}=all",), ["--device=all", "--compute", "--utility"]),
        ((f"{V}=none",), ["--compute", "--utility"]),
        ((f"{V}=0,0,1",), ["--device=0,1", "--compute", "--utility"]),
        (("CUDA_VERSION=11.0.3",), ["--device=all", *EVERY, "--require=cuda>=11.0"]),
        (
            ("CUDA_VERSION=11.0.3", "NVIDIA_DRIVER_CAPABILITIES="),
            ["--device=all", "--compute", "--utility", "--require=cuda>=11.0"],
        ),
        (
            (
                f"{V}=0,1",
                "NVIDIA_DRIVER_CAPABILITIES=all",
                "NVIDIA_REQUIRE_CUDA=cuda>=11.0 brand=tesla,driver>=418",
                "NVIDIA_IMEX_CHANNELS=0,2",
            ),
            ["--device=0,1", "--imex-channel=0,2", *EVERY, "--require=cuda>=11.0 brand=tesla,driver>=418"],
        ),
    ],
)
def test_the_arguments(machine: Machine, env: tuple[str, ...], tail: list[str]) -> None:
    assert composed(machine, *env) == LIKE + tail


def test_every_setting_has_its_flag_in_its_place(machine: Machine) -> None:
    cli = (
        "ldcache = '/c'\nuser = 'root:video'\nno-pivot = true\nno-cgroups = true\nload-kmods = false\ndebug = '/d'\n"
        "environment = ['X=1', 'PATH=/p']"
    )
    rest = (
        "[nvidia-container-runtime.modes.legacy]\ncuda-compat-mode = 'hook'\n"
        "[features]\ndisable-imex-channel-creation = true\n"
    )
    env = (f"{V}=0", "NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES=0")
    assert composed(machine, *env, cli=cli, rest=rest, privileged=True) == [
        "--no-create-imex-channels", "--no-pivot", "--debug=/d", "--ldcache=/c", "--user=root:video",
        "configure", "--cuda-compat-mode=disabled", "--ldconfig=@/sbin/nothing", "--no-cgroups",
        "--device=0", "--mig-config=all", "--mig-monitor=0", "--compute", "--utility",
    ]  # fmt: skip
    assert machine.environment("cli")["X"] == "1"
    assert machine.environment("cli")["PATH"] == "/p"


def test_ldconfig_is_run_only_where_configured(machine: Machine) -> None:
    tail = composed(machine, f"{V}=0", rest="[gpulet]\nloader-cache = 'ldconfig'\n")
    assert tail == [*LIKE, "--loader-cache=ldconfig", "--device=0", "--compute", "--utility"]


def test_mounts_in_the_hook(machine: Machine) -> None:
    top = "accept-nvidia-visible-devices-as-volume-mounts = true"
    tail = composed(machine, f"{V}=all", top=top, mounts=("GPU-1", "imex/3"))
    assert tail == [*LIKE, "--device=GPU-1", "--imex-channel=3", "--compute", "--utility"]


@pytest.mark.parametrize("env", [("A=1",), (f"{V}=void",), (f"{V}=",)])
def test_who_asks_for_nothing_costs_one_process(machine: Machine, env: tuple[str, ...]) -> None:
    done = prestart(machine, config(*env))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert machine.called("cli") is None


def test_the_original_value_outranks_what_the_runtime_wrote(machine: Machine) -> None:
    machine.configure(cli="visible-devices-envvars = ['CUDA_VISIBLE_DEVICES']")
    assert prestart(machine, config("CUDA_VISIBLE_DEVICES=0"), GPULET_VISIBLE_DEVICES="1").returncode == 0
    assert "--device=1" in machine.called("cli")


@pytest.mark.parametrize("value", ["1", "all", "0,1"])
def test_runtime_and_hook_agree_end_to_end(machine: Machine, value: str) -> None:
    machine.configure(cli="visible-devices-envvars = ['CUDA_VISIBLE_DEVICES']", runtime="mode = 'legacy'")
    after = machine.create(config(f"CUDA_VISIBLE_DEVICES={value}"))
    (hook,) = after["hooks"]["prestart"]
    env = dict(entry.split("=", 1) for entry in hook["env"])
    assert prestart(machine, None, **env).returncode == 0
    assert f"--device={value}" in (machine.called("cli") or [])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ((f"{V}=0", "NVIDIA_DRIVER_CAPABILITIES=compute,foo"), "unsupported capabilities found in 'compute,foo'"),
        ((f"{V}=0", "NVIDIA_MIG_CONFIG_DEVICES=all"), "cannot set MIG_CONFIG_DEVICES in non privileged container"),
        (("CUDA_VERSION=foo",), "CUDA_VERSION"),
        (("BROKEN",), "invalid environment variable"),
    ],
)
def test_what_cannot_be_given(machine: Machine, env: tuple[str, ...], message: str) -> None:
    done = prestart(machine, config(*env))
    assert done.returncode == 1
    assert message in done.stderr
    assert machine.called("cli") is None


@pytest.mark.parametrize("pid", [0, -1, True])
def test_a_state_without_a_process_is_not_the_host(machine: Machine, pid: int) -> None:
    """The container CLI takes its parent, a process of the host's, where it is given no pid."""
    done = prestart(machine, config(f"{V}=0"), pid=pid)
    assert done.returncode == 1
    assert "pid" in done.stderr
    assert machine.called("cli") is None


def test_a_long_value_makes_no_long_warning(machine: Machine) -> None:
    machine.configure(rest=f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{machine.folder}/none'\n")
    done = prestart(machine, config("CUDA_VERSION=" + "1" * 27000, annotations=pod()))
    assert "legacy image: CUDA_VERSION=111" in done.stderr
    assert len(done.stderr) < 4096


@pytest.mark.parametrize("part", ["ociVersion", "process", "root"])
def test_an_incomplete_config(machine: Machine, part: str) -> None:
    broken = config(f"{V}=0")
    del broken[part]
    done = prestart(machine, broken)
    assert done.returncode == 1
    assert "is empty in OCI spec" in done.stderr


def test_a_mode_that_is_not_legacy_names_both_ways_out(machine: Machine) -> None:
    machine.configure(runtime="mode = 'cdi'")
    done = prestart(machine, config(f"{V}=0"))
    assert done.returncode == 1
    assert "--runtime=nvidia" in done.stderr
    assert "--device nvidia.com/gpu=0" in done.stderr
    with machine.config_file.open("a") as file:
        file.write("skip-mode-detection = true\n")
    assert prestart(machine, config(f"{V}=0")).returncode == 0
    assert machine.called("cli")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [([], 2), (["foo"], 2), (["-x", "prestart"], 2), (["poststart"], 0), (["poststop"], 0), (["-version"], 0)],
)
def test_commands(machine: Machine, arguments: list[str], code: int) -> None:
    done = machine.run("gpulet-hook", *arguments)
    assert done.returncode == code
    assert ("usage:" in done.stderr) is (code == 2)


def test_a_configuration_asked_for_must_be_there(machine: Machine) -> None:
    done = prestart(machine, config(f"{V}=0"), "-config", "/nope.toml")
    assert done.returncode == 1
    assert "/nope.toml" in done.stderr
    assert prestart(machine, config(f"{V}=0"), f"--config={machine.config_file}", GPULET_CONFIG="").returncode == 0


def test_a_cli_that_is_not_there(machine: Machine) -> None:
    machine.cli.unlink()
    done = prestart(machine, config(f"{V}=0"))
    assert done.returncode == 1
    assert "nvidia-container-cli.path" in done.stderr


@pytest.mark.parametrize(
    ("mode", "allowed", "flags"),
    [
        ("ldconfig", False, ["--cuda-compat-mode=ldconfig"]),
        ("mount", False, ["--cuda-compat-mode=mount"]),
        ("disabled", True, ["--cuda-compat-mode=disabled"]),
        ("hook", True, ["--cuda-compat-mode=disabled"]),
        ("other", False, ["--cuda-compat-mode=disabled"]),
        ("other", True, []),
    ],
)
def test_forward_compatibility(mode: str, allowed: bool, flags: list[str]) -> None:
    assert _compat_mode(Settings(cuda_compat_mode=mode, allow_cuda_compat_from_container=allowed)) == flags


def test_configured_environment_wins() -> None:
    assert environment(Settings(cli_environment=("A=2", "B=")), {"A": "1", "C": "3"}) == {"A": "2", "B": "", "C": "3"}


def test_our_own_container_cli_needs_no_process_of_its_own(machine: Machine) -> None:
    """The CLI beside the hook, by whatever name it is configured, does its work within the hook; a stranger is run."""
    for configured, fails in (("gpulet-container-cli", True), ("nvidia-container-cli", True), ("cli", False)):
        (machine.folder / "bin" / configured).unlink(missing_ok=True)
        if configured == "nvidia-container-cli":
            (machine.folder / "bin" / configured).symlink_to("gpulet-container-cli")
        else:
            machine._program(configured, LOW)
        machine.cli = machine.folder / "bin" / configured
        machine.configure(runtime="mode = 'legacy'", cli="environment = ['ODD', '=ODD', '']")
        done = prestart(machine, config(f"{V}=0"), pid=2**22)
        assert (done.returncode != 0) is fails, done.stderr
        assert (machine.called("cli") is None) is fails and machine.called("gpulet-container-cli") is None
        assert not fails or done.stderr.startswith(f"{configured}: container error: "), done.stderr
