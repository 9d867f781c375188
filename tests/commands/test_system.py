"""gpulet system: links in /dev/char are made, mended and left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer.testing

from gpulet.commands import system
from support import cli_node

pytestmark = pytest.mark.root


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return cli_node.lay(tmp_path / "root")


def run(node: Path, *arguments: str) -> typer.testing.Result:
    command = ["create-dev-char-symlinks", f"--driver-root={node}", f"--dev-char-path={node}/dev/char", *arguments]
    return typer.testing.CliRunner().invoke(system.app, command)


def test_c28_missing_are_made_right_ones_stay_dangling_ones_are_replaced(node: Path) -> None:
    char = node / "dev/char"
    char.mkdir()
    (char / "195:0").symlink_to("../nvidia0")
    (char / "195:255").symlink_to("/run/nvidia/driver/dev/nvidiactl")
    (char / "1:3").symlink_to("/dev/null")
    done = {item["path"].rpartition("/")[2]: item["state"] for item in json.loads(run(node, "--json").stdout)}
    assert done["195:0"] == "right"
    assert done["195:255"] == "replaced"
    assert done["195:254"] == done["509:0"] == done["509:1"] == done["195:7"] == "made"
    assert os.readlink(char / "195:0") == "../nvidia0"
    assert os.readlink(char / "195:255") == f"{node}/dev/nvidiactl"
    assert os.readlink(char / "1:3") == "/dev/null"
    again = run(node)
    assert (again.exit_code, again.stdout) == (0, "")


def test_a_dry_run_makes_nothing(node: Path) -> None:
    assert "(wanted)" in run(node, "--dry-run").stdout
    assert not (node / "dev/char").exists()


def test_every_node_that_the_driver_has_numbers_for(node: Path) -> None:
    (node / "dev/nvidia5").unlink()
    run(node)
    assert not (node / "dev/char/195:5").is_symlink()
    run(node, "--create-all")
    assert os.readlink(node / "dev/char/195:5") == f"{node}/dev/nvidia5"


def test_a_relative_root_gives_links_that_lead_there_from_anywhere(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(node.parent)
    run(Path(node.name), "--create-all")
    for link in (node / "dev/char").iterdir():
        assert os.readlink(link).startswith(f"{node}/dev/nvidia") and link.exists(), link
    assert run(Path(node.name), "--create-all").stdout == ""


@pytest.mark.parametrize("folder", ["absent", "bare"])
def test_without_devices_both_commands_fail_alike(tmp_path: Path, folder: str) -> None:
    if folder == "bare":
        if os.path.isdir("/proc/driver/nvidia"):
            pytest.skip("this machine has a driver, which counts for roots without a /proc of their own")
        (tmp_path / folder / "dev").mkdir(parents=True)
    root = tmp_path / folder
    done = [run(root), typer.testing.CliRunner().invoke(system.app, ["create-device-nodes", f"--driver-root={root}"])]
    assert [one.exit_code for one in done] == [1, 1] and str(done[0].exception) == str(done[1].exception)
    assert str(root) in str(done[0].exception)


def test_a_driver_without_nodes_names_the_command_that_makes_them(node: Path) -> None:
    for path in (node / "dev").glob("nvidia*"):
        path.unlink()
    done = run(node)
    assert done.exit_code == 1 and f"no nodes in {node}/dev; gpulet system create-device-nodes" in str(done.exception)
    assert run(node, "--create-all").exit_code == 0


def test_where_no_link_can_be_made_that_folder_is_named(node: Path) -> None:
    done = run(node, "--dev-char-path=/proc")
    assert done.exit_code == 1 and str(done.exception).startswith("can't make links in /proc: ")


def test_device_nodes(node: Path) -> None:
    (node / "dev/nvidia5").unlink()
    runner = typer.testing.CliRunner()
    dry = runner.invoke(system.app, ["create-device-nodes", f"--driver-root={node}", "--dry-run"])
    assert dry.stdout == f"mknod --mode=0666 {node}/dev/nvidia5 c 195 5\n"
    assert not (node / "dev/nvidia5").exists()
    runner.invoke(system.app, ["create-device-nodes", f"--driver-root={node}"])
    assert (node / "dev/nvidia5").stat().st_rdev == os.makedev(195, 5)
