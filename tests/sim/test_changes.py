"""MIG layouts, changes to a running node, and writing a node down."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulet.errors import ConfigError, NodeError, UsageError
from gpulet.sim import capture, description, inject, mig, node

A100 = description.load_profile("a100x8")
PROFILES = A100.mig_profiles(A100.gpus[0])


def _layout(line: str) -> list[tuple[str, int, int, int]]:
    changed = mig.apply(A100, line)
    return [(one.profile, one.gi, one.ci, one.start) for one in changed.gpus[0].mig]


def test_layouts_put_instances_where_the_driver_does() -> None:
    assert _layout("gpu0: 1g.5gb×7") == [("1g.5gb", 7 + at, 0, at) for at in range(7)]
    assert _layout("gpu0: 3g.20gb x2") == [("3g.20gb", 1, 0, 0), ("3g.20gb", 2, 0, 4)]
    assert _layout("gpu0: 7g.40gb") == [("7g.40gb", 0, 0, 0)]
    assert _layout("0: 3g.20gb, 4g.20gb") == [("3g.20gb", 2, 0, 4), ("4g.20gb", 1, 0, 0)]
    assert _layout("gpu0 1c.3g.20gb*3, 2g.10gb") == [
        ("3g.20gb", 1, 0, 0),
        ("3g.20gb", 1, 1, 0),
        ("3g.20gb", 1, 2, 0),
        ("2g.10gb", 5, 0, 4),
    ]
    assert _layout("gpu0: 3g.20gb, 2g.10gb, 1g.5gb x2")[0] == ("3g.20gb", 2, 0, 4), "or the small ones find no place"


def test_a_gpu_of_twelve_slices_numbers_its_instances_alike() -> None:
    rtx = description.load_profile("rtxpro6000x8")
    made = mig.apply(rtx, "gpu3: 2g.48gb-me, 1g.24gb+gfx x2").gpus[3].mig
    assert [(one.profile, one.gi, one.start) for one in made] == [
        ("2g.48gb-me", 1, 0),
        ("1g.24gb+gfx", 5, 6),
        ("1g.24gb+gfx", 6, 9),
    ]
    assert [one.gi for one in mig.apply(rtx, "gpu3: 4g.96gb+gfx").gpus[3].mig] == [0]


def test_one_instance_with_all_media_engines_leaves_none_to_others() -> None:
    rtx = description.load_profile("rtxpro6000x8")
    assert len(mig.apply(rtx, "gpu0: 1g.24gb+me.all, 1g.24gb-me x3").gpus[0].mig) == 4
    with pytest.raises(UsageError, match="doesn't fit on gpu0"):
        mig.apply(rtx, "gpu0: 1g.24gb+me.all, 1g.24gb")


def test_mode_on_and_empty_off_and_all() -> None:
    assert mig.apply(A100, "gpu0:").gpus[0].mig_enabled
    every = mig.apply(A100, "all: 2g.10gb x3")
    assert all(len(gpu.mig) == 3 for gpu in every.gpus)
    assert len({one.uuid for gpu in every.gpus for one in gpu.mig}) == 24
    assert mig.apply(every, "all: off") == A100


@given(st.lists(st.sampled_from(sorted(PROFILES)), max_size=8))
def test_every_accepted_layout_is_one_the_hardware_could_hold(names: list[str]) -> None:
    try:
        changed = mig.apply(A100, "gpu0: " + ", ".join(names))
    except UsageError:
        return
    made = changed.gpus[0].mig
    assert sorted(one.profile for one in made) == sorted(names)
    taken = [one.start + at for one in made for at in range(PROFILES[one.profile].size)]
    assert len(taken) == len(set(taken)) and all(0 <= at < 8 for at in taken)
    assert sum(PROFILES[name].slices for name in names) <= 7
    assert all(one.start in PROFILES[one.profile].starts for one in made)
    assert len({one.gi for one in made}) == len({one.uuid for one in made}) == len(made)


@pytest.mark.parametrize(
    "change",
    ["gpu 3 explodes", "", "gpu 99 lost", "gpu 9 xid 79", "mig gpu0 9g.1gb", "driver new", "nvml init fails with x"],
)
def test_a_change_that_can_not_be_changes_nothing(tmp_path: Path, change: str) -> None:
    made = node.create(tmp_path / "n", "a100x8")
    before = (made.folder / "node.yaml").read_bytes()
    with pytest.raises(UsageError):
        inject.inject(made.folder, change)
    assert made.control.read_bytes() == b""
    assert (made.folder / "node.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("at 1s gpu 2 xid 79\nat once gpu 2 lost\n", "script line 2 can't be read: at once gpu 2 lost"),
        ("at 1s gpu 2 xid 79\nat 2s gpu 8 lost\n", "script line 2: no such GPU: gpu 8"),
        ("gpu 2 xid 79\n", "script line 1 can't be read"),
        ("at 0.1 mig gpu0 9g.1gb\n", "script line 1: unknown MIG profile: 9g.1gb"),
    ],
)
def test_a_script_with_a_wrong_line_is_refused_as_a_whole(tmp_path: Path, script: str, words: str) -> None:
    made = node.create(tmp_path / "n", "a100x8")
    with pytest.raises(UsageError, match=words):
        inject.read_script(script, made)


def test_a_script_is_played_in_the_order_of_its_times(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "a100x8")
    script = (
        "# a bad afternoon\nat 0.4s gpu 2 lost\nat 200ms gpu 2 xid 79  # falls off the bus\n\nat 0.01min gpu 2 found\n"
    )
    steps = inject.read_script(script, made)
    assert steps == [(0.2, "gpu 2 xid 79"), (0.4, "gpu 2 lost"), (0.6, "gpu 2 found")]
    start = time.monotonic()
    done = [
        (time.monotonic() - start, change, made.control.read_text()) for _, change in inject.play(made.folder, steps)
    ]
    for (when, change, control), (due, wanted) in zip(done, steps, strict=True):
        assert change == wanted and due <= when < due + 0.15
        assert control.endswith(f"{wanted}\n"), "each is done before it is told"


def test_a_mig_change_brings_tree_and_description_along(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "a100x8", mig=["gpu2: 1g.5gb x7"])
    caps = made.root / "dev/nvidia-caps"
    library = made.library_folder / f"libnvidia-ml.so.{made.description.driver}"
    inode = library.stat().st_ino
    assert len(list(caps.iterdir())) == 2 + 14
    inject.inject(made.folder, "mig gpu2 7g.40gb")
    assert len(list(caps.iterdir())) == 2 + 2
    assert (made.root / "proc/driver/nvidia/capabilities/gpu2/mig/gi0/ci0/access").exists()
    assert not (made.root / "proc/driver/nvidia/capabilities/gpu2/mig/gi7").exists()
    assert [one.profile for one in node.load(made.folder).gpus[2].mig] == ["7g.40gb"]
    assert library.stat().st_ino != inode, "a container that started before keeps the library it has"


def test_a_simulated_node_can_be_written_down_and_laid_out_again(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "a100x8", mig=["gpu1: 3g.20gb x2"])
    capture.capture(made.root, tmp_path / "whole.yaml", redact=False)
    again = node.create(tmp_path / "m", str(tmp_path / "whole.yaml"))
    assert again.description == made.description
    capture.capture(made.root, tmp_path / "redacted.yaml")
    text = (tmp_path / "redacted.yaml").read_text()
    assert not any(gpu.uuid in text or gpu.serial in text for gpu in made.gpus)
    assert made.gpus[1].mig[0].uuid not in text
    assert made.gpus[0].bus_id in text


LAYOUTS = {
    "h100x8": ["gpu1: 1c.3g.40gb x2"],
    "rtxpro6000x8": ["gpu0: 1g.24gb+gfx x2, 2g.48gb-me", "gpu5: 2g.48gb+me.all, 1g.24gb-me", "gpu6: 4g.96gb+gfx"],
}


@pytest.mark.parametrize("profile", ["dgx-1v", "h100x8", "sparse", "gb200x4", "rtxpro6000x8", "wsl"])
def test_what_nvml_shows_is_enough_to_lay_out_the_same_node(tmp_path: Path, profile: str) -> None:
    """As on a real machine, where there is no node.yaml to copy."""
    made = node.create(tmp_path / "n", profile, mig=LAYOUTS.get(profile, []))
    (made.folder / "node.yaml").rename(tmp_path / "hidden.yaml")
    code = (
        "import sys; from pathlib import Path; from gpulet.sim import capture\n"
        "capture.capture(Path(sys.argv[1]), Path(sys.argv[2]), redact=False)"
    )
    file = tmp_path / "seen.yaml"
    subprocess.run([sys.executable, "-c", code, made.root, file], check=True)
    seen = description.load_profile(str(file))
    assert seen.driver == made.description.driver and seen.imex == made.description.imex
    assert seen.platform == made.description.platform
    assert seen.nvswitches == made.description.nvswitches
    assert seen.fabricmanager == made.description.fabricmanager
    for gpu, found in zip(made.gpus, seen.gpus, strict=True):
        for name in ("index", "minor", "uuid", "bus_id", "name", "arch", "memory", "pci", "serial", "mig", "model"):
            assert getattr(found, name) == getattr(gpu, name), name
        assert sorted(found.links) == sorted(gpu.links)
        for other, same in zip(made.gpus, seen.gpus, strict=True):
            assert seen.level(found, same) == made.description.level(gpu, other)


def test_a_gpu_that_is_lost_is_written_down_as_lost(tmp_path: Path) -> None:
    """What makes the bug report must not be what it leaves out."""
    made = node.create(tmp_path / "n", "l40sx4")
    inject.inject(made.folder, "gpu 1 lost")
    (made.folder / "node.yaml").rename(tmp_path / "hidden.yaml")
    found = capture.capture(made.root, tmp_path / "seen.yaml", redact=False)
    assert [(gpu.uuid, gpu.minor, gpu.lost) for gpu in found.gpus] == [
        (gpu.uuid, gpu.minor, gpu.index == 1) for gpu in made.gpus
    ]
    again = node.create(tmp_path / "m", str(tmp_path / "seen.yaml"))
    assert again.gpus == found.gpus


def test_where_nothing_is_to_be_seen_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(NodeError):
        capture.capture(tmp_path, tmp_path / "file.yaml")
    assert not (tmp_path / "file.yaml").exists()


def test_a_description_with_a_wrong_field_is_refused(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    text = (made.folder / "node.yaml").read_text()
    (made.folder / "node.yaml").write_text(text.replace("minor:", "major:"))
    with pytest.raises(ConfigError, match=r"node\.yaml: unknown field: gpus\.0\.major"):
        node.load(made.folder)


def test_the_command_line(tmp_path: Path) -> None:
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("gpulet")), "sim", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True)

    folder = tmp_path / "n"
    done = run("create", folder, "--profile", "a100x8", "--gpus", "3", "--mig", "gpu1: 3g.20gb", "--json")
    assert [len(gpu["mig"]) for gpu in json.loads(done.stdout)["gpus"]] == [0, 1, 0], done.stderr
    assert run("inject", folder, "gpu 2 xid 79", "gpu 2 lost").returncode == 0
    assert run("inject", folder, "gpu 2 found", "gpu 9 lost").returncode == 2, "bad input changes nothing"
    assert (folder / "control").read_text() == "gpu 2 xid 79\ngpu 2 lost\n"
    refused = run("inject", folder, "gpu 7 lost")
    assert refused.returncode == 2
    assert refused.stderr.startswith("gpulet: no such GPU: gpu 7 (wanted 0 to 2)")
    script = tmp_path / "script"
    script.write_text("at 10ms gpu 0 xid 31\n")
    played = run("inject", folder, "--script", script, "--json")
    assert json.loads(played.stdout) == {"at": 0.01, "change": "gpu 0 xid 31"}
    assert (folder / "control").read_text().endswith("gpu 0 xid 31\n")
    assert "--script FILE" in run("inject", folder).stderr
    assert run("capture", tmp_path / "c.yaml", "--driver-root", folder / "root").returncode == 0
    assert len(description.load_profile(str(tmp_path / "c.yaml")).gpus) == 3
    assert "h100x8" in run("profiles").stdout
    made = json.loads(run("rootfs", tmp_path / "r", "--libc", "none", "--json").stdout)
    assert Path(made["root"] + made["probe"]).is_file()


LIMITED = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); from gpulet.commands.main import main"
)


@pytest.mark.parametrize("command", ["create", "rootfs"])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path: Path, command: str, there: bool) -> None:
    """A file may not grow here, which is refused as a full disk is, in other words."""
    folder = tmp_path / "n"
    if there:
        folder.mkdir()
    words = ["sim", command, str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", f"{LIMITED}; sys.exit(main(sys.argv[1:]))", *words], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"gpulet: {folder} can't be filled: ") and done.stderr.count("\n") == 1
    assert list(tmp_path.rglob("*")) == ([folder] if there else [])


def test_a_full_disk_leaves_the_captured_file_as_it_was(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    file = tmp_path / "c.yaml"
    file.write_text("before")
    words = ["sim", "capture", str(file), "--driver-root", str(made.root)]
    command = [sys.executable, "-c", f"{LIMITED}; sys.exit(main(sys.argv[1:]))", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and str(file) in done.stderr
    assert file.read_text() == "before" and sorted(path.name for path in tmp_path.iterdir()) == ["c.yaml", "n"]
    link = tmp_path / "link.yaml"
    link.symlink_to("c.yaml")
    capture.capture(made.root, link)
    assert link.is_symlink() and len(description.load_profile(str(file)).gpus) == 1


def test_a_description_goes_into_a_pipe(tmp_path: Path) -> None:
    made = node.create(tmp_path / "n", "t4x1")
    program = str(Path(sys.executable).with_name("gpulet"))
    command = [program, "sim", "capture", "/dev/stdout", "--driver-root", str(made.root)]
    assert subprocess.run(command, capture_output=True, text=True).stdout.startswith("profile: t4x1\n")
