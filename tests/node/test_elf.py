"""The ELF reader on good files and on files that an image's maker has bent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulet.injection import compat
from gpulet.injection.beneath import Root
from gpulet.node.elf import Elf, Malformed
from support.made_elf import I386, library

NOTE = {"Format": 1, "CUDA Version": "12.9", "Driver": [535, 550], "Device": [1]}
GOOD = library("libcuda.so.1", note=NOTE)


def opened(data: bytes) -> int:
    fd = os.memfd_create("elf")
    os.write(fd, data)
    return fd


@pytest.mark.parametrize(("machine", "flags"), [(62, 0x303), (I386, 0x3), (183, 0xA03), (8, 0)])
def test_soname_and_machine(machine: int, flags: int) -> None:
    fd = opened(library("libx.so.7", machine=machine))
    found = Elf(fd)
    assert (found.soname(), found.cache_flags) == ("libx.so.7", flags)
    os.close(fd)


def test_the_machines_own_libraries() -> None:
    path = next(p for p in Path("/usr/lib").rglob("libc.so.6") if p.is_file())
    with path.open("rb") as file:
        assert Elf(file.fileno()).soname() == "libc.so.6"


def test_no_soname_and_no_note() -> None:
    fd = opened(library())
    assert Elf(fd).soname() == ""
    assert Elf(fd).note(compat.SECTION) is None
    os.close(fd)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 9, GOOD[:60], b"\x7fELF\x09\x01" + bytes(60)])
def test_what_is_no_elf_file(data: bytes) -> None:
    fd = opened(data)
    with pytest.raises(Malformed):
        Elf(fd).soname()
    os.close(fd)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_bent_files_end_in_an_answer_or_malformed(data: st.DataObject) -> None:
    bent = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(bent) - 8))
        value = data.draw(st.sampled_from([0, 1, 0x7F, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        bent[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    fd = opened(bytes(bent[: data.draw(st.integers(0, len(bent)))]))
    try:
        Elf(fd).soname()
        compat.note(fd)
    except Malformed:
        pass
    finally:
        os.close(fd)


class TestCompatDecision:
    @pytest.mark.parametrize(
        ("header", "version", "driver", "cuda", "used"),
        [
            (None, "575.57.08", "535.129.03", "", True),
            (None, "575.57.08", "575.51.03", "", False),  # same branch
            (None, "575.57.08", "580.65.06", "", False),
            (None, "575.57.08", "", "12.2", False),
            (None, "odd.version", "535.129.03", "", False),
            (NOTE, "575.57.08", "535.129.03", "", True),
            (NOTE, "575.57.08", "560.35.03", "", False),  # a branch that the note doesn't name
            (NOTE, "535.54.03", "535.129.03", "", False),  # older than the node's
            (NOTE, "575.57.08", "", "12.2", True),
            (NOTE, "575.57.08", "", "12.9", False),
            (NOTE, "575.57.08", "", "13.0", False),
            ({"Driver": "535"}, "575.57.08", "535.129.03", "", False),
            ({"CUDA Version": 12}, "575.57.08", "", "12.2", False),
            (None, "100.1", "99.1", "", True),  # as numbers, not as text
        ],
    )
    def test_table(self, header: dict[str, object] | None, version: str, driver: str, cuda: str, used: bool) -> None:
        good, reason = compat.decide(header, version, driver, cuda)
        assert good is used
        assert reason

    @pytest.mark.parametrize(
        ("files", "used"),
        [
            ({"libcuda.so.575.57.08": GOOD}, True),
            ({"libcuda.so.575.57.08": GOOD, "libcuda.so.570.1.2": GOOD}, False),
            ({"libcuda.so.575.57.08": library("libcuda.so.1", note=b"\xff" * 40)}, False),
            ({"libcuda.so.575.57.08": b"no library"}, False),
            ({"libcuda.so.1": GOOD}, False),
            ({}, False),
        ],
    )
    def test_images(self, tmp_path: Path, files: dict[str, bytes], used: bool) -> None:
        (tmp_path / "compat").mkdir()
        for name, data in files.items():
            (tmp_path / "compat" / name).write_bytes(data)
        with Root(str(tmp_path)) as root:
            choice = compat.choose(root, "/compat", "535.129.03")
        assert choice.folder == ("/compat" if used else "")
        assert choice.reason

    def test_links_dont_count(self, tmp_path: Path) -> None:
        (tmp_path / "compat").mkdir()
        (tmp_path / "real").write_bytes(GOOD)
        (tmp_path / "compat/libcuda.so.575.57.08").symlink_to("/real")
        with Root(str(tmp_path)) as root:
            assert compat.choose(root, "/compat", "535.129.03").folder == ""
