"""log.py: records as engines read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulet.launch.log import Log, text_line


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
