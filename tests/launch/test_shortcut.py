"""Commands other than `create` go to the low-level runtime without Python, as long as it is sure which one that is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulet.engines import launchers
from gpulet.launch import shortcut
from support.machine import Machine

SHELLS = [shell for shell in ("dash", "busybox", "bash") if shutil.which(shell)]
SETTLED = 2.1  # seconds until what was written counts as old
OTHER = '#!/bin/sh\nprintf other > "$0.called"\n'


class Shortcut:
    """A machine whose gpulet-runtime has a shell, and whose Python can be told from it: its launcher's says so."""

    def __init__(self, folder: Path, shell: str) -> None:
        self.machine = Machine(folder)
        program = self.machine.folder / "bin" / "gpulet-runtime"
        text = launchers.launcher_text("gpulet.launch.runtime").replace(
            "import marshal", f"open({str(folder / 'python')!r}, 'w').close()\nimport marshal"
        )
        real = shutil.which(shell)
        if shell == "busybox":
            real = str(folder / "sh")
            os.symlink(shutil.which("busybox") or "", real)
        program.write_text(text.replace("#!/bin/sh", f"#!{real}", 1))
        self.kept = Path(shortcut.beside(str(self.machine.config_file)))

    def by_python(self, *arguments: str, **env: str) -> bool:
        """Runs gpulet-runtime, which must come to the low-level runtime; says whether Python was started for it."""
        witness = self.machine.folder / "python"
        witness.unlink(missing_ok=True)
        done = self.machine.run("gpulet-runtime", *arguments, **env)
        assert (done.returncode, done.stderr) == (0, "")
        assert self.machine.called("low") == list(arguments)
        return witness.exists()


@pytest.fixture(scope="module", params=SHELLS)
def settled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shortcut:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "FAST_SHELLS", (Path("/bin/sh").resolve().name,))
        made = Shortcut(tmp_path_factory.mktemp(request.param), request.param)
    time.sleep(SETTLED)
    return made


@pytest.fixture
def short(settled: Shortcut) -> Iterator[Shortcut]:
    """One whose answer is kept."""
    settled.by_python("state", "x")
    assert not settled.by_python("state", "x")
    yield settled


def test_the_second_call_needs_no_python(settled: Shortcut) -> None:
    settled.kept.unlink(missing_ok=True)
    assert settled.by_python("state", "x")
    assert not settled.by_python("state", "x")


@pytest.mark.parametrize(
    "words",
    [
        ("--root", "/a b", "--log=/l", "--log-format", "json", "start", "id"),
        ("exec", "id", "sh", "-c", "echo \"$HOME\" 'x' `y` \\ * ; exit 1"),
        ("exec", "id", "", " ", "*", "$(touch x)", "--", "-n"),
        ("kill", "--all", "id", "9"),
        ("delete", "created"),
        ("spec", "--create"),
    ],
    ids=lambda words: words[0],
)
def test_every_word_arrives_as_it_is(short: Shortcut, words: tuple[str, ...]) -> None:
    assert not short.by_python(*words)


def test_bytes_that_are_no_text_arrive(short: Shortcut) -> None:
    short.machine.run("gpulet-runtime", "exec", "id", os.fsdecode(b"\xff\xfe"))
    assert (short.machine.folder / "bin" / "low.argv").read_bytes() == b"exec\nid\n\xff\xfe\n"


@pytest.mark.parametrize("words", [("exec", "id", "create"), ("state", "create"), ("exec", "id", "ls", "--version")])
def test_what_might_be_more_is_left_to_python(short: Shortcut, words: tuple[str, ...]) -> None:
    assert short.by_python(*words)


def test_create_still_edits(short: Shortcut) -> None:
    asks = {"env": ["NVIDIA_VISIBLE_DEVICES=0"]}
    edited = short.machine.create({"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "process": asks, "linux": {}})
    assert "/dev/nvidia0" in [node["path"] for node in edited["linux"]["devices"]]


def test_the_environment_arrives_and_gains_nothing(short: Shortcut) -> None:
    assert not short.by_python("state", "x", ONE="1", config="mine", path="mine", word="mine", low="mine", IFS=":")
    said = (short.machine.folder / "bin" / "low.env").read_text().splitlines()
    assert {"ONE=1", "config=mine", "path=mine", "word=mine", "low=mine"} <= set(said)
    assert not [line for line in said if line.startswith("gpulet_")]


def test_descriptors_arrive(short: Shortcut) -> None:
    """As for `exec --preserve-fds`, of which a shell may use numbers from 10 on for itself."""
    low = short.machine.low
    before = low.read_text()
    program = short.machine.folder / "bin" / "gpulet-runtime"
    code = (
        "import os, sys\nfor n in (3, 9, 10, 11): os.dup2(1, n, inheritable=True)\n"
        "os.execv(sys.argv[1], [*sys.argv[1:], 'exec', '--preserve-fds', '9', 'id'])\n"
    )
    low.write_text("#!/bin/sh\nfor n in 3 9 10 11; do echo $n >/proc/self/fd/$n; done\n")
    try:
        env = {"PATH": os.environ["PATH"], "GPULET_CONFIG": str(short.machine.config_file)}
        said = subprocess.run([sys.executable, "-c", code, program], env=env, stdout=subprocess.PIPE, check=True)
        assert said.stdout.split() == [b"3", b"9", b"10", b"11"]
    finally:
        low.write_text(before)


def test_status_and_signals_are_the_runtimes(short: Shortcut) -> None:
    before = short.machine.low.read_text()
    try:
        for text, status in (("exit 7", 7), ("kill -9 $$", -9)):
            short.machine.low.write_text(f"#!/bin/sh\n{text}\n")
            assert short.machine.run("gpulet-runtime", "state", "x").returncode == status
    finally:
        short.machine.low.write_text(before)


# -- when what is kept no longer counts


def test_a_changed_configuration_counts_at_once(short: Shortcut) -> None:
    machine = short.machine
    other = machine.folder / "bin" / "other"
    other.write_text(OTHER)
    other.chmod(0o755)
    before, times = machine.config_file.read_text(), machine.config_file.stat()
    earlier = (times.st_atime_ns, times.st_mtime_ns - 10**12)
    for change in ("written", "replaced by an older one"):
        machine.config_file.write_text(before.replace(str(machine.low), str(other)))
        if change != "written":
            os.utime(machine.config_file, ns=earlier)
        Path(f"{other}.called").unlink(missing_ok=True)
        machine.run("gpulet-runtime", "state", "x")
        assert Path(f"{other}.called").exists(), change
    machine.config_file.write_text(before)
    assert short.by_python("state", "x") and short.by_python("state", "x"), "too young to be sure of"
    time.sleep(SETTLED)


def test_a_configuration_of_the_same_time_counts_from_the_first_create(short: Shortcut) -> None:
    """As images' files have it, and `cp -p`. A container is then started by the runtime that created it."""
    machine = short.machine
    other = machine.folder / "bin" / "other"
    other.write_text(OTHER)
    other.chmod(0o755)
    before, times = machine.config_file.read_text(), machine.config_file.stat()
    new = machine.folder / "new.toml"
    new.write_text(before.replace(str(machine.low), str(other)))
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.rename(machine.config_file)
    machine.make({"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "process": {"env": []}, "linux": {}})
    for words in (("create", "--bundle", str(machine.bundle), "x"), ("start", "x")):
        Path(f"{other}.called").unlink(missing_ok=True)
        machine.run("gpulet-runtime", *words)
        assert Path(f"{other}.called").exists(), words
    machine.config_file.write_text(before)
    time.sleep(SETTLED)


def test_a_configuration_that_is_gone(short: Shortcut) -> None:
    away = short.machine.config_file.with_suffix(".away")
    short.machine.config_file.rename(away)
    try:
        empty = short.machine.folder / "none"
        done = short.machine.run("gpulet-runtime", "state", "x", PATH=str(empty))
        assert done.returncode in (0, 1) and short.machine.called("low") is None  # the default's runc, or none
    finally:
        away.rename(short.machine.config_file)
        time.sleep(SETTLED)  # a rename is a change


def test_another_search_path_is_another_answer(short: Shortcut) -> None:
    longer = f"{os.environ['PATH']}:/nowhere"
    assert short.by_python("state", "x", PATH=longer)
    assert not short.by_python("state", "x", PATH=longer)
    assert short.by_python("state", "x")


@pytest.mark.parametrize("search", ["relative:/usr/bin", "./bin", "/usr/bin\n/bin"])
def test_an_answer_that_depends_on_the_caller_is_not_kept(short: Shortcut, search: str) -> None:
    assert short.by_python("state", "x", PATH=search)
    assert short.by_python("state", "x", PATH=search)


def test_another_configuration_is_another_answer(short: Shortcut) -> None:
    copy = short.machine.folder / "second.toml"
    shutil.copy(short.machine.config_file, copy)
    assert short.by_python("state", "x", GPULET_CONFIG=str(copy))
    folder = short.machine.folder / "home" / "nvidia-container-runtime"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(short.machine.config_file, folder / "config.toml")
    time.sleep(SETTLED)
    for _ in range(2):
        by_python = short.by_python("state", "x", GPULET_CONFIG="", XDG_CONFIG_HOME=str(folder.parent))
    assert not by_python
    assert shortcut.beside(str(folder / "config.toml")) in map(str, folder.iterdir())
    shutil.rmtree(folder.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_what_another_user_keeps_does_not_count(short: Shortcut) -> None:
    os.chown(short.kept, 65534, 65534)
    assert short.by_python("state", "x")
    short.kept.unlink()


def test_a_runtime_that_is_gone_is_looked_for(short: Shortcut) -> None:
    low = short.machine.low
    away = low.rename(low.with_suffix(".away"))
    try:
        done = short.machine.run("gpulet-runtime", "state", "x")
        assert done.returncode == 1 and str(low) in done.stderr
    finally:
        away.rename(low)


def test_a_container_is_started_by_the_runtime_that_created_it(short: Shortcut) -> None:
    """One that stands before the others in the configuration may be installed at any time."""
    machine = short.machine
    folders = [machine.folder / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    copy = machine.folder / "by-name.toml"
    copy.write_text(machine.config_file.read_text().replace(f"'{machine.low}'", "'better', 'good'"))
    env = {"PATH": f"{folders[0]}:{folders[1]}:{os.environ['PATH']}", "GPULET_CONFIG": str(copy)}

    def called(*arguments: str) -> str:
        for name in ("better", "good"):
            (machine.folder / f"{name}.called").unlink(missing_ok=True)
        assert machine.run("gpulet-runtime", *arguments, **env).returncode == 0
        return " ".join(name for name in ("better", "good") if (machine.folder / f"{name}.called").exists())

    def install(name: str, folder: Path) -> None:
        (folder / name).write_text(f"#!/bin/sh\n: > {machine.folder / name}.called\n")
        (folder / name).chmod(0o755)

    install("good", folders[1])
    time.sleep(SETTLED)
    assert [called("state", "x") for _ in range(2)] == ["good", "good"]
    install("better", folders[0])
    assert called("state", "x") == "good", "it is the one that the containers there are have"
    machine.make({"ociVersion": "1.0.2", "root": {"path": "rootfs"}, "process": {"env": []}, "linux": {}})
    assert called("create", "--bundle", str(machine.bundle), "y") == "better"
    assert called("start", "y") == "better"


@pytest.mark.parametrize("text", [b"", b"/bin/false", b"/bin/false\n", b"\n\n", b"\0\xff\n" * 3])
def test_what_is_damaged_does_not_count(short: Shortcut, text: bytes) -> None:
    changed = short.machine.config_file.stat().st_mtime_ns
    short.kept.write_bytes(text)
    os.utime(short.kept, ns=(changed, changed))
    assert short.by_python("state", "x")
    assert not short.by_python("state", "x"), "and is put right"


def test_a_pipe_in_its_place_makes_nobody_wait(short: Shortcut) -> None:
    short.kept.unlink()
    os.mkfifo(short.kept)
    changed = short.machine.config_file.stat().st_mtime_ns
    os.utime(short.kept, ns=(changed, changed))
    assert short.by_python("state", "x")
    assert not short.by_python("state", "x")


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_time(short: Shortcut) -> None:
    short.kept.unlink()
    short.kept.mkdir()
    try:
        assert short.by_python("state", "x")
        assert not list(short.kept.parent.glob(f"{short.kept.name}.*"))
    finally:
        short.kept.rmdir()


def test_two_installations_do_not_send_each_other_round(short: Shortcut) -> None:
    """They share config.toml, and so what is kept; each passes over itself alone."""
    machine = short.machine
    second = machine.folder / "elsewhere" / "nvidia-container-runtime"
    second.parent.mkdir()
    shutil.copy(machine.folder / "bin" / "gpulet-runtime", second)
    copy = machine.folder / "both.toml"
    copy.write_text(machine.config_file.read_text().replace(f"'{machine.low}'", f"'{second}', '{machine.low}'"))
    time.sleep(SETTLED)
    for _ in range(3):
        assert machine.run("gpulet-runtime", "state", "x", GPULET_CONFIG=str(copy)).returncode == 0
        assert machine.called("low") == ["state", "x"]


# -- when Python is gone


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "flags", [("--log", "L", "--log-format", "json"), ("--log=L", "--log-format=json"), ("--log", "L"), ()]
)
def test_a_python_that_is_gone_is_told_where_engines_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr(launchers, "FAST_SHELLS", (Path("/bin/sh").resolve().name,))
    gone = f'{tmp_path}/it\'s "gone"/python3.99'
    program, log = tmp_path / "program", tmp_path / "a log"
    program.write_text(launchers.launcher_text("gpulet.launch.runtime", gone))
    arguments = [flag.replace("L", str(log)) for flag in flags]
    command = [shutil.which(shell) or shell, *(["sh"] if shell == "busybox" else []), program]
    done = subprocess.run([*command, *arguments, "create", "x"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert gone in line and line.endswith("run: gpulet install")
    if not flags:
        assert not log.exists()
    elif "json" in "".join(flags):
        assert json.loads(log.read_text()) == {"level": "error", "msg": line}
    else:
        assert log.read_text().startswith("level=error msg=")


# -- where there is none


def test_a_slow_shell_is_not_put_in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "FAST_SHELLS", ())
    assert "gpulet_low" not in launchers.launcher_text("gpulet.launch.runtime")


def test_only_the_runtime_has_a_low_level_one() -> None:
    modules = [module for module, _peer in launchers.PROGRAMS.values() if module != "gpulet.launch.runtime"]
    assert modules and not any("gpulet_low" in launchers.launcher_text(module) for module in modules)
