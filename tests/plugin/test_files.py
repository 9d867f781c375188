"""files.py reads a file, and says at once what is there instead of one."""

from __future__ import annotations

import os

import pytest

from gpulet.plugin import files


def test_a_file(tmp_path):
    (tmp_path / "f").write_text("text é")
    (tmp_path / "link").symlink_to("f")  # as a ConfigMap's files are
    assert files.read(str(tmp_path / "link")) == "text é"
    (tmp_path / "f").write_bytes(b"\xff")
    with pytest.raises(ValueError):
        files.read(str(tmp_path / "f"))


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as stream:
        stream.truncate(1 << 40)
    for path, text in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe or a device"),
        ("/dev/zero", "is a pipe or a device"),
        (tmp_path / "large", "has more than 4 MiB"),
        (tmp_path / "nowhere", "No such file"),
    ):
        with pytest.raises(OSError, match=text):
            files.read(str(path))
