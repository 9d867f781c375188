"""A program in a container's root with next to no rights, and ldconfig as that program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulet import linux, mount_api
from gpulet.errors import StepFailed
from gpulet.injection import confine
from gpulet.injection.live import in_child
from support.made_elf import library

pytestmark = pytest.mark.root

PROBE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char line[256];
    if (argc > 1 && !strcmp(argv[1], "spin")) for (;;) argc++;
    if (argc > 1 && !strcmp(argv[1], "fail")) { puts("no luck"); return 7; }
    printf("pid %d uid %d gid %d env %d\n", getpid(), getuid(), getgid(), environ[0] != NULL);
    printf("socket %d mount %d chroot %d\n", socket(AF_INET, SOCK_STREAM, 0) < 0 ? errno : 0,
           mount("none", "/etc", "tmpfs", 0, 0) < 0 ? errno : 0, chroot("/etc") < 0 ? errno : 0);
    printf("host %d dev %d sys %d fd %d\n", access("/HOST", F_OK), open("/dev/new", O_CREAT | O_WRONLY, 0600),
           access("/sys/kernel", F_OK), access("/dev/fd/0", F_OK));
    printf("write %d\n", open("/etc/written", O_CREAT | O_WRONLY, 0600) < 0 ? errno : 0);
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, "Cap", 3) || !strncmp(line, "Seccomp:", 8) || !strncmp(line, "NoNewPrivs", 10))
            printf("%s", line);
    int last = 0;
    for (int fd; (fd = open("/etc", O_RDONLY)) >= 0;) last = fd;
    printf("files %d\n", last + 1);
    return 0;
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(PROBE.replace("HOST", str(folder).lstrip("/") + "/probe.c"))
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    subprocess.run(["cc", "-static", "-o", str(folder / "probe"), str(folder / "probe.c")], check=True)
    return folder / "probe"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "image"
    for name in ("etc", "proc", "sys", "dev", "usr/lib", "sbin"):
        (root / name).mkdir(parents=True)
    return root


def inside(image: Path, program: Callable[[], confine.Program], *arguments: str, **more: object) -> str:
    """What the program wrote, run from a process in a mount namespace of its own, as a live container's."""

    def work() -> tuple[str, ...]:
        ready = program()
        linux.unshare(linux.CLONE_NEWNS)
        mount_api.mount("none", "/", "", mount_api.MS_REC | mount_api.MS_PRIVATE)
        mount_api.mount(str(image), str(image), "", mount_api.MS_BIND | mount_api.MS_REC)
        root = os.open(image, os.O_PATH)
        owner = image.stat()
        said = confine.run(root, ready, arguments, (owner.st_uid, owner.st_gid), **more)  # type: ignore[arg-type]
        return (said.decode(),)

    return in_child(work)[0]


def facts(said: str) -> dict[str, str]:
    words = said.replace(":\t", " ").split()
    return dict(zip(words[::2], words[1::2], strict=True))


DAC_OVERRIDE = f"{1 << confine.CAP_DAC_OVERRIDE:016x}"
NOTHING = f"{0:016x}"


@pytest.mark.parametrize("pivot", [True, False])
@pytest.mark.parametrize("owner", [0, 4711])
def test_a_hosts_program_has_one_capability_and_sees_the_image_alone(
    image: Path, probe: Path, owner: int, pivot: bool
) -> None:
    os.chown(image, owner, owner)
    seen = facts(inside(image, lambda: confine.open_host_program(str(probe)), pivot=pivot))
    assert (seen["pid"], seen["uid"], seen["gid"], seen["env"]) == ("1", str(owner), str(owner), "0")
    assert (seen["socket"], seen["mount"], seen["chroot"]) == ("1", "1", "1")  # EPERM
    assert (seen["host"], seen["dev"], seen["sys"], seen["fd"]) == ("-1", "-1", "-1", "0")
    assert seen["files"] == "64"
    assert (seen["CapPrm"], seen["CapEff"], seen["CapInh"]) == (DAC_OVERRIDE,) * 3
    assert seen["CapBnd"] == NOTHING
    assert (seen["NoNewPrivs"], seen["Seccomp"]) == ("1", "2")
    assert seen["write"] == "0"
    assert (image / "etc/written").stat().st_uid == owner
    assert not list((image / "dev").iterdir())


def test_an_images_program_has_none_and_no_proc(image: Path, probe: Path) -> None:
    shutil.copy(probe, image / "sbin/probe")
    os.chown(image, 4711, 4711)
    seen = facts(inside(image, lambda: confine.Program("/sbin/probe")))
    assert seen["uid"] == "4711"
    assert seen["write"] == "13"  # the folder belongs to root, and nothing overrides that
    assert seen["fd"] == "-1"
    assert "CapEff" not in seen  # it sees no /proc to read it from


def test_a_script_of_the_hosts_runs(image: Path, tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if not busybox:
        pytest.skip("busybox is not installed")
    shutil.copy(busybox, image / "sbin/sh")
    script = tmp_path / "script"
    script.write_text("#!/sbin/sh\necho hello $1\n")
    assert inside(image, lambda: confine.open_host_program(str(script)), "you") == "hello you\n"


def test_an_exit_code_and_the_last_line_are_told(image: Path, probe: Path) -> None:
    with pytest.raises(StepFailed, match=r"process .*/probe: failed with error code 7 \(no luck\)"):
        inside(image, lambda: confine.open_host_program(str(probe)), "fail")


def test_a_program_that_never_ends_is_ended(image: Path, probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "LIMITS", ((0, 1),))
    with pytest.raises(StepFailed, match="terminated with signal 9"):
        inside(image, lambda: confine.open_host_program(str(probe)), "spin")


@pytest.mark.parametrize("path", ["/nope", "/etc"])
def test_what_is_no_program(image: Path, path: str) -> None:
    with pytest.raises(StepFailed, match="execute") as caught:
        inside(image, lambda: confine.Program(path))
    assert caught.value.errno == (2 if path == "/nope" else 13)


# Ubuntu's ldconfig is a shell script around ldconfig.real
LDCONFIG = "/sbin/ldconfig.real" if Path("/sbin/ldconfig.real").exists() else "/sbin/ldconfig"


@pytest.mark.skipif(not Path("/sbin/ldconfig").exists(), reason="no ldconfig")
def test_ldconfig_writes_a_cache_in_the_image(image: Path) -> None:
    (image / "usr/lib/libx.so.1.2").write_bytes(library("libx.so.1"))
    (image / "usr/lib/libx.so.1.2").chmod(0o755)
    arguments = ["-f", "/etc/ld.so.conf", "-C", "/etc/ld.so.cache", "/usr/lib"]
    inside(image, lambda: confine.open_host_program(LDCONFIG), *arguments)
    listed = subprocess.run(
        ["/sbin/ldconfig", "-p", "-C", str(image / "etc/ld.so.cache")], capture_output=True, text=True, check=True
    ).stdout
    assert "libx.so.1 (libc6,x86-64) => /usr/lib/libx.so.1" in listed or sys.byteorder == "big"
    assert os.readlink(image / "usr/lib/libx.so.1") == "libx.so.1.2"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_lets_the_listed_calls_through_and_no_other(machine: str) -> None:
    import struct

    rows = list(struct.iter_unpack("=HBBI", confine.filter_program(machine)))
    column, arch = confine._MACHINES[machine]
    listed = {row[column] for row in confine._CALLS.values() if row[column] >= 0}

    def answer(number: int, given: int = arch) -> int:
        place, value = 0, 0
        while True:
            code, true, false, constant = rows[place]
            if code == 0x06:
                return constant
            if code == 0x20:
                value = {0: number, 4: given}[constant]
            place += 1 + ((true if value == constant else false) if code == 0x15 else 0)

    allowed = {number for number in range(500) if answer(number) == 0x7FFF0000}
    assert allowed == listed
    assert answer(500) == 0x00050001
    assert answer(0, arch ^ 1) == 0x80000000
    assert answer(0x40000000) == 0x00050001  # x32's numbers
