"""Launchers start the right program with the right interpreter, isolated, whatever their path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulet.engines.launchers import LASTING, OWN, PROGRAMS, first_lines, lasting_text, launcher_text, write_launchers
from gpulet.sim import node
from gpulet.version import __version__


def test_every_program_starts(tmp_path: Path) -> None:
    written = write_launchers(tmp_path / "bin")
    assert set(written) == set(PROGRAMS) | set(LASTING) | set(OWN)
    assert all(path.stat().st_mode & 0o777 == 0o755 for path in written.values())
    for program in ("gpulet-container-cli", "gpulet-device-plugin"):
        result = subprocess.run([written[program], "--version"], capture_output=True, text=True, check=True)
        assert __version__ in result.stdout


def test_the_callers_environment_does_not_reach_the_program(tmp_path: Path) -> None:
    """PYTHONPATH, PYTHONSTARTUP and the current folder are an image's or a user's to choose."""
    evil = tmp_path / "evil"
    evil.mkdir()
    for name in ("gc.py", "os.py", "gpulet.py", "sitecustomize.py"):
        (evil / name).write_text("raise SystemExit('taken over')\n")
    written = write_launchers(tmp_path / "bin")
    environment = {**os.environ, "PYTHONPATH": str(evil), "PYTHONHOME": str(evil), "PYTHONINSPECT": "1"}
    for program in ("gpulet-container-cli", "gpulet-device-plugin"):
        result = subprocess.run(
            [written[program], "--version"], cwd=evil, env=environment, capture_output=True, text=True, check=True
        )
        assert "taken over" not in result.stdout + result.stderr


@pytest.mark.parametrize("folder", ["with a blank", "x" * 200 + "/" + "y" * 100, "it's"])
def test_an_interpreter_on_any_path(tmp_path: Path, folder: str) -> None:
    interpreter = tmp_path / folder / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.symlink_to(sys.executable)
    program = tmp_path / "program"
    program.write_text(f"{first_lines(str(interpreter), '-IS')}import sys\nprint(sys.argv[1:], sys.flags.isolated)\n")
    program.chmod(0o755)
    result = subprocess.run([program, "a b", "c"], capture_output=True, text=True, check=True)
    assert result.stdout == "['a b', 'c'] 1\n"


def test_a_hardened_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        written = write_launchers(tmp_path / "new" / "prefix" / "bin")
    finally:
        os.umask(before)
    for folder in ("new", "new/prefix", "new/prefix/bin"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o755
    assert all(path.stat().st_mode & 0o777 == 0o755 for path in written.values())


WAITS = "import sys, time\ntime.sleep(0.2)\nprint(sys.argv[1:], sys.flags.isolated)\n"


@pytest.mark.parametrize("name", ["python", "py thon", "it's"])
def test_a_reload_asked_for_while_the_plugins_interpreter_starts_ends_nothing(tmp_path: Path, name: str) -> None:
    """As early as a config-manager can know the process: when its command line is the program's."""
    interpreter = tmp_path / name
    interpreter.symlink_to(sys.executable)
    program = tmp_path / "program"
    program.write_text(lasting_text("any", str(interpreter)).partition("import sys")[0] + WAITS)
    program.chmod(0o755)
    process = subprocess.Popen([program, "a b"], stdout=subprocess.PIPE, text=True)
    while Path(f"/proc/{process.pid}/cmdline").read_bytes().partition(b"\0")[0] != os.fsencode(interpreter):
        assert process.poll() is None
    process.send_signal(1)
    assert process.communicate(timeout=10)[0] == "['a b'] 1\n"


def test_a_launcher_whose_gpulet_is_gone_says_so_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "program"
    text = launcher_text("gpulet.launch.runtime")
    path.write_text(text.replace(repr(str(Path(__file__).parents[2] / "src")), "'/no/such/folder'"))
    path.chmod(0o755)
    said = subprocess.run([path, "state", "x"], capture_output=True, text=True)
    assert said.returncode == 1 and said.stdout == ""
    (line,) = said.stderr.splitlines()
    assert "/no/such/folder" in line and "gpulet install" in line


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """No traceback, and what belongs on one stream doesn't come out of another."""
    written = write_launchers(tmp_path / "bin")
    for program, arguments, stream in (
        ("gpulet-container-cli", ["--version"], 1),
        ("gpulet-container-cli", ["--nonsense"], 2),
        ("gpulet-hook", ["prestart"], 2),
    ):
        shut = " ".join(f"{number}<&-" for number in closed)
        said = subprocess.run(
            ["/bin/sh", "-c", f'exec "$0" "$@" {shut}', written[program], *arguments],
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "Traceback" not in said.stderr and "internal error" not in said.stderr
        assert said.returncode == (0 if arguments == ["--version"] else 1) or said.returncode == 64, said
        assert bool((said.stdout, said.stderr)[stream - 1]) is (stream not in closed)
        assert not (said.stdout, said.stderr)[2 - stream]


@pytest.mark.parametrize(
    "command",
    ["gpulet-container-cli --version", "gpulet-container-cli --root ROOT info", "gpulet-container-cli --root ROOT list",
     "gpulet-container-cli --root ROOT configure --dry-run --pid PID --device all --compute --utility BARE",
     "gpulet-runtime --version"],
)  # fmt: skip
@pytest.mark.root
def test_what_cannot_be_written_is_told(tmp_path: Path, command: str) -> None:
    written = write_launchers(tmp_path / "bin")
    node.create(tmp_path / "node")
    (tmp_path / "bare").mkdir()
    stand_for = {"ROOT": f"{tmp_path}/node/root", "BARE": f"{tmp_path}/bare", "PID": str(os.getpid())}
    program, *words = (stand_for.get(word, word) for word in command.split())
    with open("/dev/full", "w") as full:
        said = subprocess.run([written[program], *words], stdout=full, stderr=subprocess.PIPE)
    assert said.returncode == 1 and said.stderr.count(b"\n") == 1 and b"No space left" in said.stderr, said.stderr
    assert b"report it" not in said.stderr


def test_nothing_beside_gpulet_takes_the_interpreters_own_place(tmp_path: Path) -> None:
    """Where gpulet is installed other packages are too, and one may have a module of a name that Python knows."""
    (tmp_path / "tomllib.py").write_text("raise SystemExit('taken over')\n")
    text = launcher_text("gpulet.launch.container_cli")
    source = repr(str(Path(__file__).parents[2] / "src"))
    program = tmp_path / "program"
    program.write_text(text.replace(source, f"{str(tmp_path)!r}, {source}").replace("run(", "import tomllib; run("))
    program.chmod(0o755)
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert __version__ in said.stdout
