"""Cgroups of a test's own, on both hierarchies, and what opening a device answers to a process in one."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulet import linux
from gpulet.injection import cgroup_bpf


def hierarchy(kind: str, controller: str = "") -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        dash = fields.index("-")
        if fields[dash + 1] == kind and (not controller or controller in fields[dash + 3].split(",")):
            return Path(fields[4])
    pytest.skip(f"no {kind} {controller} is mounted here")


def made(parent: Path) -> Iterator[Path]:
    folder = parent / f"gpulet-test-{secrets.token_hex(4)}"
    folder.mkdir()
    yield folder
    folder.rmdir()


def opened(folder: Path, nodes: list[Path], flags: int = os.O_RDWR) -> list[str]:
    """What opening each node answers to a process of the cgroup."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        answers = []
        (folder / "cgroup.procs").write_text("0")
        for node in nodes:
            try:
                os.close(os.open(node, flags))
                answers.append("open")
            except OSError as error:
                answers.append(errno.errorcode[error.errno or 0])
        os.write(writing, " ".join(answers).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as pipe:
        return pipe.read().split()


def attach(folder: Path, code: bytes, flags: int) -> int:
    program = cgroup_bpf.load(code)
    fd = os.open(folder, os.O_RDONLY)
    linux.bpf(cgroup_bpf.BPF_PROG_ATTACH, struct.pack("=IIII", fd, program, cgroup_bpf.BPF_CGROUP_DEVICE, flags))
    os.close(fd)
    return program
