"""gpulet cdi generate: the options and variables that the peer's program and its service files use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulet.commands.main import main
from gpulet.engines.launchers import write_launchers
from gpulet.injection import cdi
from gpulet.injection.cdi_calls import HookCalls
from gpulet.sim import node

pytestmark = pytest.mark.root
Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def gb200(tmp_path_factory: pytest.TempPathFactory) -> node.SimNode:
    return node.create(tmp_path_factory.mktemp("gb200") / "n", "gb200x4")


@pytest.fixture(scope="module")
def a100(tmp_path_factory: pytest.TempPathFactory) -> node.SimNode:
    return node.create(tmp_path_factory.mktemp("a100") / "n", "a100x8", gpus=2, mig=["gpu0: 1g.5gb x2"])


def generate(made: node.SimNode, *words: str) -> int:
    return main(["cdi", "generate", "--driver-root", str(made.root), *words])


def names(path: Path) -> list[str]:
    return [device["name"] for device in cdi.read_spec(str(path))["devices"]]


def test_coherent_gpus_have_a_class_of_their_own(tmp_path: Path, gb200: node.SimNode) -> None:
    words = ("--feature-flag", "enable-coherent-annotations", "--device-name-strategy", "index")
    assert generate(gb200, *words, "--output", str(tmp_path / "nvidia.yaml")) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvidia.coherent.yaml", "nvidia.yaml"]
    registry = cdi.Registry([str(tmp_path)])
    assert [name for name in registry.names() if name.endswith("=all")] == [
        "nvidia.com/gpu.coherent=all",
        "nvidia.com/gpu=all",
    ]
    plain, coherent = (cdi.read_spec(str(tmp_path / f"nvidia{part}.yaml")) for part in ("", ".coherent"))
    assert {**coherent, "kind": plain["kind"]} == plain


def test_mig_devices_are_in_neither_class(tmp_path: Path, a100: node.SimNode) -> None:
    words = ("--feature-flags", "enable-coherent-annotations", "--device-name-strategy", "index")
    assert generate(a100, *words, "--output", str(tmp_path / "nvidia.json")) == 0
    assert names(tmp_path / "nvidia.json") == ["0:0", "0:1", "1", "all"]
    assert names(tmp_path / "nvidia.noncoherent.json") == ["1", "all"]
    assert not (tmp_path / "nvidia.coherent.json").exists()


def test_an_older_target_cannot_have_the_classes(capsys: Out, tmp_path: Path, gb200: node.SimNode) -> None:
    words = ("--feature-flag", "enable-coherent-annotations", "--target", "containerd=1.7")
    assert generate(gb200, *words, "--output", str(tmp_path / "x.yaml")) == 1
    assert "a dot in the class (needs 0.6.0)" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_flags_are_accepted_and_unknown_ones_told(capsys: Out, a100: node.SimNode) -> None:
    here = ("--hook-path", "/usr/bin/gpulet-cdi-hook")
    assert generate(a100, "--feature-flags", "disable-nvsandboxutils,disable-multiple-csv-devices", *here) == 0
    assert capsys.readouterr().err == ""
    assert generate(a100, "--feature-flag", "bogus", "--disable-hook", "no-such-hook", *here) == 0
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in told] == [
        "gpulet: unknown feature flag bogus",
        "gpulet: unknown hook no-such-hook",
    ]


def test_the_hook_program_is_the_installed_one(
    capsys: Out, tmp_path: Path, a100: node.SimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookCalls, "path", f"{tmp_path}/bin/gpulet-cdi-hook")
    monkeypatch.setenv("PATH", f"{tmp_path}/other")
    monkeypatch.setattr("gpulet.launch.programs.DEFAULT_PATH", ())

    def named(*words: str) -> tuple[set[str], str]:
        assert generate(a100, *words) == 0
        said = capsys.readouterr()
        return {hook["path"] for hook in yaml.safe_load(said.out)["containerEdits"]["hooks"]}, said.err

    paths, told = named()
    assert paths == {f"{tmp_path}/bin/gpulet-cdi-hook"}
    assert told.count("\n") == 1 and "isn't here" in told and "gpulet install" in told
    for folder in ("other", "bin"):
        write_launchers(tmp_path / folder)
        assert named() == ({f"{tmp_path}/{folder}/gpulet-cdi-hook"}, "")
    assert named("--host-driver-root", "/host") == ({f"{tmp_path}/bin/gpulet-cdi-hook"}, "")


def test_a_hook_program_without_its_folder_is_looked_up(
    capsys: Out, tmp_path: Path, a100: node.SimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/hook").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    for word in ("hook", "bin/hook"):
        spec = spec_of(capsys, a100, "--hook-path", word)
        assert {hook["path"] for hook in spec["containerEdits"]["hooks"]} == {f"{tmp_path}/bin/hook"}


def test_the_services_variables_count(
    capsys: Out, tmp_path: Path, a100: node.SimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "NVIDIA_CTK_DRIVER_ROOT": str(a100.root),
        "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH": str(tmp_path / "out.json"),
        "NVIDIA_CTK_CDI_GENERATE_DEVICE_NAME_STRATEGIES": "index,type-index",
        "NVIDIA_CTK_CDI_GENERATE_DEVICE_IDS": "1",
        "NVIDIA_CTK_CDI_GENERATE_VENDOR": "example.org",
        "NVIDIA_CTK_CDI_GENERATE_DISABLED_HOOKS": "all",
        "NVIDIA_CTK_CDI_GENERATE_NO_ALL_DEVICE": "true",
        "NVIDIA_CTK_CDI_GENERATE_FEATURE_FLAGS": "disable-ipc-discoverer,no-additional-gids-for-device-nodes",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["cdi", "generate"]) == 0
    spec = cdi.read_spec(str(tmp_path / "out.json"))
    assert (spec["kind"], names(tmp_path / "out.json")) == ("example.org/gpu", ["1", "gpu1"])
    assert "hooks" not in spec["containerEdits"] and "additionalGids" not in json.dumps(spec)
    assert main(["cdi", "generate", "--vendor", "example.com"]) == 0  # the command line counts more
    assert cdi.read_spec(str(tmp_path / "out.json"))["kind"] == "example.com/gpu"
    capsys.readouterr()


def test_a_folder_that_is_named_counts_for_nvml_too(capsys: Out, tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=2)
    apart = made.root / "lib/apart"
    (made.root / "usr/lib/x86_64-linux-gnu").rename(apart)
    (made.root / "etc/ld.so.cache").unlink()
    assert generate(made, "--output", str(tmp_path / "x.yaml")) == 1
    assert "NVML library not found" in capsys.readouterr().err
    specs = [spec_of(capsys, made, "--library-search-path", folder) for folder in ("/lib/apart", str(apart))]
    assert names_of(specs[0]) == ["0", "1", *sorted(gpu.uuid for gpu in made.gpus), "all"] and specs[0] == specs[1]
    assert spec_of(capsys, made, "--mode", "management", "--library-search-path", "/lib/apart")["devices"]


def test_a_driver_without_the_library_that_cuda_is_has_a_gap(capsys: Out, tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=1)
    for path in (made.root / "usr/lib/x86_64-linux-gnu").glob("libcuda.so*"):
        path.unlink()
    said = "compute: no libcuda.so.1 of this driver; install it, or name its folder with --library-search-path"
    assert generate(made, "--output", str(tmp_path / "x.yaml")) == 0
    assert said in capsys.readouterr().err
    assert generate(made, "--strict", "--output", str(tmp_path / "y.yaml")) == 1
    assert main(["node", "--driver-root", str(made.root), "--json"]) == 0
    trouble = json.loads(capsys.readouterr().out)["trouble"]
    assert trouble == ["compute: no libcuda.so.1 in this node's driver; install its package"]


def spec_of(capsys: Out, made: node.SimNode, *words: str) -> dict[str, Any]:
    assert generate(made, *words) == 0
    spec: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    cdi.check(spec)
    return spec


def test_a_hook_for_engines_that_close_the_folders_of_nodes(capsys: Out, a100: node.SimNode) -> None:
    hooks = spec_of(capsys, a100, "--enable-hook", "chmod")["containerEdits"]["hooks"]
    assert [hook["args"][1] for hook in hooks] == ["prepare", "chmod"]
    assert hooks[1]["args"][2:] == ["--mode", "755", "--path", "/dev/dri", "--path", "/dev/nvidia-caps"]
    assert generate(a100, "--enable-hook", "all") == 2
    hooks = spec_of(capsys, a100, "--enable-hook", "chmod", "--nvidia-ctk-path", "/usr/bin/nvidia-ctk")
    assert hooks["containerEdits"]["hooks"][-1]["args"][:3] == ["nvidia-ctk", "hook", "chmod"]


def test_a_hook_program_gets_the_hooks_that_it_knows(capsys: Out, tmp_path: Path, a100: node.SimNode) -> None:
    """By its name; a link of NVIDIA's name to ours counts as ours, where the host's files are in sight."""
    for name in ("gpulet-cdi-hook", "nvidia-cdi-hook"):
        (tmp_path / name).symlink_to("gpulet-cdi-hook" if name != "gpulet-cdi-hook" else "/bin/true")

    def hooks(*words: str) -> list[list[str]]:
        edits = spec_of(capsys, a100, *words)["containerEdits"]
        return [[hook["path"], *hook["args"][:2]] for hook in edits["hooks"]]

    link = str(tmp_path / "nvidia-cdi-hook")
    assert hooks("--nvidia-cdi-hook-path", link) == [[f"{tmp_path}/gpulet-cdi-hook", "gpulet-cdi-hook", "prepare"]]
    single = hooks("--nvidia-cdi-hook-path", link, "--host-driver-root", "/elsewhere")
    assert single[0] == [link, "nvidia-cdi-hook", "create-symlinks"] and len(single) == 5
    theirs = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"
    assert [words[2] for words in hooks("--nvidia-cdi-hook-path", theirs)] == [words[2] for words in single]


def test_ldconfigs_path_is_for_nvidias_program(capsys: Out, a100: node.SimNode) -> None:
    words = ("--ldconfig-path", "/opt/ldconfig", "--nvidia-cdi-hook-path")
    assert "/opt/ldconfig" in str(spec_of(capsys, a100, *words, "/usr/bin/nvidia-ctk"))
    assert "/opt/ldconfig" not in str(spec_of(capsys, a100, *words, "/usr/bin/gpulet-cdi-hook"))


@pytest.mark.parametrize("mode", ["nvml", "management"])
def test_hooks_are_left_out_in_each_mode(capsys: Out, a100: node.SimNode, mode: str) -> None:
    spec = spec_of(capsys, a100, "--mode", mode, "--disable-hook", "create-symlinks,update-ldcache")
    (hook,) = spec["containerEdits"]["hooks"]
    assert not {"--link", "--device-link", "--folder"} & {*hook["args"]} and "--host-driver-version" in hook["args"]
    assert "hooks" not in spec_of(capsys, a100, "--mode", mode, "--disable-hook", "all")["containerEdits"]


def test_no_device_at_all(capsys: Out, a100: node.SimNode) -> None:
    spec = spec_of(capsys, a100, "--device-id", "none")
    (only,) = spec["devices"]
    assert only == {"name": "none", "containerEdits": {"env": ["NVCT_EMPTY_DEVICE="]}}
    assert spec["containerEdits"]["mounts"]


@pytest.mark.parametrize("mode", ["imex", "management", "nvml"])
def test_every_kind_is_stamped_and_says_where_the_host_has_the_root(
    capsys: Out, gb200: node.SimNode, mode: str
) -> None:
    spec = spec_of(capsys, gb200, "--mode", mode, "--host-driver-root", "/run/nvidia/driver")
    assert "gpulet.io/boot-id" in spec["annotations"] and "gpulet.io/majors" in spec["annotations"]
    assert str(gb200.root) not in json.dumps(spec)
    nodes = [item for device in spec["devices"] for item in device["containerEdits"]["deviceNodes"]]
    assert all(item["hostPath"] == f"/run/nvidia/driver{item['path']}" for item in nodes)
    assert "annotations" not in spec_of(capsys, gb200, "--mode", mode, "--target", "containerd=1.7")


def test_the_command_that_mends_a_stale_spec_is_the_one_for_its_kind(
    capsys: Out, tmp_path: Path, gb200: node.SimNode
) -> None:
    path = str(tmp_path / "imex.yaml")
    assert generate(gb200, "--mode", "imex", "--output", path, "--host-driver-root", "/nowhere") == 0
    assert main(["cdi", "verify", path, "--driver-root", str(gb200.root)]) == 1
    wanted = f"  mend it with: gpulet cdi generate --mode imex --driver-root {gb200.root} --output {path}"
    assert capsys.readouterr().out.splitlines()[-1] == wanted


def test_tegra_as_people_and_programs_see_it(capsys: Out, tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "tegra")
    assert main(["node", "--driver-root", str(made.root), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["platform"]["kind"] == "tegra" and data["facts"]["source"] == "tegra" and data["trouble"] == []
    assert main(["node", "--driver-root", str(made.root)]) == 0
    assert "listed in /etc/nvidia-container-runtime" in capsys.readouterr().out
    spec = spec_of(capsys, made)
    assert names_of(spec) == ["0", "all"] and spec["annotations"]["gpulet.io/gpus"] == "Tegra's own GPU"
    assert names_of(spec_of(capsys, made, "--no-all-device", "--target", "podman=4.3")) == ["0"]


def names_of(spec: dict[str, Any]) -> list[str]:
    return [device["name"] for device in spec["devices"]]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--mode", "wsl"), 1),
        (("--mode", "csv"), 1),
        (("--csv.file", "/absent.csv", "--mode", "csv"), 1),
        (("--class", "a b"), 1),
        (("--hook-path", ""), 2),
        (("--hook-path", "bin/absent"), 2),
        (("--hook-path", "true", "--host-driver-root", "/host"), 2),
        (("--enable-hook", "x"), 2),
        (("--target", "podman"), 2),
        (("--output", "/proc/absent/x.yaml"), 1),
        (("--output", "/dev/full"), 2),
        (("--output", "/proc"), 2),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    capsys: Out, a100: node.SimNode, words: tuple[str, ...], code: int
) -> None:
    assert generate(a100, *words) == code
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and told.err.startswith("gpulet: ")
