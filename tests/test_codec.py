"""codec.py must be json, only faster to load."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulet import codec

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_any_value_is_written_and_read_as_json_does(value: object) -> None:
    text = codec.dumps(value)
    assert text == json.dumps(value, separators=(",", ":")).encode()
    assert codec.loads(text) == json.loads(text) == value


@given(st.text(alphabet='{}[]",:0123456789.eE+-tfnrualse \\', max_size=24))
@settings(max_examples=300, deadline=None)
def test_any_text_is_taken_or_refused_as_json_does(text: str) -> None:
    try:
        wanted = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            codec.loads(text)
    else:
        assert codec.loads(text) == wanted


@pytest.mark.parametrize(
    "text", ["", " ", "{", '{"a":1,}', "[1 2]", '"\n"', '{"a":1} x', "nul", "01", "{1:2}", "[" * 200_000, '"\\u12"']
)
def test_what_is_not_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        codec.loads(text)


@pytest.mark.parametrize(("text", "sound"), [("", True), ("é😀", True), ("a\0", False), ("\ud800", False)])
def test_what_a_path_or_an_argument_can_be(text: str, sound: bool) -> None:
    assert codec.is_sound(text) is sound


def test_what_is_nested_too_deeply_is_a_value_error() -> None:
    deep: list[object] = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        codec.dumps(deep)
    while deep:  # or freeing it would go as deep
        deep = deep.pop()  # type: ignore[assignment]


def test_bytes_with_a_mark_and_space_around() -> None:
    assert codec.loads(b'\xef\xbb\xbf \n{"a": [1, 2.5, null, "\xc3\xa9"]} \n') == {"a": [1, 2.5, None, "é"]}


def test_the_first_value_alone_where_asked() -> None:
    assert codec.loads(b'{"pid": 1}\n{"pid": 2}', first=True) == {"pid": 1}
    with pytest.raises(ValueError):
        codec.loads(b'{"pid": 1}\n{"pid": 2}')
    with pytest.raises(ValueError):
        codec.loads(b"", first=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {"a": {1, 2}}, {(1, 2): 3}])
def test_what_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        codec.dumps(value)


def test_lone_surrogates_survive() -> None:
    assert codec.dumps(codec.loads(b'"\\ud800"')) == b'"\\ud800"'


def test_works_without_the_private_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_json", None)
    assert codec.loads(codec.dumps({"a": [1, "é"]})) == {"a": [1, "é"]}
    assert codec.loads(b"[1] [2]", first=True) == [1]


def test_good_text_loads_no_json_module() -> None:
    program = "import sys; from gpulet import codec; codec.loads(codec.dumps({'a': 1})); print('json' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o077, 0o600)])
def test_what_is_kept_is_nobody_elses_to_write_whatever_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """A low-level runtime may look for what is to be mounted as the container's own root."""
    at = tmp_path / "state/requests/one.json"
    before = os.umask(umask)
    try:
        codec.write_own(str(at), {"a": 1})
    finally:
        os.umask(before)
    assert codec.read_own(str(at)) == {"a": 1}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (at, *at.parents[:2])] == [mode, 0o755, 0o755]
    at.chmod(0o666)
    with pytest.raises(PermissionError):
        codec.read_own(str(at))


def test_a_link_in_the_way_is_not_written_through(tmp_path: Path) -> None:
    victim, at = tmp_path / "victim", tmp_path / "one.json"
    victim.write_text("untouched")
    (tmp_path / f"one.json.{os.getpid()}").symlink_to(victim)
    codec.write_own(str(at), {"a": 1})
    assert victim.read_text() == "untouched"
    assert not at.exists()
    codec.write_own(str(at), {"a": 1})  # what a killed one left is gone by then
    assert codec.read_own(str(at)) == {"a": 1}


def test_a_pipe_in_its_place_makes_nobody_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "one.json", 0o600)
    with pytest.raises(ValueError):
        codec.read_own(str(tmp_path / "one.json"))


def test_a_file_is_read_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a" * 10_000)
    assert codec.read_file(str(tmp_path / "file")) == b"a" * 10_000
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(OSError):
            codec.read_file(str(path))
