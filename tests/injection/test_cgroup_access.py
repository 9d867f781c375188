"""cgroup_access.py says what the kernel does: beside open(2) itself, and on the filters that runc and crun write."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from gpulet.injection.cgroup import Cgroup
from gpulet.injection.cgroup_access import _Unknown, decides, hierarchies, may_use
from gpulet.injection.cgroup_bpf import EXIT, JNE_K, LDX_W, MOV_K, MOV_X, extend, instruction
from support.cgroup_folders import attach, hierarchy, opened
from support.real_container import Bundle, config

DENY = instruction(MOV_K, 0, value=0) + instruction(EXIT)
ALLOW = instruction(MOV_K, 0, value=1) + instruction(EXIT)
RULES = [(195, 0), (195, 1), (195, 2)]
ANSWERS = {"ENXIO": True, "open": True, "EPERM": False}


def agrees(cgroup: Cgroup, nodes: list[Path]) -> list[bool]:
    """What opening each node says, which must be what we say."""
    kernel = [ANSWERS[answer] for answer in opened(Path(cgroup.folder), nodes)]
    assert [may_use(cgroup, rule) for rule in RULES] == kernel
    return kernel


@pytest.mark.root
@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([], [True, True, True]),  # as its parent, which allows all here
        (["a"], [False, False, False]),
        (["a", "c 195:0 rwm", "c 195:2 rw"], [True, False, True]),
        (["a", "c 195:* rw"], [True, True, True]),
        (["a", "c *:1 rwm", "c *:* m", "b 195:0 rwm"], [False, True, False]),
        (["a", "c 195:0 r", "c 195:1 w"], [False, False, False]),
    ],
)
def test_version_1(v1: Path, nodes: list[Path], lines: list[str], wanted: list[bool]) -> None:
    for number, line in enumerate(lines):
        (v1 / ("devices.allow" if number else "devices.deny")).write_text(line)
    assert agrees(Cgroup(1, str(v1)), nodes) == wanted


@pytest.mark.root
def test_version_2(v2: Path, nodes: list[Path]) -> None:
    assert agrees(Cgroup(2, str(v2)), nodes) == [True] * 3  # no filter at all
    os.close(attach(v2, extend(DENY, [(195, 1)]), 2))
    assert agrees(Cgroup(2, str(v2)), nodes) == [False, True, False]
    os.close(attach(v2, extend(DENY, [(195, 0), (195, 1)]), 2))  # both must agree
    assert agrees(Cgroup(2, str(v2)), nodes) == [False, True, False]
    below = v2 / "below"
    below.mkdir()
    try:
        assert agrees(Cgroup(2, str(below)), nodes) == [False, True, False]
    finally:
        below.rmdir()


# as systemd writes its filters, in its way of asking: narrow loads, 32-bit jumps, leaps over rules
SYSTEMD_LIKE = b"".join(
    (
        instruction(0x69, 2, 1, 0),  # half word: the type
        instruction(LDX_W, 3, 1, 0),
        instruction(0x74, 3, value=16),  # the access
        instruction(LDX_W, 4, 1, 4),
        instruction(LDX_W, 5, 1, 8),
        instruction(JNE_K, 2, offset=6, value=2),
        instruction(MOV_X, 6, 3),
        instruction(0x57, 6, value=-8),  # BPF_ALU64 | BPF_AND
        instruction(JNE_K, 6, offset=3, value=0),
        instruction(0x56, 4, offset=2, value=195),  # BPF_JMP32 | BPF_JNE
        instruction(0xA5, 5, offset=1, value=2),  # BPF_JLT
        instruction(0x05, 0, offset=2),  # BPF_JA
        instruction(MOV_K, 0, value=1),
        instruction(EXIT),
        instruction(0xB4, 0, value=0),
        instruction(EXIT),
    )
)


@pytest.mark.root
def test_other_forms_of_filters(v2: Path, nodes: list[Path]) -> None:
    os.close(attach(v2, SYSTEMD_LIKE, 2))
    agrees(Cgroup(2, str(v2)), nodes)


@pytest.mark.e2e
@pytest.mark.root
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_real_runtimes(tmp_path: Path, nodes: list[Path], runtime: str, version: str) -> None:
    bundle = Bundle(tmp_path, "none")
    rules = [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "minor": 2, "access": "r"},
        {"allow": True, "type": "c", "major": 10, "minor": 200, "access": "rwm"},
    ]
    made = config(["/bin/sleep", "30"], linux={"resources": {"devices": rules}})
    made["linux"]["namespaces"] = [{"type": "mount"}, {"type": "pid"}]
    results: list[object] = []
    running = threading.Thread(target=lambda: results.append(bundle.run(made, runtime, version)))
    running.start()
    try:
        top = hierarchy("cgroup", "devices") if version == "v1" else hierarchy("cgroup2")
        folder = top / bundle.id
        deadline = time.monotonic() + 20
        while not (folder.is_dir() and _sleeps(folder)) and running.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if not running.is_alive() and "RLIM_MEMLOCK" in str(results):
            pytest.skip("crun may not raise the limit of locked memory here, for its filter")
        assert running.is_alive(), results
        assert agrees(Cgroup(1 if version == "v1" else 2, str(folder)), nodes) == [False, True, False]
    finally:
        for pid in _pids(folder):
            os.kill(pid, 9)
        running.join()


def _pids(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _sleeps(folder: Path) -> bool:
    try:
        return any(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in _pids(folder))
    except OSError:
        return False


@pytest.mark.parametrize(
    "program",
    [
        b"",
        instruction(EXIT),  # nothing in register 0
        instruction(MOV_K, 0, value=1),  # no end
        instruction(LDX_W, 0, 2, 0) + instruction(EXIT),  # from a register that doesn't point to the question
        instruction(LDX_W, 0, 1, 12) + instruction(EXIT),  # beyond it
        instruction(0x85, value=1) + instruction(EXIT),  # a call
        instruction(0x05, offset=-1) + instruction(EXIT),  # a loop
        instruction(0x18, 0, value=1) + instruction(0) + instruction(EXIT),  # a constant of 64 bits
    ],
)
def test_what_no_filter_does_is_not_known(program: bytes) -> None:
    with pytest.raises(_Unknown):
        decides(program, (195, 0))


@pytest.mark.parametrize("text", ["c 195\n", "c 195:0:1 rw\n", "nonsense\n"])
def test_a_list_of_another_form_is_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / "devices.list").write_text(text)
    assert may_use(Cgroup(1, str(tmp_path)), (195, 0)) is None
    assert may_use(Cgroup(1, str(tmp_path / "gone")), (195, 0)) is None
    assert may_use(Cgroup(2, str(tmp_path / "gone")), (195, 0)) is None
    assert may_use(Cgroup(2, str(tmp_path)), (195, 0)) is None  # no cgroup


def test_constants_that_the_kernel_hid() -> None:
    hidden = instruction(MOV_K, 11, value=0x1234 ^ 1) + instruction(0xA7, 11, value=0x1234) + instruction(MOV_X, 0, 11)
    assert decides(hidden + instruction(EXIT), (195, 0)) is True
    assert decides(instruction(0xAF, 0, 0) + instruction(EXIT), (195, 0)) is False
    assert decides(extend(ALLOW, []), (1, 3)) is True


def test_the_mounted_hierarchies(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    two = "41 31 0:38 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw,nsdelegate\n"
    one = "36 31 0:33 / /sys/fs/cgroup/devices rw,relatime shared:1 - cgroup cgroup rw,devices\n"
    (tmp_path / "self/mountinfo").write_text(two)
    assert list(hierarchies(str(tmp_path))) == [Cgroup(2, "/sys/fs/cgroup/uni fied")]
    (tmp_path / "self/mountinfo").write_text(two + one + one.replace("devices", "memory"))
    assert list(hierarchies(str(tmp_path))) == [Cgroup(1, "/sys/fs/cgroup/devices")]
