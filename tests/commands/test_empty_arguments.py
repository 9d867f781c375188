"""What a script passes whose variable isn't set: an empty argument is refused, an empty option counts as not given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpulet.commands.main import main

SPEC = {"cdiVersion": "0.6.0", "kind": "a.com/b", "devices": [{"name": "c", "containerEdits": {"env": ["A=b"]}}]}


@pytest.mark.parametrize(
    "words",
    [
        ("cdi", "why", ""),
        ("cdi", "why", " \n"),
        ("cdi", "validate", ""),
        ("cdi", "verify", "x", ""),
        ("explain", "bundle", ""),
        ("explain", "require", "cuda>=12", ""),
        ("sim", "create", ""),
        ("sim", "inject", "x", ""),
        ("sim", "capture", ""),
        ("",),
    ],
)
def test_an_empty_argument(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith("gpulet: an empty argument: gpulet ")
    assert seen.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_an_empty_option_counts_as_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SPEC))
    monkeypatch.chdir(tmp_path)
    assert main(["cdi", "validate", str(tmp_path / "a.json"), "--target", ""]) == 0
    assert main(["cdi", "list", "--spec-dir", ""]) == 0
    assert "a.com/b=c" not in capsys.readouterr().out, "the current folder is no spec folder"


@pytest.mark.parametrize("name", ["a\nb", "nvidia.com/gpu", "gpu=0", "\x1b[2J", "a,b"])
def test_a_name_that_is_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cdi", "why", name, "--spec-dir", str(tmp_path)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    shown = name if name.isprintable() else repr(name)
    assert last == f"{shown} can't be used"
    assert lines[-1] == "a qualified name has the form vendor/class=device"
    assert "invalid CDI" in lines[-2]
