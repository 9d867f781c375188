"""gpulet-prefork: a worker does for a container's start exactly what Python would, and whatever is wrong with workers,
Python does it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from gpulet import linux
from gpulet.engines import launchers
from support.machine import Machine
from support.plugin_process import until

pytestmark = pytest.mark.root

SHELLS = [shell for shell in ("dash", "busybox") if shutil.which(shell)]
GPUS = ("NVIDIA_VISIBLE_DEVICES=0,1", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")


def config(*env: str) -> dict:
    return {"root": {"path": "rootfs"}, "process": {"env": ["PATH=/bin", *env]}, "mounts": [], "linux": {}}


class Prefork:
    """A machine with gpulet-prefork, whose gpulet-runtime says where it started Python."""

    def __init__(self, folder: Path, shell: str) -> None:
        self.machine = Machine(folder)
        self.workers = folder / "workers"
        real = shutil.which(shell) or ""
        if shell == "busybox":
            os.symlink(real, folder / "sh")
            real = str(folder / "sh")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launchers, "FAST_SHELLS", (Path("/bin/sh").resolve().name,))
            written = launchers.write_launchers(folder / "bin", self.workers)
        self.program, self.runtime = written["gpulet-prefork"], written["gpulet-runtime"]
        witness = f"open({str(folder / 'python')!r}, 'a').write('x')\nimport marshal"
        text = self.runtime.read_text().replace("import marshal", witness, 1)
        self.runtime.write_text(text.replace("#!/bin/sh", f"#!{real}", 1))
        self.running: subprocess.Popen | None = None

    def start(self, *words: str, stderr: IO[bytes] | None = None) -> None:
        """Starts gpulet-prefork, and waits for its workers."""
        environ = {"PATH": "/nowhere", "HOME": "/keeper's"}
        self.running = subprocess.Popen([str(self.program), *words], env=environ, stderr=stderr)
        until(lambda: len(self.free()) == (int(words[0][-1]) if words else 4))

    def end(self) -> None:
        if self.running and self.running.poll() is None:
            self.running.terminate()
            assert self.running.wait(10) == 0

    def free(self) -> list[Path]:
        """The folders of workers that nobody has taken."""
        folders = [path for path in self.workers.glob("*/[!.]*") if not (path / "taken").exists()]
        return [folder for folder in folders if (folder / "ask").exists()]  # asked last: it goes first

    def processes(self) -> list[int]:
        """The workers."""
        assert self.running
        return [
            int(one) for one in Path(f"/proc/{self.running.pid}/task/{self.running.pid}/children").read_text().split()
        ]

    def call(self) -> list[str]:
        return [str(self.runtime), "create", "--bundle", str(self.machine.bundle), "x"]

    def environ(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "GPULET_CONFIG": str(self.machine.config_file)}

    def by_python(self) -> bool:
        """Whether Python was started since it was asked last."""
        witness = self.machine.folder / "python"
        there = witness.exists()
        witness.unlink(missing_ok=True)
        return there

    def create(self, *env: str, **environ: str) -> dict:
        """config.json after a `create`, which must come to the low-level runtime."""
        shutil.rmtree(self.machine.bundle, ignore_errors=True)
        path = self.machine.make(config(*env))
        done = self.machine.run("gpulet-runtime", "create", "--bundle", str(self.machine.bundle), "x y", **environ)
        assert (done.returncode, done.stderr) == (0, "")
        assert self.machine.called("low") == ["create", "--bundle", str(self.machine.bundle), "x y"]
        return json.loads(path.read_text())


@pytest.fixture(scope="module", params=SHELLS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prefork:
    return Prefork(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def prefork(shared: Prefork) -> Iterator[Prefork]:
    shared.start()
    shared.by_python()
    yield shared
    shared.end()
    shared.machine.configure()


def tree(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything in a folder: mode, owner and content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (info.st_mode, info.st_uid, info.st_gid, content)
    return found


@pytest.mark.parametrize("env", [GPUS, (), ("NVIDIA_VISIBLE_DEVICES=all",), ("NVIDIA_VISIBLE_DEVICES=void",)])
def test_a_worker_does_what_python_does(shared: Prefork, env: tuple[str, ...]) -> None:
    wanted, there = shared.create(*env), tree(shared.machine.bundle)
    assert shared.by_python()
    shared.start()
    try:
        assert shared.create(*env) == wanted
        assert tree(shared.machine.bundle) == there
        assert not shared.by_python()
        assert ("0" in str(wanted["linux"].get("devices"))) == bool(env and "void" not in env[0])
    finally:
        shared.end()


def test_each_worker_serves_one_container_and_is_replaced(prefork: Prefork) -> None:
    for _ in range(6):
        before = set(until(prefork.free))
        prefork.create(*GPUS)
        until(lambda: len(prefork.free()) == 4)
        assert len(set(prefork.free()) - before) == 1
    assert not prefork.by_python()
    assert len(prefork.processes()) == 4


def test_many_at_once(prefork: Prefork) -> None:
    folder = prefork.machine.folder / "many"

    def one(number: int) -> int:
        bundle = folder / str(number)
        shutil.copytree(prefork.machine.bundle, bundle, symlinks=True)
        (bundle / "config.json").write_text(json.dumps(config(*GPUS)))
        call = [str(prefork.runtime), "create", "--bundle", str(bundle), str(number)]
        environ = prefork.environ()
        subprocess.run(call, env=environ, check=True, timeout=60)
        made = json.loads((bundle / "config.json").read_text())
        return sum(node["path"].startswith("/dev/nvidia") for node in made["linux"]["devices"])

    prefork.create(*GPUS)
    try:
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(one, range(24)))
    finally:
        shutil.rmtree(folder)
    assert set(counts) == {counts[0]} and counts[0] >= 2
    until(lambda: len(prefork.free()) == 4)


def test_the_engines_environment_counts_and_goes_on(prefork: Prefork) -> None:
    odd = {"A": "b=c", "B": "two\nlines", "C": "\udcff", "EMPTY": ""}
    prefork.create(*GPUS, **odd)
    assert not prefork.by_python()
    seen = (prefork.machine.folder / "bin" / "low.env").read_bytes()
    for wanted in (b"A=b=c\n", b"EMPTY=\n", b"B=two\nlines\n", b"C=\xff\n", f"PATH={os.environ['PATH']}\n".encode()):
        assert wanted in seen
    assert b"HOME=" not in seen
    other = prefork.machine.folder / "other.toml"
    policy = "[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '/nowhere'\n"
    other.write_text(prefork.machine.config_file.read_text() + policy)
    assert not prefork.create(*GPUS, GPULET_CONFIG=str(other))["linux"].get("devices")
    assert not prefork.by_python()


def test_folder_and_umask_are_the_shells(prefork: Prefork) -> None:
    machine = prefork.machine
    prefork.create(*GPUS)
    (machine.bundle / "config.json").write_text(json.dumps(config(*GPUS)))
    environ = prefork.environ()
    log = machine.folder / "log"
    log.unlink(missing_ok=True)
    subprocess.run([str(prefork.runtime), "create", "x"], cwd=machine.bundle, env=environ, check=True, umask=0o077)
    assert not prefork.by_python()
    assert json.loads((machine.bundle / "config.json").read_text())["linux"]["devices"]
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_errors_are_said_where_python_says_them(shared: Prefork, log_format: str) -> None:
    def failing() -> tuple[int, str, str, str]:
        path, log = (
            shared.machine.make(config("NVIDIA_VISIBLE_DEVICES=GPU-nobody")),
            shared.machine.folder / "engine.log",
        )
        log.unlink(missing_ok=True)
        before = path.read_bytes()
        words = ("--log", str(log), "--log-format", log_format, "create", "--bundle", str(shared.machine.bundle), "x")
        done = shared.machine.run("gpulet-runtime", *words)
        assert path.read_bytes() == before and shared.machine.called("low") is None
        told = json.loads(log.read_text())["msg"] if log_format == "json" else log.read_text().partition("msg=")[2]
        return done.returncode, done.stdout, done.stderr.partition("msg=")[2], told

    wanted = failing()
    assert shared.by_python() and wanted[0] and "GPU-nobody" in wanted[2]
    shared.start()
    try:
        assert failing() == wanted and not shared.by_python()
    finally:
        shared.end()


def test_the_words_create_of_another_command(prefork: Prefork) -> None:
    done = prefork.machine.run("gpulet-runtime", "exec", "id", "mkdir", "create", "*", "$x")
    assert done.returncode == 0 and not prefork.by_python()
    assert prefork.machine.called("low") == ["exec", "id", "mkdir", "create", "*", "$x"]
    done = prefork.machine.run("gpulet-runtime", "--version")
    assert "gpulet runtime version" in done.stdout and prefork.by_python()


@pytest.mark.parametrize("closed", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_descriptors_of_the_engine_stay(prefork: Prefork, closed: tuple[int, ...]) -> None:
    """Those that it hands on to the container, up to where a shell's own begin, and those that it has closed."""
    read, write = os.pipe()
    prefork.machine.low.write_text("#!/bin/sh\necho 7 is ours >&7\necho 3 is ours >&3\n")
    try:
        prefork.machine.make(config(*GPUS))
        words = " ".join(f"{number}>&-" for number in closed)
        call = f"exec {prefork.runtime} create --bundle {prefork.machine.bundle} x 3>&{write} {words}"
        environ = prefork.environ()
        for also, python in (("7>&3", True), ("", False)):
            subprocess.run(["bash", "-c", f"{call} {also}"], pass_fds=[write], env=environ, stderr=subprocess.DEVNULL)
            assert prefork.by_python() == python
            assert os.read(read, 100).endswith(b"3 is ours\n")
            prefork.machine.make(config(*GPUS))
    finally:
        os.close(read)
        os.close(write)
        prefork.machine.low.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.argv"\n/usr/bin/env > "$0.env"\n')


# -- whatever is wrong with workers


def test_nobody_keeps_workers(shared: Prefork) -> None:
    shared.by_python()
    assert shared.create(*GPUS)["linux"]["devices"] and shared.by_python()


def test_a_killed_keeper_takes_its_workers_along(prefork: Prefork) -> None:
    assert prefork.running
    workers = prefork.processes()
    prefork.running.kill()
    prefork.running.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    left = len(prefork.free())
    assert left == 4  # folders, which each are worth one look
    for _ in range(left + 1):
        assert prefork.create(*GPUS)["linux"]["devices"] and prefork.by_python()
    prefork.start()  # takes what is left away
    prefork.create(*GPUS)
    assert not prefork.by_python()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_worker_that_is_killed_while_idle(prefork: Prefork, how: signal.Signals) -> None:
    assert prefork.running
    os.kill(prefork.running.pid, signal.SIGSTOP)  # else it makes new ones
    try:
        for pid in prefork.processes():
            os.kill(pid, how)
        time.sleep(0.1)
        assert prefork.create(*GPUS)["linux"]["devices"] and prefork.by_python()
    finally:
        os.kill(prefork.running.pid, signal.SIGCONT)
    until(lambda: len(prefork.free()) == 4)
    assert prefork.create(*GPUS)["linux"]["devices"] and not prefork.by_python()


def test_a_worker_that_is_killed_at_work(prefork: Prefork) -> None:
    """It waits for whoever else is at work beneath the root; the shell's Python does so after it."""
    prefork.machine.make(config(*GPUS))
    root = prefork.machine.bundle / "rootfs"
    workers = prefork.processes()
    call, environ = prefork.call(), prefork.environ()
    held = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(call, env=environ, stderr=subprocess.PIPE, text=True) as shell:
            busy = until(lambda: next((pid for pid in workers if _opened(pid, root)), None))
            os.kill(busy, signal.SIGTERM)  # what has begun is brought to its end
            time.sleep(0.1)
            assert _opened(busy, root)
            os.kill(busy, signal.SIGKILL)
            os.close(held)
            assert (shell.wait(30), shell.stderr and shell.stderr.read()) == (0, "")
    finally:
        with contextlib.suppress(OSError):
            os.close(held)
    assert prefork.by_python()
    assert json.loads((prefork.machine.bundle / "config.json").read_text())["linux"]["devices"]


def _opened(pid: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(os.readlink(one) == str(path) for one in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_what_kills_the_shell_ends_the_work(prefork: Prefork) -> None:
    path = prefork.machine.make(config(*GPUS))
    before, root = path.read_bytes(), prefork.machine.bundle / "rootfs"
    workers = prefork.processes()
    held = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(prefork.call(), env=prefork.environ()) as shell:
            busy = until(lambda: next((pid for pid in workers if _opened(pid, root)), None))
            shell.kill()
            until(lambda: not _opened(busy, root))
    finally:
        os.close(held)
    assert path.read_bytes() == before and not prefork.by_python()


OTHER_MACHINE = b"\x7fELF\x02\x01\x01" + b"\0" * 11 + b"\xff\xff" + b"\0" * 40


@pytest.mark.parametrize("low", [b"echo no first line\n", b"#!/nowhere/sh\n", b"", OTHER_MACHINE])
def test_a_low_level_runtime_that_does_not_start(shared: Prefork, low: bytes) -> None:
    def failing() -> tuple[int, str, str]:
        shared.machine.make(config(*GPUS))
        log = shared.machine.folder / "engine.log"
        log.unlink(missing_ok=True)
        words = ("--log", str(log), "create", "--bundle", str(shared.machine.bundle), "x")
        done = shared.machine.run("gpulet-runtime", *words)
        return done.returncode, done.stderr.partition("msg=")[2], log.read_text().partition("msg=")[2]

    before = shared.machine.low.read_text()
    shared.machine.low.write_bytes(low)
    try:
        wanted = failing()
        assert wanted[0] == 1 and "could not exec" in wanted[1] and wanted[1] == wanted[2]
        shared.start()
        assert failing() == wanted
    finally:
        shared.machine.low.write_text(before)
        shared.end()


def test_a_folder_that_is_no_workers(prefork: Prefork) -> None:
    """As a shell finds it that comes while a worker's is being taken away."""
    (folder,) = prefork.workers.iterdir()
    for left in ((), ("ask",), ("answer",)):
        fake = folder / "0"
        fake.mkdir()
        for name in left:
            os.mkfifo(fake / name)
        assert prefork.create(*GPUS)["linux"]["devices"] and prefork.by_python()
        prefork.create(*GPUS)  # its worker's end has what is nobody's swept away
        until(lambda: not (folder / "0").exists())


def test_a_worker_that_is_stopped_at_work(tmp_path: Path) -> None:
    """After as long as a kubelet waits, the shell does the work."""
    made = Prefork(tmp_path, SHELLS[0])
    made.start("--workers=1")
    try:
        made.machine.make(config(*GPUS))
        (pid,), (folder,) = made.processes(), made.free()
        os.kill(pid, signal.SIGSTOP)
        with subprocess.Popen(made.call(), env=made.environ()) as shell:
            taken = folder / "taken"
            until(lambda: taken.exists() and taken.stat().st_size)
            os.utime(taken, (0, time.time() - 3600))
            assert shell.wait(20) == 0
        assert made.by_python()
    finally:
        made.end()


def test_a_shell_that_took_a_worker_and_never_asks(tmp_path: Path) -> None:
    made = Prefork(tmp_path, SHELLS[0])
    made.start("--workers=1")
    try:
        (folder,) = made.free()
        taken = folder / "taken"
        taken.touch()
        os.utime(taken, (0, time.time() - 60))
        assert folder not in until(lambda: [one for one in made.free() if one != folder], 20)
        assert not folder.exists()
    finally:
        made.end()


@pytest.mark.parametrize("unlike", [linux.CLONE_NEWNS, linux.CLONE_NEWUSER], ids=["mount namespace", "user namespace"])
def test_shells_that_see_another_system(prefork: Prefork, unlike: int) -> None:
    prefork.machine.make(config(*GPUS))
    call, environ = prefork.call(), prefork.environ()
    kind = ["--mount"] if unlike == linux.CLONE_NEWNS else ["--user", "--map-root-user"]
    subprocess.run(["unshare", *kind, *call], env=environ, check=True)
    assert prefork.by_python()
    assert json.loads((prefork.machine.bundle / "config.json").read_text())["linux"]["devices"]


@pytest.mark.parametrize("text", ["{own}", "1", "", "nonsense", "999999999", "-1", "9" * 500])
def test_who_reads_must_be_who_took(prefork: Prefork, text: str) -> None:
    """Another process's number gets no answer, and nothing is done in its name."""
    folder = until(prefork.free)[0]
    (folder / "taken").write_text(text.format(own=os.getpid()))
    held = os.open(folder / "answer", os.O_RDWR)
    reading = os.open(f"/proc/self/fd/{held}", os.O_RDONLY)
    os.close(held)
    asking = os.open(folder / "ask", os.O_RDWR)
    os.write(asking, b"\n")
    try:
        assert os.read(reading, 10) == b""
    finally:
        os.close(reading)
        os.close(asking)
    until(lambda: not folder.exists())


# -- the program itself


@pytest.mark.parametrize(
    "words",
    [
        ["x"],
        ["--workers"],
        ["--workers", "0"],
        ["--workers=65"],
        ["--workers=²"],
        ["--workers", "-1"],
        ["--workers", "1", "x"],
    ],
)
def test_words_that_are_none(shared: Prefork, words: list[str]) -> None:
    done = subprocess.run([str(shared.program), *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "gpulet-prefork: " in done.stderr


def test_help(shared: Prefork) -> None:
    done = subprocess.run([str(shared.program), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--workers" in done.stdout


def test_a_second_one_is_refused(prefork: Prefork) -> None:
    done = subprocess.run([str(prefork.program)], capture_output=True, text=True)
    assert done.returncode == 1 and "kept already" in done.stderr
    assert len(prefork.free()) == 4


def test_a_folder_that_is_taken_away_is_made_anew(prefork: Prefork) -> None:
    shutil.rmtree(prefork.workers)
    until(lambda: len(prefork.free()) == 4, 20)
    prefork.create(*GPUS)
    assert not prefork.by_python()


def test_who_is_never_served_is_told_once(tmp_path: Path) -> None:
    made = Prefork(tmp_path, SHELLS[0])
    with open(tmp_path / "said", "wb") as said:
        made.start("--workers=2", stderr=said)
    try:
        for _ in range(3):
            made.machine.make(config(*GPUS))
            subprocess.run(["unshare", "--mount", *made.call()], env=made.environ(), check=True)
            until(lambda: len(made.free()) == 2)
    finally:
        made.end()
    assert (tmp_path / "said").read_text().count("in its mount namespace") == 1


def test_started_by_who_ignores_its_children(tmp_path: Path) -> None:
    made = Prefork(tmp_path, SHELLS[0])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        made.start("--workers=1")
    finally:
        signal.signal(signal.SIGCHLD, before)
    try:
        for _ in range(3):
            until(made.free)
            made.create(*GPUS)
            assert not made.by_python()
    finally:
        made.end()


def test_closed_streams(shared: Prefork) -> None:
    done = subprocess.run(["sh", "-c", f"exec {shared.program} <&-"], capture_output=True, text=True)
    assert done.returncode == 1 and "is closed" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_its_end_leaves_nothing(prefork: Prefork, how: signal.Signals) -> None:
    assert prefork.running
    workers = prefork.processes()
    prefork.running.send_signal(how)
    assert prefork.running.wait(10) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not list(prefork.workers.glob("*/*"))


def test_only_root_gets_to_the_workers(prefork: Prefork) -> None:
    assert prefork.workers.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o077 == 0 for path in prefork.workers.rglob("*"))


def test_another_installation_has_workers_of_its_own(prefork: Prefork, tmp_path: Path) -> None:
    text = launchers.launcher_text("gpulet.launch.runtime", workers=str(prefork.workers / "other"))
    (tmp_path / "gpulet-runtime").write_text(text)
    (tmp_path / "gpulet-runtime").chmod(0o755)
    prefork.machine.make(config(*GPUS))
    call = [str(tmp_path / "gpulet-runtime"), "create", "--bundle", str(prefork.machine.bundle), "x"]
    environ = prefork.environ()
    before = set(prefork.free())
    subprocess.run(call, env=environ, check=True)
    assert set(prefork.free()) == before


def test_changed_modules_end_it(tmp_path: Path) -> None:
    """After an upgrade, until `gpulet install` has written launchers that know it, Python alone serves."""
    source = tmp_path / "src"
    shutil.copytree(
        Path(launchers.__file__).parent.parent, source / "gpulet", ignore=shutil.ignore_patterns("__pycache__")
    )
    write = (
        "from pathlib import Path; from gpulet.engines import launchers\n"
        f"launchers.FAST_SHELLS = ({Path('/bin/sh').resolve().name!r},)\n"
        f"launchers.write_launchers(Path({str(tmp_path / 'bin')!r}), Path({str(tmp_path / 'workers')!r}))"
    )
    environ = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", write], env=environ, check=True)
    call = [str(tmp_path / "bin" / "gpulet-prefork"), "--workers=1"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True) as running:
        until(lambda: list((tmp_path / "workers").glob("*/*/answer")))
        with open(source / "gpulet/launch/plan.py", "a") as file:
            file.write("# newer\n")
        assert running.wait(20) == 1
        assert running.stderr and "run: gpulet install" in running.stderr.read()
    assert not list((tmp_path / "workers").glob("*/*"))
