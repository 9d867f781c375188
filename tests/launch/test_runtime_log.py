"""log.py: records as engines read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulet.launch import log
from gpulet.launch.log import Log, text_line
from gpulet.request.bundle import Container
from gpulet.request.decide import Decision, decide
from gpulet.request.policy import Ledger
from gpulet.settings import Settings
from support.containers import config, container, pod
from support.machine import Machine


@pytest.mark.parametrize(
    ("message", "quoted"),
    [
        ("plain-word_1.2/@^+", "plain-word_1.2/@^+"),
        ("two words", '"two words"'),
        ('a"b', '"a\\"b"'),
        ("", '""'),
        ("a\nb", '"a\\nb"'),
    ],
)
def test_text_is_quoted_where_it_must_be(message: str, quoted: str) -> None:
    line = text_line("error", message, {"key": message})
    assert line.startswith('time="2')
    assert line.endswith(f" level=error msg={quoted} key={quoted}")


def test_json_has_one_object_a_line(tmp_path: Path) -> None:
    sink = tmp_path / "deep" / "log.json"
    log = Log([str(sink), "", "/dev/null", str(sink)], "info", "json")
    log.write("error", "first\nline", where="é")
    log.write("info", "second")
    log.write("debug", "not told")
    first, second = map(json.loads, sink.read_text().splitlines())
    assert (first["level"], first["msg"], first["where"]) == ("error", "first\nline", "é")
    assert second["msg"] == "second"
    assert sink.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("level", "told"),
    [("error", 1), ("WARN", 2), ("warning", 2), ("info", 3), ("debug", 4), ("nonsense", 3)],
)
def test_levels(tmp_path: Path, level: str, told: int) -> None:
    log = Log([str(tmp_path / "log")], level)
    for one in ("error", "warning", "info", "debug"):
        log.write(one, one)
    assert len((tmp_path / "log").read_text().splitlines()) == told


def test_a_sink_that_cannot_be_written_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    log = Log([str(tmp_path / "file" / "log"), str(tmp_path / "log")])
    log.error("no GPU")
    assert "no GPU" in (tmp_path / "log").read_text()
    assert "level=error" in capsys.readouterr().err


def test_a_pipe_makes_nobody_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    sinks = Log([str(tmp_path / "pipe"), str(tmp_path / "log")])
    sinks.write("error", "nobody reads")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        sinks.write("error", "somebody reads")
        assert b"somebody reads" in os.read(reader, 9999)
        for _ in range(2000):
            sinks.write("error", "more than it holds" * 10)
    finally:
        os.close(reader)
    assert len((tmp_path / "log").read_text().splitlines()) == 2002


def test_no_pipe_in_a_configured_place_keeps_a_container_waiting(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for name in ("debug", "log", "ledger"):
        os.mkfifo(tmp_path / name)
    machine.config_file.write_text(
        f"[nvidia-container-cli]\nroot = '{machine.root}'\n"
        f"[nvidia-container-runtime]\nruntimes = ['{machine.low}']\ndebug = '{tmp_path}/debug'\n"
        f"[gpulet]\nstate-dir = '{tmp_path}/state'\n"
        f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{tmp_path}/ledger'\n"
    )
    machine.make(config("NVIDIA_VISIBLE_DEVICES=0", annotations=pod()))
    create = ("create", "--bundle", str(machine.bundle), "x")
    done = machine.run("gpulet-runtime", "--log", f"{tmp_path}/log", *create)
    assert (done.returncode, machine.called("low")) == (0, ["--log", f"{tmp_path}/log", *create])
    (machine.bundle / "config.json").write_text("{")
    done = machine.run("gpulet-runtime", "--log", f"{tmp_path}/log", *create)
    assert done.returncode == 1
    assert "level=error" in done.stderr


def test_standard_error_is_a_log_too(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.configure()
    text = machine.config_file.read_text().replace(f"debug = '{tmp_path}/log'", "debug = '/dev/stderr'")
    machine.config_file.write_text(text)
    machine.make(config("NVIDIA_VISIBLE_DEVICES=0"))
    done = machine.run("gpulet-runtime", "create", "--bundle", str(machine.bundle), "x")
    assert done.returncode == 0
    assert "GPUs for a container" in done.stderr


# -- the system's log


@pytest.fixture
def system_log() -> Iterator[socket.socket]:
    """A socket such as syslogd listens at."""
    folder = tempfile.mkdtemp(prefix="gp")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(f"{folder}/log")
        one.settimeout(10)
        yield one
    shutil.rmtree(folder)


def denied(*env: str) -> tuple[Container, Decision]:
    one = container(*env, annotations=pod())
    return one, decide(one, Settings(policy_grants="kubelet"), Ledger("/ledger"))


def test_who_is_denied_stands_in_the_system_log(system_log: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SYSTEM_LOG", system_log.getsockname())
    log.tell_denied("gpulet-runtime", *denied("NVIDIA_VISIBLE_DEVICES=all"))
    record = system_log.recv(9999).decode()
    assert re.fullmatch(
        rf"<28>[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d gpulet-runtime\[{os.getpid()}\]: no GPU for a container "
        r'pod=default/two container=main reason="asked for all by NVIDIA_VISIBLE_DEVICES but the kubelet allocated '
        r'no GPU to it"',
        record,
    )


def test_no_container_writes_records_of_its_own(system_log: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "SYSTEM_LOG", system_log.getsockname())
    log.tell_denied("gpulet-runtime", *denied("NVIDIA_VISIBLE_DEVICES=0\n<0>kernel: panic," + "x" * 100_000))
    record = system_log.recv(200_000).decode()
    assert "\n" not in record
    assert len(record) <= 2048


def test_a_log_that_takes_nothing_delays_nobody(system_log: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    one = denied("NVIDIA_VISIBLE_DEVICES=all")
    monkeypatch.setattr(log, "SYSTEM_LOG", "/nowhere/log")
    log.tell_denied("gpulet-runtime", *one)
    monkeypatch.setattr(log, "SYSTEM_LOG", system_log.getsockname())
    for _ in range(2000):  # more than its queue holds; nobody reads it
        log.tell_denied("gpulet-runtime", *one)


@pytest.mark.root
@pytest.mark.parametrize("program", ["gpulet-runtime", "gpulet-hook"])
def test_the_programs_tell_it_where_no_log_is_configured(
    tmp_path: Path, system_log: socket.socket, program: str
) -> None:
    machine = Machine(tmp_path)
    machine.config_file.write_text(
        f"[nvidia-container-runtime]\nruntimes = ['{machine.low}']\n"
        f"[gpulet]\nstate-dir = '{tmp_path}/state'\n"
        f"[gpulet.policy]\ngrants = 'kubelet'\ncheckpoint = '{tmp_path}/none'\n"
    )
    machine.make(config("NVIDIA_VISIBLE_DEVICES=all", annotations=pod()))
    with_log = 'mount -t tmpfs none /dev && ln -s "$0" /dev/log && exec "$@"'
    arguments = ["create", "--bundle", str(machine.bundle), "x"] if program == "gpulet-runtime" else ["prestart"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", with_log, system_log.getsockname(), f"{tmp_path}/bin/{program}", *arguments],
        input=json.dumps({"pid": 1, "bundle": str(machine.bundle)}), capture_output=True, text=True, timeout=60,
        env={"PATH": os.environ["PATH"], "GPULET_CONFIG": str(machine.config_file)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = system_log.recv(9999).decode()
    assert f" {program}[" in record
    assert "can't be read" in record
