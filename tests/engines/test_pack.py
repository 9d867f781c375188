"""The pack speeds a launcher up; whatever is wrong with it, the program runs from its sources."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpulet.engines import pack, packed
from gpulet.engines.launchers import launcher_text, write_launchers

WHERE = "import sys, gpulet.launch.argp as m\nprint(type(m.__spec__.loader).__name__)\n"


def loader_of(tmp_path: Path, modules: tuple[Path, int]) -> str:
    """What loaded a module of ours in a process that starts as a launcher does."""
    text = launcher_text("gpulet.launch.argp", modules=modules)
    program = tmp_path / "program"
    program.write_text(text[: text.index("from gpulet.launch.argp import main")] + WHERE)
    program.chmod(0o755)
    result = subprocess.run([program], capture_output=True, text=True, check=True)
    assert not result.stderr
    return result.stdout.strip()


def test_modules_come_out_of_the_pack(tmp_path: Path) -> None:
    assert loader_of(tmp_path, pack.write(tmp_path)) == "Pack"


def bent(path: Path, length: int) -> None:
    data = path.read_bytes()
    path.write_bytes(b"\x00\x00\x00\x00" + data[4:])


def torn(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[: length // 2])


def empty(path: Path, length: int) -> None:
    path.write_bytes(b"")


def gone(path: Path, length: int) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [bent, torn, empty, gone])
def test_without_a_whole_pack_the_sources_are_loaded(tmp_path: Path, harm: object) -> None:
    path, length = pack.write(tmp_path)
    harm(path, length)  # type: ignore[operator]
    assert loader_of(tmp_path, (path, length)) == "SourceFileLoader"


@pytest.mark.parametrize("entry", [(0, 1), (1, 0)])
def test_a_source_that_changed_since_is_loaded_itself(tmp_path: Path, entry: tuple[int, int]) -> None:
    """Size and time of change both count, as for Python's own compiled files."""
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    found = source.stat()
    finder = packed.Pack(-1, 0, {"m": (0, 0, str(source), found.st_size, found.st_mtime_ns, False)})
    assert finder.find_spec("m") is not None and finder.find_spec("other") is None
    stale = (0, 0, str(source), found.st_size + entry[0], found.st_mtime_ns + entry[1], False)
    assert packed.Pack(-1, 0, {"m": stale}).find_spec("m") is None
    source.unlink()
    assert finder.find_spec("m") is None


def test_programs_say_the_same_with_and_without(tmp_path: Path) -> None:
    with_pack = write_launchers(tmp_path / "with")
    without = write_launchers(tmp_path / "without")
    (tmp_path / "without" / pack.NAME).unlink()
    for arguments in (["--version"], ["list", "--nonsense"], ["--root=/nonexistent", "info"]):
        said = [
            subprocess.run([written["gpulet-container-cli"], *arguments], capture_output=True, text=True, check=False)
            for written in (with_pack, without)
        ]
        assert (said[0].returncode, said[0].stdout, said[0].stderr) == (
            said[1].returncode,
            said[1].stdout,
            said[1].stderr,
        )
