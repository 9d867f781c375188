"""Device rules, on both hierarchies of this machine for real: a node that doesn't open for lack of a driver gives
ENXIO where the rules let it through, and EPERM where they don't."""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path

import pytest

from gpulet import linux
from gpulet.errors import InjectionError, StepFailed
from gpulet.injection import cgroup, cgroup_bpf
from gpulet.injection.cgroup import Cgroup
from support.cgroup_folders import attach, opened

DENY = cgroup_bpf.instruction(cgroup_bpf.MOV_K, 0, value=0) + cgroup_bpf.instruction(cgroup_bpf.EXIT)


def programs(folder: Path) -> tuple[int, tuple[int, ...]]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        return cgroup_bpf.attached(fd)
    finally:
        os.close(fd)


def hardened(program: bytes) -> bytes:
    """What the kernel makes of a program to hide its constants, and then shows in place of it."""
    rows = list(struct.iter_unpack("=BBhi", program))
    secret = 0x1234567
    constant = (cgroup_bpf.MOV_K, cgroup_bpf.AND_K, cgroup_bpf.JNE_K)
    zero = [code == cgroup_bpf.MOV_K and not value for code, _, _, value in rows]
    hides = [code in constant and not none for (code, *_), none in zip(rows, zero, strict=True)]
    starts = [index + 2 * sum(hides[:index]) for index in range(len(rows) + 1)]
    made = b""
    for index, (code, registers, offset, value) in enumerate(rows):
        if code in (cgroup_bpf.JNE_K, cgroup_bpf.JNE_X):
            last = starts[index] + (2 if hides[index] else 0)
            offset = starts[index + 1 + offset] - last - 1
        if zero[index]:
            made += cgroup_bpf.instruction(0xAF, registers & 15, registers & 15)
        elif not hides[index]:
            made += struct.pack("=BBhi", code, registers, offset, value)
        else:
            made += cgroup_bpf.instruction(cgroup_bpf.MOV_K, 11, value=value ^ secret)
            made += cgroup_bpf.instruction(0xA7, 11, value=secret)  # BPF_ALU64 | BPF_XOR | BPF_K
            made += cgroup_bpf.instruction(code | 8, registers & 15, 11, offset)  # BPF_K becomes BPF_X
    return made


def refused(where: Cgroup, rules: list[cgroup.Rule]) -> str:
    """What a process without root is told that would allow devices, "" where nothing keeps it from them."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setresuid(12345, 12345, 12345)
        try:
            change = cgroup.allow(where, rules)
            change.undo()
            change.close()
        except StepFailed as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    with open(reading) as pipe:
        return pipe.read()


@pytest.mark.root
class TestVersion1:
    def test_rules_and_back(self, v1: Path, nodes: list[Path]) -> None:
        (v1 / "devices.deny").write_text("a")
        assert opened(v1, nodes) == ["EPERM"] * 3
        change = cgroup.allow(Cgroup(1, str(v1)), [(195, 0), (195, 2)])
        assert opened(v1, nodes) == ["ENXIO", "EPERM", "ENXIO"]
        assert (v1 / "devices.list").read_text().split("\n")[:2] == ["c 195:0 rw", "c 195:2 rw"]
        change.undo()
        change.close()
        assert opened(v1, nodes) == ["EPERM"] * 3

    def test_taking_back_keeps_what_was_there_before(self, v1: Path, nodes: list[Path]) -> None:
        (v1 / "devices.deny").write_text("a")
        (v1 / "devices.allow").write_text("c 195:0 rwm")
        cgroup.allow(Cgroup(1, str(v1)), [(195, 0), (195, 1)]).undo()
        assert opened(v1, nodes) == ["ENXIO", "EPERM", "EPERM"]

    def test_without_root_a_cgroup_that_lets_the_devices_is_left_alone(self, v1: Path) -> None:
        """As that of its caller, which a container without root is in: nothing has to be written there."""
        assert refused(Cgroup(1, str(v1)), [(195, 0)]) == ""
        (v1 / "devices.deny").write_text("a")
        (v1 / "devices.allow").write_text("c 195:* rw")
        assert refused(Cgroup(1, str(v1)), [(195, 0), (195, 2)]) == ""
        assert (v1 / "devices.list").read_text() == "c 195:* rw\n"

    def test_without_root_another_cgroup_is_refused_with_what_to_set(self, v1: Path) -> None:
        (v1 / "devices.deny").write_text("a")
        (v1 / "devices.allow").write_text("c 195:0 rw")
        told = refused(Cgroup(1, str(v1)), [(195, 0), (195, 2)])
        assert told.startswith(f"allow device {v1}/devices.allow: Permission denied")
        assert "no-cgroups = true in config.toml, or --no-cgroups" in told

    def test_a_folder_that_is_gone(self) -> None:
        with pytest.raises(StepFailed, match=r"allow device /nowhere/devices\.allow") as caught:
            cgroup.allow(Cgroup(1, "/nowhere"), [(195, 0)])
        assert caught.value.errno == errno.ENOENT


@pytest.mark.root
class TestVersion2:
    @pytest.mark.parametrize("flags", [0, 1, 2], ids=["one", "override", "several"])
    def test_rules_and_back(self, v2: Path, nodes: list[Path], flags: int) -> None:
        program = attach(v2, DENY, flags)
        os.close(program)
        assert opened(v2, nodes) == ["EPERM"] * 3
        change = cgroup.allow(Cgroup(2, str(v2)), [(195, 0), (195, 2)])
        assert opened(v2, nodes) == ["ENXIO", "EPERM", "ENXIO"]
        assert programs(v2)[0] == flags
        assert len(programs(v2)[1]) == 1
        change.undo()
        change.close()
        assert opened(v2, nodes) == ["EPERM"] * 3

    def test_a_hardened_program(self, v2: Path, nodes: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
        """As net.core.bpf_jit_harden shows it: every constant by way of register 11."""
        allows_one = cgroup_bpf.extend(DENY, [(195, 1)])
        os.close(attach(v2, allows_one, 2))
        shown = hardened(allows_one)
        with pytest.raises(OSError, match="Invalid argument"):
            cgroup_bpf.load(shown)
        monkeypatch.setattr(cgroup_bpf, "instructions", lambda _: shown)
        cgroup.allow(Cgroup(2, str(v2)), [(195, 0)])
        assert opened(v2, nodes) == ["ENXIO", "ENXIO", "EPERM"]

    def test_every_program_is_extended_since_all_must_agree(self, v2: Path, nodes: list[Path]) -> None:
        for _ in range(3):
            os.close(attach(v2, DENY, 2))
        cgroup.allow(Cgroup(2, str(v2)), [(195, 1)])
        assert opened(v2, nodes) == ["EPERM", "ENXIO", "EPERM"]
        assert len(programs(v2)[1]) == 3

    def test_a_program_held_by_a_link(self, v2: Path, nodes: list[Path]) -> None:
        program = cgroup_bpf.load(DENY)
        fd = os.open(v2, os.O_RDONLY)
        create = struct.pack("=IIII", program, fd, cgroup_bpf.BPF_CGROUP_DEVICE, 0)
        link = linux.bpf(28, create)[0]  # BPF_LINK_CREATE
        try:
            assert opened(v2, nodes) == ["EPERM"] * 3
            change = cgroup.allow(Cgroup(2, str(v2)), [(195, 1)])
            assert opened(v2, nodes) == ["EPERM", "ENXIO", "EPERM"]
            change.undo()
            change.close()
            assert opened(v2, nodes) == ["EPERM"] * 3
        finally:
            for descriptor in (link, fd, program):
                os.close(descriptor)

    def test_a_cgroup_without_a_program_allows_already(self, v2: Path, nodes: list[Path]) -> None:
        cgroup.allow(Cgroup(2, str(v2)), [(195, 0)])
        assert opened(v2, nodes) == ["ENXIO"] * 3
        assert programs(v2)[1] == ()

    def test_rules_join_those_put_there_before(self, v2: Path, nodes: list[Path]) -> None:
        os.close(attach(v2, DENY, 2))
        for _ in range(3):
            cgroup.allow(Cgroup(2, str(v2)), [(195, 0)])
        cgroup.allow(Cgroup(2, str(v2)), [(195, 1)])
        assert opened(v2, nodes) == ["ENXIO", "ENXIO", "EPERM"]
        fd = os.open(v2, os.O_RDONLY)
        (number,) = cgroup_bpf.attached(fd)[1]
        program = linux.bpf(cgroup_bpf.BPF_PROG_GET_FD_BY_ID, struct.pack("=III", number, 0, 0))[0]
        rules, rest = cgroup_bpf.split(cgroup_bpf.instructions(program))
        os.close(program)
        os.close(fd)
        assert rules == ((195, 0), (195, 1))
        assert rest == DENY

    def test_nothing_but_reading_and_writing(self, v2: Path, tmp_path: Path) -> None:
        os.close(attach(v2, DENY, 2))
        cgroup.allow(Cgroup(2, str(v2)), [(195, 5)])
        pid = os.fork()
        if not pid:
            (v2 / "cgroup.procs").write_text("0")
            try:
                os.mknod(tmp_path / "made", stat.S_IFCHR, os.makedev(195, 5))
            except PermissionError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    def test_without_root_it_is_refused_with_what_to_set(self, v2: Path) -> None:
        os.close(attach(v2, DENY, 2))
        told = refused(Cgroup(2, str(v2)), [(195, 0)])
        assert told.startswith(f"allow devices in cgroup {v2}: ")
        assert "no-cgroups = true in config.toml, or --no-cgroups" in told

    def test_a_folder_that_is_gone(self) -> None:
        with pytest.raises(StepFailed, match="allow devices in cgroup /nowhere") as caught:
            cgroup.allow(Cgroup(2, "/nowhere"), [(195, 0)])
        assert not caught.value.remedy


class TestFind:
    MOUNTS = (
        "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
        "36 31 0:33 {root} /sys/fs/cgroup/devices rw,relatime shared:1 - cgroup cgroup rw,devices\n"
        "41 31 0:38 {root} /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw\n"
    )

    def proc(self, tmp_path: Path, lines: str, root: str = "/") -> str:
        (tmp_path / "7").mkdir()
        (tmp_path / "self").mkdir()
        (tmp_path / "7/cgroup").write_text(lines)
        (tmp_path / "self/mountinfo").write_text(self.MOUNTS.format(root=root))
        return str(tmp_path)

    def test_hybrid_machines_keep_rules_in_version_1(self, tmp_path: Path) -> None:
        proc = self.proc(tmp_path, "5:devices:/kubepods/a:b\n0::/other\n")
        assert cgroup.find(7, proc) == Cgroup(1, "/sys/fs/cgroup/devices/kubepods/a:b")

    def test_version_2(self, tmp_path: Path) -> None:
        assert cgroup.find(7, self.proc(tmp_path, "0::/pod\n")) == Cgroup(2, "/sys/fs/cgroup/uni fied/pod")

    def test_a_mount_that_shows_a_part(self, tmp_path: Path) -> None:
        proc = self.proc(tmp_path, "5:devices:/docker/x/inner\n", root="/docker/x")
        assert cgroup.find(7, proc) == Cgroup(1, "/sys/fs/cgroup/devices/inner")

    def test_a_mount_that_shows_another_part(self, tmp_path: Path) -> None:
        with pytest.raises(InjectionError, match="has no cgroup for device rules that is mounted here: devices /else"):
            cgroup.find(7, self.proc(tmp_path, "5:devices:/else\n", root="/docker/x"))

    def test_a_version_1_hierarchy_that_isnt_mounted_cant_be_the_one(self, tmp_path: Path) -> None:
        proc = self.proc(tmp_path, "5:devices:/else\n0::/docker/x/in\n", root="/docker/x")
        assert cgroup.find(7, proc) == Cgroup(2, "/sys/fs/cgroup/uni fied/in")

    def test_neither(self, tmp_path: Path) -> None:
        with pytest.raises(InjectionError, match="process 7 has no cgroup for device rules"):
            cgroup.find(7, self.proc(tmp_path, "4:memory:/x\n"))

    def test_a_process_that_is_gone(self, tmp_path: Path) -> None:
        with pytest.raises(StepFailed, match="find cgroup of process 8"):
            cgroup.find(8, self.proc(tmp_path, ""))


class TestProgram:
    def test_what_is_not_hardened_stays_as_it_is(self) -> None:
        program = cgroup_bpf.extend(DENY, [(195, 0)])
        assert cgroup_bpf.loadable(program) == program

    def test_no_register_is_free_for_a_hardened_program(self) -> None:
        every = b"".join(cgroup_bpf.instruction(cgroup_bpf.MOV_K, register) for register in range(12))
        with pytest.raises(StepFailed, match=r"no register is free; set net\.core\.bpf_jit_harden"):
            cgroup_bpf.loadable(every)

    def test_split_gives_back_what_extend_was_given(self) -> None:
        rules = ((195, 0), (195, 255), (509, 1))
        assert cgroup_bpf.split(cgroup_bpf.extend(DENY, rules)) == (rules, DENY)

    @pytest.mark.parametrize("code", [b"", DENY, DENY * 20, cgroup_bpf.extend(DENY, ((1, 2),))[:-24]])
    def test_split_leaves_other_programs_alone(self, code: bytes) -> None:
        assert cgroup_bpf.split(code) == ((), code)

    def test_too_many_rules(self) -> None:
        with pytest.raises(StepFailed, match="more than"):
            cgroup_bpf.extend(DENY, [(195, minor) for minor in range(9000)])
