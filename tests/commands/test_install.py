"""`gpulet install`: what it writes, and that it writes nothing where it can't write all."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulet.commands.main import main
from gpulet.engines import launchers
from gpulet.engines.launchers import LASTING, PROGRAMS


def test_writes_launchers_and_links(tmp_path: Path) -> None:
    assert main(["install", "--prefix", str(tmp_path), "--yes", "--peer-names"]) == 0
    for program, (_module, peer) in (PROGRAMS | LASTING).items():
        assert (tmp_path / "bin" / program).is_file()
        assert (tmp_path / "bin" / peer).readlink() == Path(program)
    for companion, text in (("mps-control-daemon", "--mps-root"), ("config-manager", "--config-file-srcdir")):
        done = subprocess.run([tmp_path / "bin" / companion, "--help"], capture_output=True, text=True)
        assert done.stdout.startswith(f"usage: {companion} ") and text in done.stdout


def test_a_peers_file_in_the_way_stops_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin").mkdir()
    peer = tmp_path / "bin" / "nvidia-cdi-hook"
    peer.write_text("NVIDIA's own")
    assert main(["install", "--prefix", str(tmp_path), "--yes", "--peer-names"]) == 1
    assert str(peer) in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["nvidia-cdi-hook"]


@pytest.mark.parametrize(("answer", "code"), [("", 2), ("no\n", 2), ("\n", 2), (None, 2), ("y\n", 0), ("Yes\n", 0)])
def test_nothing_is_written_without_a_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: str | None, code: int
) -> None:
    monkeypatch.setattr(sys, "stdin", None if answer is None else io.StringIO(answer))
    assert main(["install", "--prefix", str(tmp_path)]) == code
    error = capsys.readouterr().err
    assert error == ("gpulet: nothing written; say --yes to write without being asked\n" if code else "")
    assert (tmp_path / "bin").exists() == (not code)


def test_a_full_disk_is_named_by_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: Path) -> None:
        raise OSError(28, "No space left on device")  # as a write that has no path to tell

    monkeypatch.setattr("gpulet.commands.install.write_launchers", full)
    assert main(["install", "--prefix", str(tmp_path), "--yes"]) == 1
    assert f"can't write to {tmp_path}/bin: No space left on device" in capsys.readouterr().err


def test_no_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--prefix", "", "--yes"]) == 2
    assert "--prefix" in capsys.readouterr().err


def test_a_unit_for_prefork(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "FAST_SHELLS", (Path("/bin/sh").resolve().name,))
    assert main(["install", "--prefix", str(tmp_path / "a b%"), "--yes", "--prefork"]) == 0
    unit = tmp_path / "a b%" / "lib/systemd/system/gpulet-prefork.service"
    assert f'ExecStart="{tmp_path}/a b%%/bin/gpulet-prefork"\n' in unit.read_text()
    assert f"systemctl enable --now {unit}" in capsys.readouterr().out
    assert os.access(tmp_path / "a b%" / "bin/gpulet-prefork", os.X_OK)
    assert main(["install", "--prefix", str(tmp_path / "plain"), "--yes"]) == 0
    assert not (tmp_path / "plain" / "lib").exists()


def test_no_prefork_where_no_launcher_would_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "FAST_SHELLS", ())
    assert main(["install", "--prefix", str(tmp_path), "--yes", "--prefork"]) == 1
    assert "/bin/sh is " in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(["install", "--prefix", str(tmp_path), "--yes"]) == 0
    done = subprocess.run([tmp_path / "bin" / "gpulet-prefork"], capture_output=True, text=True)
    assert done.returncode == 1 and "/bin/sh" in done.stderr
