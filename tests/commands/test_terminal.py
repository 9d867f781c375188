"""What files of a node, of a spec folder or of a Pod say commands no terminal and makes no line of its own."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from gpulet.commands.main import main
from gpulet.commands.timeline import show_pod
from gpulet.sim import node

EVIL = "\x1b]0;x\x07\x1b[2J"


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("words", [("list",), ("validate",), ("verify",), ("why", f"a/b={EVIL}")])
def test_the_files_of_a_spec_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / f"{EVIL}\nfile valid.yaml").write_text(f"cdiVersion: {EVIL[1:4]}\nkind: [")
    assert main(["cdi", *words, "--spec-dir", str(tmp_path)]) == (0 if words == ("list",) else 1)
    told = capsys.readouterr()
    assert "\\x1b]0;x\\x07\\x1b[2J" in told.out + told.err
    assert harmless(told.out + told.err)
    assert "\nfile valid" not in told.out + told.err


@pytest.mark.root
def test_what_a_tree_says_of_its_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = node.create(tmp_path / "node", "h100x8", gpus=1)
    (file,) = (made.root / "proc/driver/nvidia/gpus").glob("*/information")
    lines = file.read_text().splitlines()
    lines = [f"Model: \t\t [red]{EVIL}" if line.startswith("Model") else line for line in lines]
    file.write_text("\n".join(lines) + "\n")
    assert main(["node", "--driver-root", str(made.root), "--source", "procfs"]) == 0
    told = capsys.readouterr().out
    assert "[red]\\x1b" in told
    assert harmless(told)


def test_a_pods_names_and_notes() -> None:
    pod = {"name": EVIL, "node": "", "phase": "Pending", "runtimeClass": EVIL, "message": f"a\n{EVIL}", "notes": []}
    console = Console(file=io.StringIO(), width=300)
    show_pod(console, pod, {})
    assert isinstance(console.file, io.StringIO)
    assert harmless(console.file.getvalue())
    assert console.file.getvalue().count("\n") == 2
