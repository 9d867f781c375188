"""gpulet node and gpulet cdi, as a person calls them, on simulated nodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulet.commands.main import main
from gpulet.injection import cdi
from gpulet.injection.cdi_calls import HookCalls
from gpulet.sim import inject, node

pytestmark = pytest.mark.root

HOOK = "/bin/true"  # stands for a hook program that is there
Out = pytest.CaptureFixture[str]


def run(capsys: Out, *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    return capsys.readouterr().out


def generate(capsys: Out, made: node.SimNode, *words: str) -> dict[str, Any]:
    text = run(capsys, "cdi", "generate", "--driver-root", str(made.root), "--hook-path", HOOK, *words)
    spec: dict[str, Any] = yaml.safe_load(text)
    cdi.check(spec)
    return spec


def names(spec: dict[str, Any]) -> list[str]:
    return [device["name"] for device in spec["devices"]]


@pytest.fixture
def h100(tmp_path: Path) -> node.SimNode:
    return node.create(tmp_path / "node", "h100x8", gpus=2)


def test_node_as_data(capsys: Out, h100: node.SimNode) -> None:
    data = json.loads(run(capsys, "node", "--driver-root", str(h100.root), "--json"))
    assert [gpu["uuid"] for gpu in data["facts"]["gpus"]] == [gpu.uuid for gpu in h100.gpus]
    assert data["platform"]["kind"] == "discrete" and data["platform"]["evidence"]
    assert data["files"]["version"] == h100.description.driver
    assert data["trouble"] == []


def test_node_for_people(capsys: Out, h100: node.SimNode) -> None:
    inject.inject(h100.folder, "gpu 1 lost")
    text = run(capsys, "node", "--driver-root", str(h100.root), "--files")
    for word in (h100.gpus[0].uuid, h100.description.driver, "discrete", "lost", "libcuda.so", "not found"):
        assert word in text


@pytest.mark.parametrize("columns", ["60", "100", "200"])
def test_a_gpu_is_one_line_however_wide_the_terminal(
    capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    made = node.create(tmp_path / "n", "h100x8", gpus=2, mig=["gpu0: 1g.10gb x2"])
    monkeypatch.setenv("COLUMNS", columns)
    lines = run(capsys, "node", "--driver-root", str(made.root)).splitlines()
    for gpu in made.gpus:
        (line,) = (line for line in lines if gpu.uuid in line)
        assert gpu.bus_id in line and gpu.name in line
    assert sum("gi " in line and "caps " in line for line in lines) == 2
    assert max(map(len, lines)) <= max(int(columns), 160)


def test_node_tells_what_procfs_knows_where_nvml_fails(capsys: Out, h100: node.SimNode) -> None:
    inject.inject(h100.folder, "nvml init fails with 999")
    data = json.loads(run(capsys, "node", "--driver-root", str(h100.root), "--json"))
    assert data["facts"]["source"] == "procfs" and len(data["facts"]["gpus"]) == 2
    assert "999" in data["trouble"][0]
    data = json.loads(run(capsys, "node", "--driver-root", str(h100.root), "--json", "--source", "nvml", code=1))
    assert data["facts"] is None


def test_node_without_anything_still_tells_the_platform(capsys: Out, tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    data = json.loads(run(capsys, "node", "--driver-root", str(tmp_path), "--json", code=1))
    assert data["platform"]["kind"] == "none" and "NVML library not found" in data["trouble"][0]


def test_a_driver_whose_nodes_are_gone_is_a_failure_with_its_remedy(capsys: Out, h100: node.SimNode) -> None:
    for path in (h100.root / "dev").glob("nvidia?*"):
        if path.is_char_device():
            path.unlink()
    text = run(capsys, "node", "--driver-root", str(h100.root), code=1)
    remedy = f"gpulet system create-device-nodes --driver-root {h100.root}"
    wanted = f"! 2 GPUs in {h100.root}/proc/driver/nvidia, NVML lists none: no nodes in {h100.root}/dev; {remedy} makes"
    assert wanted in text
    run(capsys, *remedy.split()[1:])
    assert json.loads(run(capsys, "node", "--driver-root", str(h100.root), "--json"))["trouble"] == []


def test_keys_of_the_configuration_that_mean_nothing_are_told(
    capsys: Out, h100: node.SimNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[gpulet.policy]\ngrant = "kubelet"\n')
    monkeypatch.setenv("GPULET_CONFIG", str(config))
    words = ("node", "--driver-root", str(h100.root), "--json")
    (trouble,) = json.loads(run(capsys, *words))["trouble"]
    assert trouble.startswith(f"{config}: unknown key gpulet.policy.grant") and "gpulet.policy.grants?" in trouble
    config.write_text('[gpulet.policy]\ngrants = "kubelets"\n')
    assert "line 2: gpulet.policy.grants" in json.loads(run(capsys, *words))["trouble"][0]


def test_generate_is_the_same_from_nvml_and_from_procfs(capsys: Out, h100: node.SimNode) -> None:
    assert generate(capsys, h100) == generate(capsys, h100, "--mode", "procfs")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), ["0", "1", "{0}", "{1}", "all"]),
        (("--no-all-device",), ["0", "1", "{0}", "{1}"]),
        (("--device-name-strategy", "index,type-index"), ["0", "1", "all", "gpu0", "gpu1"]),
        (("--device-id", "1"), ["1", "{1}", "all"]),
        (("--target", "containerd=1.7"), ["0", "1", "{0}", "{1}", "all"]),
    ],
)
def test_names_and_choices(capsys: Out, h100: node.SimNode, words: tuple[str, ...], wanted: list[str]) -> None:
    uuids = [gpu.uuid for gpu in h100.gpus]
    assert sorted(names(generate(capsys, h100, *words))) == sorted(name.format(*uuids) for name in wanted)


def test_vendor_class_flags_and_disabled_hooks(capsys: Out, h100: node.SimNode) -> None:
    spec = generate(
        capsys, h100, "--vendor", "example.org", "--class", "accelerator", "--feature-flag", "disable-ipc-discoverer"
    )
    assert spec["kind"] == "example.org/accelerator"
    assert not any("socket" in mount["containerPath"] for mount in spec["containerEdits"]["mounts"])
    hooks = generate(capsys, h100, "--disable-hook", "update-ldcache,enable-cuda-compat")["containerEdits"]["hooks"]
    assert [hook["args"][1] for hook in hooks] == [
        "create-symlinks", "disable-device-node-modification", "update-application-profile",
    ]  # fmt: skip
    assert "hooks" not in generate(capsys, h100, "--disable-hook", "all")["containerEdits"]


def test_targets_stay_below_what_they_read(capsys: Out, h100: node.SimNode) -> None:
    assert generate(capsys, h100)["cdiVersion"] >= "0.6.0"  # the stamp needs that, groups need more
    old = generate(capsys, h100, "--target", "containerd=1.7")
    assert old["cdiVersion"] == "0.5.0" and "annotations" not in old
    older = generate(capsys, h100, "--target", "podman=4.9")
    assert older["cdiVersion"] == "0.6.0" and "annotations" in older
    assert main(["cdi", "generate", "--driver-root", str(h100.root), "--target", "podman=4.2"]) == 1
    assert "hostPath" in capsys.readouterr().err  # device nodes beneath another root can't be said that early


@pytest.mark.parametrize(
    ("file", "written"), [("a.json", "a.json"), ("a.yml", "a.yaml"), ("a", "a.yaml"), ("b.yaml", "b.yaml")]
)
def test_the_output_gets_a_name_that_engines_read(
    capsys: Out, tmp_path: Path, h100: node.SimNode, file: str, written: str
) -> None:
    run(capsys, "cdi", "generate", "--driver-root", str(h100.root), "--output", str(tmp_path / "out" / file))
    assert os.listdir(tmp_path / "out") == [written]
    assert cdi.Registry([str(tmp_path / "out")]).names()


def test_strict_fails_where_uvm_is_missing(capsys: Out, h100: node.SimNode, tmp_path: Path) -> None:
    (h100.root / "dev/nvidia-uvm").unlink()
    target = tmp_path / "x.json"
    words = ["cdi", "generate", "--driver-root", str(h100.root), "--output", str(target)]
    assert main([*words, "--strict"]) == 1 and not target.exists()
    assert "modprobe nvidia_uvm" in capsys.readouterr().err
    assert main(words) == 0 and target.exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--mode", "x"), 2), (("--format", "toml"), 2), (("--vendor", "1a"), 1), (("--device-name-strategy", "x"), 1),
     (("--device-id", "9"), 1), (("--target", "lxc=1"), 2), (("--mode", "gds"), 1)],
)  # fmt: skip
def test_what_is_refused(capsys: Out, h100: node.SimNode, tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    """One line that names what is wrong, and no file written."""
    target = tmp_path / "spec.yaml"
    assert main(["cdi", "generate", "--driver-root", str(h100.root), "--output", str(target), *words]) == code
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1 and (words[0] in errors[0] or words[1] in errors[0])
    assert not target.exists()


def test_other_kinds_of_nodes(capsys: Out, tmp_path: Path) -> None:
    wsl, tegra, imex = (node.create(tmp_path / name, name) for name in ("wsl", "tegra", "gb200x4"))
    assert names(generate(capsys, wsl)) == ["all"]
    assert names(generate(capsys, tegra)) == ["0", "all"]
    channels = generate(capsys, imex, "--mode", "imex")
    assert channels["kind"] == "nvidia.com/imex-channel" and names(channels) == ["0", "1", "2", "3", "all"]


def test_verify_says_what_changed_and_how_to_mend_it(capsys: Out, tmp_path: Path, h100: node.SimNode) -> None:
    folder, root = str(tmp_path / "cdi"), str(h100.root)
    path = f"{folder}/nvidia.yaml"
    run(capsys, "cdi", "generate", "--driver-root", root, "--hook-path", HOOK, "--output", path)
    assert "fits this node" in run(capsys, "cdi", "verify", "--driver-root", root, "--spec-dir", folder)
    inject.inject(h100.folder, "driver 580.65.06")
    text = run(capsys, "cdi", "verify", "--driver-root", root, "--spec-dir", folder, code=1)
    assert "580.65.06" in text and "libcuda.so." in text
    assert f"mend it with: gpulet cdi generate --driver-root {root} --hook-path {HOOK} --output {path}" in text
    data = json.loads(run(capsys, "cdi", "verify", path, "--driver-root", root, "--json", code=1))
    assert not data["ok"] and data["files"][0]["problems"]


def test_what_verify_says_mends_a_spec_whose_hook_program_is_gone(
    capsys: Out, tmp_path: Path, h100: node.SimNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr("gpulet.launch.programs.DEFAULT_PATH", ())
    monkeypatch.setattr(HookCalls, "path", f"{tmp_path}/bin/gpulet-cdi-hook")
    path, root = str(tmp_path / "cdi/nvidia.yaml"), str(h100.root)
    run(capsys, "cdi", "generate", "--driver-root", root, "--hook-path", "/absent/hook", "--output", path)
    verify = ("cdi", "verify", path, "--driver-root", root)
    write = f"gpulet cdi generate --driver-root {root} --output {path}"
    assert f"  mend it with: gpulet install --yes && {write}\n" in run(capsys, *verify, code=1)
    run(capsys, "install", "--yes", "--prefix", str(tmp_path))
    assert f"  mend it with: {write}\n" in run(capsys, *verify, code=1)
    run(capsys, *write.split()[1:])
    assert "fits this node" in run(capsys, *verify)


def test_list_validate_and_broken_files(capsys: Out, tmp_path: Path, h100: node.SimNode) -> None:
    folder = tmp_path / "cdi"
    run(capsys, "cdi", "generate", "--driver-root", str(h100.root), "--output", str(folder / "nvidia.yaml"))
    (folder / "bad.yaml").write_text("cdiVersion: 9.9.9\n")
    assert "nvidia.com/gpu=all" in run(capsys, "cdi", "list", "--spec-dir", str(folder)).splitlines()
    data = json.loads(run(capsys, "cdi", "list", "--spec-dir", str(folder), "--json"))
    assert list(data["errors"]) == [str(folder / "bad.yaml")]
    text = run(capsys, "cdi", "validate", "--spec-dir", str(folder), code=1)
    assert "nvidia.yaml: valid" in text and "bad.yaml: invalid" in text
    good = str(folder / "nvidia.yaml")
    spec = json.loads(json.dumps(cdi.read_spec(good)))
    spec["containerEdits"]["hooks"][0]["path"] = "bin/hook"
    (folder / "relative.json").write_text(json.dumps(spec))
    text = run(capsys, "cdi", "validate", str(folder / "relative.json"), code=1)
    assert text.endswith("  hooks: path 'bin/hook' is relative, low-level runtimes want an absolute path\n")
    assert "annotations" in run(capsys, "cdi", "validate", good, "--target", "podman=4.6", code=1)


def test_why_finds_what_is_nearest_and_what_stands_in_the_way(capsys: Out, tmp_path: Path, h100: node.SimNode) -> None:
    folder = str(tmp_path / "cdi")

    def why(name: str, *words: str, code: int = 1) -> str:
        return run(capsys, "cdi", "why", name, "--spec-dir", folder, *words, code=code)

    assert "not there" in why("nvidia.com/gpu=0")
    run(
        capsys,
        "cdi",
        "generate",
        "--driver-root",
        str(h100.root),
        "--hook-path",
        HOOK,
        "--output",
        f"{folder}/nvidia.yaml",
    )
    assert "can be used" in why("nvidia.com/gpu=0", code=0)
    assert "reads up to 0.5.0" in why("nvidia.com/gpu=0", "--engine", "containerd=1.7")
    assert "near it: nvidia.com/gpu=" in why("nvidia.com/gpu=7")
    text = why("k8s.device-plugin.nvidia.com/gpu=0")
    assert "another kind has that device: nvidia.com/gpu=0" in text or "near it: nvidia.com/gpu=0" in text
    assert "vendor/class=device" in why("gpu0")
    (h100.root / "dev/nvidia1").unlink()
    (h100.root / "usr/bin/nvidia-smi").unlink()
    assert "nvidia-smi" in why("nvidia.com/gpu=0")
    run(capsys, "cdi", "generate", "--driver-root", str(h100.root), "--output", f"{folder}/two.yaml")
    assert "more than once" in why("nvidia.com/gpu=0")


def test_standard_input_that_was_closed(capsys: Out, h100: node.SimNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    for words in (
        ("cdi", "transform", "root", "--from", "/a", "--to", "/b"),
        ("sim", "inject", str(h100.folder), "--script", "-"),
        ("demo", "--pod", "-"),
    ):
        assert main([*words]) == 1
        assert capsys.readouterr().err.strip().endswith("standard input can't be read: it is closed")


def test_transform(capsys: Out, tmp_path: Path, h100: node.SimNode) -> None:
    path, root = str(tmp_path / "a.json"), str(h100.root)
    run(capsys, "cdi", "generate", "--driver-root", root, "--output", path)
    run(capsys, "cdi", "transform", "root", "--from", root, "--to", "/", "--input", path, "--output", path)
    assert root not in Path(path).read_text()
    assert '"hostPath": "/usr/bin/nvidia-smi"' in Path(path).read_text()
