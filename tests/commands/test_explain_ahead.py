"""`gpulet explain` beside the runtime, on roots and bundles where not all can be done: the same way round, or the same
words of refusal, and nothing is changed by telling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulet.commands.main import main
from gpulet.errors import BundleError
from support.containers import config, pod
from support.machine import Machine

pytestmark = pytest.mark.root  # ldconfig -r, mounts, other users' folders

V = "NVIDIA_VISIBLE_DEVICES"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
BARE = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")  # root by name alone: another's folder isn't ours to write


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    one = Machine(tmp_path)
    one.configure(rest=f"[gpulet]\nstate-dir = '{tmp_path}/state'\n")
    one.make(config(f"{V}=1"))
    (one.bundle / "rootfs" / LIBRARIES).mkdir()
    root = str(one.bundle / "rootfs")
    subprocess.run(["/sbin/ldconfig", "-r", root, "-C", "/etc/ld.so.cache", "-X", "/usr/lib"], check=True)
    return one


class Both:
    """What explain tells of a bundle, and what the runtime then does with it. around: a command that starts both."""

    def __init__(self, machine: Machine, *around: str, program: str = "gpulet-runtime") -> None:
        runtime = str(machine.folder / "bin" / program)
        environ = {"PATH": os.environ["PATH"], "GPULET_CONFIG": str(machine.config_file)}
        code = "import sys; from gpulet.commands.main import main; sys.exit(main())"
        before = seen(machine.bundle)
        told, self.text = (
            subprocess.run(
                [*around, sys.executable, "-c", code, "explain", "bundle", str(machine.bundle), "--runtime", runtime,
                 "--config", str(machine.config_file), *form],
                capture_output=True, text=True, timeout=60, check=False,
            )
            for form in (("--json",), ())
        )  # fmt: skip
        assert seen(machine.bundle) == before
        done = subprocess.run(
            [*around, runtime, "create", "--bundle", str(machine.bundle), "x"],
            env=environ, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        self.data: dict[str, Any] = json.loads(told.stdout, parse_constant=pytest.fail)
        self.after = (machine.bundle / "config.json").read_text()
        self.error = told.stderr.removeprefix("gpulet: ").rstrip("\n")
        self.runtime_error = json.loads(done.stderr.partition(" msg=")[2]) if done.returncode else ""
        assert (told.returncode, self.error) == (done.returncode, self.runtime_error)
        assert self.data["refused"] == self.error

    def agree(self) -> dict[str, Any]:
        """What is told of a bundle that starts."""
        assert self.error == ""
        assert self.data["config_json"]["after"] == json.loads(self.after)
        return self.data


def seen(bundle: Path) -> dict[str, object]:
    """All that lies in a bundle, as it is."""
    found = {path: path.lstat() for path in bundle.rglob("*")}
    return {str(path): (it.st_mode, it.st_ino, it.st_uid, it.st_mtime_ns, it.st_size) for path, it in found.items()}


def read_only(path: Path) -> tuple[str, ...]:
    """A command in whose mount namespace a path is read-only."""
    script = f'mount --bind {path} {path} && mount -o remount,ro,bind {path} && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


@pytest.mark.parametrize("flavour", ["cdi", "legacy"])
def test_the_name_of_a_link_to_the_runtime_chooses_the_mode(machine: Machine, flavour: str) -> None:
    name = f"nvidia-container-runtime.{flavour}"
    (machine.folder / "bin" / name).symlink_to("gpulet-runtime")
    both = Both(machine, program=name)
    assert both.data["mode"] == flavour
    if flavour == "legacy":
        assert "prestart" in both.agree()["config_json"]["after"]["hooks"]


@pytest.mark.parametrize("folder", ["etc", "usr/lib", LIBRARIES])
def test_a_folder_of_another_user_leaves_the_work_to_a_hook(machine: Machine, folder: str) -> None:
    os.chown(machine.bundle / "rootfs" / folder, 65534, 65534)
    missing = folder == "usr/lib"
    if missing:
        (machine.bundle / "rootfs" / LIBRARIES).rmdir()
    told = Both(machine, *BARE).agree()
    assert [hook["args"][1] for hook in told["config_json"]["after"]["hooks"]["createContainer"]] == ["prepare"]
    (note,) = told["notes"]
    assert note.startswith("make folder /usr/lib/" if missing else f"write /{folder}/")
    assert note.endswith("Permission denied: the work beneath the root is left to a hook")


def test_a_root_of_another_user_where_nothing_can_be_given_away(machine: Machine) -> None:
    """Its folders are open to everybody, but what is made in them couldn't belong to the container's root."""
    root = machine.bundle / "rootfs"
    for folder in (root, root / "etc", root / LIBRARIES):
        folder.chmod(0o777)
    os.chown(root, 65534, 65534)
    (note,) = Both(machine, *BARE).agree()["notes"]
    assert "Operation not permitted" in note


@pytest.mark.parametrize("folder", ["etc", "usr/lib"])
def test_a_folder_of_the_root_that_is_read_only_has_the_cache_mounted(machine: Machine, folder: str) -> None:
    told = Both(machine, *read_only(machine.bundle / "rootfs" / folder)).agree()
    assert "/etc/ld.so.cache" in [mount["destination"] for mount in told["config_json"]["after"]["mounts"]]
    assert not told["rootfs"]["links"]


@pytest.mark.parametrize("place", ["etc/ld.so.cache", f"{LIBRARIES}/libcuda.so.1"])
def test_what_somebody_mounted_where_we_would_write_stays(machine: Machine, place: str) -> None:
    path = machine.bundle / "rootfs" / place
    path.touch()
    script = f'mount --bind /dev/null {path} && exec "$@"'
    assert Both(machine, "unshare", "--mount", "sh", "-c", script, "sh").agree()["notes"] == []


def no_root(machine: Machine) -> None:
    machine.make(config(f"{V}=1") | {"root": {}})


def root_gone(machine: Machine) -> None:
    machine.make(config(f"{V}=1") | {"root": {"path": "gone"}})


def root_a_file(machine: Machine) -> None:
    (machine.bundle / "file").touch()
    machine.make(config(f"{V}=1") | {"root": {"path": "file"}})


def a_folder_for_a_link(machine: Machine) -> None:
    (machine.bundle / "rootfs" / LIBRARIES / "libcuda.so").mkdir()


def etc_a_file(machine: Machine) -> None:
    (machine.bundle / "rootfs/etc").rename(machine.bundle / "rootfs/aside")
    (machine.bundle / "rootfs/etc").touch()


def libraries_a_file(machine: Machine) -> None:
    (machine.bundle / "rootfs" / LIBRARIES).rmdir()
    (machine.bundle / "rootfs" / LIBRARIES).touch()


def nothing_low(machine: Machine) -> None:
    machine.config_file.write_text(machine.config_file.read_text().replace(str(machine.low), "/nothere"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_root, "open root file system: No such file or directory"),
        (root_gone, "gone: No such file or directory"),
        (root_a_file, "file: Not a directory"),
        (a_folder_for_a_link, "libcuda.so: a folder, device or pipe is there"),
        (etc_a_file, "open folder /etc: Not a directory"),
        (libraries_a_file, f"open folder /{LIBRARIES}: Not a directory"),
        (nothing_low, "no low-level runtime: tried /nothere"),
    ],
)
def test_what_the_runtime_refuses_is_refused_in_its_words(
    machine: Machine, spoil: Callable[[Machine], None], words: str
) -> None:
    spoil(machine)
    both = Both(machine)
    assert words in both.error
    assert both.data["config_json"]["changed"] is False
    assert "/dev/nvidia1" in both.text.stdout  # what would go in is told all the same
    assert "The runtime refuses this" in both.text.stdout
    assert len(both.text.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", ["another's folder", "another's file", "read-only", "covered"])
def test_a_config_that_cant_be_replaced(machine: Machine, how: str) -> None:
    path = machine.bundle / "config.json"
    around: tuple[str, ...] = BARE
    if how.startswith("another"):
        os.chown(path if how.endswith("file") else machine.bundle, 65534, 65534)
    elif how == "read-only":
        around = read_only(machine.bundle)
    else:
        around = ("unshare", "--mount", "sh", "-c", f'mount --bind {path} {path} && exec "$@"', "sh")
    both = Both(machine, *around)
    assert "config.json" in both.error
    assert "(wanted a file to replace)" in both.error
    machine.make(config("A=1"))
    assert Both(machine, *around).agree()["config_json"]["changed"] is False


@pytest.mark.parametrize("namespaces", [[], [{"type": "user"}]], ids=["made", "bound"])
def test_a_bundle_that_has_started_says_what_it_has(machine: Machine, namespaces: list[dict[str, str]]) -> None:
    made = json.loads((machine.bundle / "config.json").read_text())
    made["linux"]["namespaces"] = namespaces
    machine.make(made)
    assert Both(machine).agree()["prepared"] == []
    both = Both(machine)
    assert "/dev/nvidia1" in both.agree()["prepared"]
    assert "left alone (asks for no GPU); prepared already: config.json has /dev/nvidia" in both.text.stdout


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("asks", [True, False])
def test_numbers_that_json_cant_hold(machine: Machine, number: str, asks: bool) -> None:
    path = machine.bundle / "config.json"
    text = json.dumps(config(f"{V}=1" if asks else "A=1") | {"x": "N"})
    path.write_text(text.replace('"N"', number))
    both = Both(machine)
    assert ("what JSON can hold" in both.error) is asks
    shown = "Infinity" if number == "1e999" else number
    assert both.data["config_json"]["after"]["x"] == shown


def test_what_a_container_says_commands_no_terminal_and_adds_no_line(machine: Machine) -> None:
    words = ("\x1b[31mGPU-x\n  3 policy: kubelet", "p\nq", "cuda>=1 \x1b]0;x\x07\x9b\u202e")
    annotations = pod() | {"io.kubernetes.cri.sandbox-name": words[1]}
    for asked in (words[0], "1"):
        machine.make(config(f"{V}={asked}", f"NVIDIA_REQUIRE_CUDA={words[2]}", annotations=annotations))
        both = Both(machine)
        for text in (both.text.stdout, both.text.stderr, both.runtime_error):
            assert all(line.isprintable() for line in text.splitlines())
            assert "\n  3 policy: kubelet" not in text
        assert "default/p\\nq/main" in both.text.stdout
    assert "\\x1b]0;x\\x07\\x9b\\u202e" in both.text.stdout


@pytest.mark.parametrize("words", [(), ("explain",), ("cdi",)])
def test_without_a_command_the_help_is_all_that_is_said(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(list(words)) == 2
    told = capfd.readouterr()
    assert "Usage" in told.out
    assert told.err == ""


def test_a_wrong_argument_is_told_without_its_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "bundle", "x", "--runtime\x1b[2J"]) == 2
    assert "\\x1b[2J" in capfd.readouterr().err


def test_an_errors_line_has_no_control_characters() -> None:
    error = BundleError("a\x1b[2Jb", seen="c\nd\re", wanted="é 0 \x00\x9f", remedy="\ud800")
    assert str(error) == "a\\x1b[2Jb: c d e (wanted é 0 \\x00\\x9f); \\ud800"
