"""The live way into a process that has its namespaces: real mounts, real namespaces, real device nodes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from gpulet import mount_api
from gpulet.errors import StepFailed
from gpulet.injection import confine, live
from gpulet.injection.cgroup import Change
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from support.namespaced import mounts, namespaced, tree

pytestmark = pytest.mark.root

LDCONFIG = shutil.which("ldconfig") or ""
FILE = ("ro", "nosuid", "nodev", "rbind", "rprivate")
SOCKET = ("nosuid", "nodev", "noexec", "rbind", "rprivate")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A driver root with a library, a binary, a socket folder, a device and /proc/driver/nvidia of two GPUs."""
    root = tmp_path / "host"
    for name, text in {
        "usr/lib/libcuda.so.570.86.15": "library",
        "usr/bin/nvidia-smi": "binary",
        "run/nvidia-persistenced/socket": "socket",
        "proc/driver/nvidia/version": "NVRM version: 570.86.15\n",
        "proc/driver/nvidia/params": "DeviceFileMode: 438\nModifyDeviceFiles: 1\n",
        "proc/driver/nvidia/gpus/0000:19:00.0/information": "Model: A\n",
        "proc/driver/nvidia/gpus/0000:3B:00.0/information": "Model: B\n",
        "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access": "DeviceFileMinor: 12\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "dev").mkdir()
    os.mknod(root / "dev/nvidia0", stat.S_IFCHR | 0o666, os.makedev(195, 0))
    return root


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = tmp_path / "image"
    for name in ("etc", "dev", "proc", "usr/lib", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "etc/debian_version").write_text("12.0\n")
    (root / "var").mkdir()
    (root / "var/run").symlink_to("/run")  # which is not there
    return root


def injection(host: Path) -> Injection:
    return Injection(
        devices=(DeviceNode("/dev/nvidia0", str(host / "dev/nvidia0"), 195, 0),),
        mounts=(
            Mount(str(host / "usr/lib/libcuda.so.570.86.15"), "/usr/lib/libcuda.so.570.86.15", FILE, "library"),
            Mount(str(host / "usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi", FILE, "binary"),
            Mount(
                str(host / "run/nvidia-persistenced/socket"), "/var/run/nvidia-persistenced/socket", SOCKET, "socket"
            ),
        ),
        rootfs=RootfsWork(links=(SymLink("libcuda.so.1", "/usr/lib/libcuda.so"),), folders=("/usr/lib",)),
        proc_gpus=("0000:3b:00.0",),
        proc_mig=("/proc/driver/nvidia/capabilities/gpu0/mig/gi1/access",),
    )


def test_everything_is_in_the_container_and_nothing_on_the_host(host: Path, image: Path) -> None:
    driver = image / "proc/driver/nvidia"
    driver.mkdir(parents=True)
    before = mounts()
    with namespaced(image) as pid:
        done = live.apply(injection(host), pid, str(image), cgroups=False, driver_root=str(host))
        there = mounts(pid)
        inside = Path(f"/proc/{pid}/root{image}")
        assert {"ro", "nosuid", "nodev"} <= there[f"{image}/usr/lib/libcuda.so.570.86.15"]
        assert "noexec" not in there[f"{image}/usr/bin/nvidia-smi"]
        assert {"ro", "nosuid", "noexec"} <= there[f"{image}/dev/nvidia0"]
        assert "nodev" not in there[f"{image}/dev/nvidia0"]
        assert {"rw", "nosuid", "nodev", "noexec"} <= there[f"{image}/run/nvidia-persistenced/socket"]
        assert {"ro", "nosuid", "nodev", "noexec"} <= there[f"{image}/proc/driver/nvidia"]
        assert {"ro", "nosuid", "nodev", "noexec"} <= there[f"{image}/proc/driver/nvidia/gpus/0000:3B:00.0"]
        shown = inside / "proc/driver/nvidia"
        assert sorted(p.name for p in (shown / "gpus").iterdir()) == ["0000:3B:00.0"]
        assert (shown / "params").read_text() == "DeviceFileMode: 438\nModifyDeviceFiles: 0\n"
        assert (shown / "capabilities/gpu0/mig/gi1/access").read_text() == "DeviceFileMinor: 12\n"
        assert (inside / "dev/nvidia0").stat().st_rdev == os.makedev(195, 0)
        assert (inside / "usr/bin/nvidia-smi").read_text() == "binary"
        assert os.readlink(inside / "usr/lib/libcuda.so") == "libcuda.so.1"
        assert "mount device /dev/nvidia0" in done
    assert mounts() == before
    assert not list(driver.iterdir())


@pytest.mark.parametrize(
    "ldconfig",
    [False, pytest.param(True, marks=pytest.mark.skipif(not LDCONFIG, reason="no ldconfig on this machine"))],
)
def test_what_the_user_mounted_over_a_place_stays(host: Path, image: Path, ldconfig: bool) -> None:
    theirs = host / "theirs"
    theirs.write_text("theirs")
    places = ("usr/lib/libcuda.so", "etc/ld.so.cache")
    for place in places:
        (image / place).touch()
    program = confine.open_host_program(LDCONFIG) if ldconfig else None
    with namespaced(image, over=dict.fromkeys(places, theirs)) as pid:
        done = live.apply(injection(host), pid, str(image), cgroups=False, driver_root=str(host), ldconfig=program)
        inside = Path(f"/proc/{pid}/root{image}")
        assert [(inside / place).read_text() for place in places] == ["theirs"] * 2
    assert [line for line in done if "leave" in line] == [
        f"leave /{place}: something is mounted there" for place in places
    ]
    assert theirs.read_text() == "theirs"


def test_a_kernel_without_the_driver_goes_on(host: Path, image: Path) -> None:
    with namespaced(image) as pid:
        live.apply(injection(host), pid, str(image), cgroups=False, driver_root=str(host))
        assert f"{image}/dev/nvidia0" in mounts(pid)
    assert not (image / "proc/driver").exists()


def test_a_failure_takes_back_all_and_names_step_object_and_errno(host: Path, image: Path) -> None:
    (image / "usr/bin/nvidia-smi").mkdir()  # a binary can't be mounted over a folder
    before = tree(image)
    with namespaced(image) as pid:
        mounted = mounts(pid)
        with pytest.raises(StepFailed, match="mount on /usr/bin/nvidia-smi") as caught:
            live.apply(injection(host), pid, str(image), cgroups=False, driver_root=str(host))
        assert caught.value.errno == 21
        assert mounts(pid) == mounted
    assert tree(image) == before


def test_a_failure_takes_device_rules_back(host: Path, image: Path) -> None:
    rules: list[tuple[int, int]] = []

    def allow(_: object, wanted: list[tuple[int, int]]) -> Change:
        rules.extend(wanted)
        return Change(rules.clear, ())

    (image / "usr/bin/nvidia-smi").mkdir()
    with namespaced(image) as pid, pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.cgroup, "allow", allow)
        with pytest.raises(StepFailed, match="nvidia-smi"):
            live.apply(injection(host), pid, str(image), driver_root=str(host))
        assert rules == []
        (image / "usr/bin/nvidia-smi").rmdir()
        assert "allow c 195:0 rw" in live.apply(injection(host), pid, str(image), driver_root=str(host))
        assert rules == [(195, 0)]


def test_an_old_kernel_is_told(host: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(mount_api, "open_tree", refuse)
    with namespaced(image) as pid, pytest.raises(StepFailed, match=r"needs Linux 5\.12"):
        live.apply(injection(host), pid, str(image), cgroups=False)


def test_a_missing_source_changes_nothing(host: Path, image: Path) -> None:
    before = tree(image)
    (host / "usr/bin/nvidia-smi").unlink()
    with namespaced(image) as pid, pytest.raises(StepFailed, match=r"open .*nvidia-smi: No such file"):
        live.apply(injection(host), pid, str(image), cgroups=False, driver_root=str(host))
    assert tree(image) == before


def test_a_node_with_other_numbers_is_refused(host: Path, image: Path) -> None:
    wrong = Injection(devices=(DeviceNode("/dev/nvidia0", str(host / "dev/nvidia0"), 195, 7),))
    with namespaced(image) as pid, pytest.raises(StepFailed, match="not character device 195:7"):
        live.apply(wrong, pid, str(image), cgroups=False)


def test_a_node_that_the_host_lacks_is_made(host: Path, image: Path) -> None:
    node = DeviceNode("/dev/nvidia-caps/nvidia-cap3", str(host / "dev/nvidia-caps/nvidia-cap3"), 234, 3, mode=0o444)
    with namespaced(image) as pid:
        live.apply(Injection(devices=(node,)), pid, str(image), cgroups=False)
    made = (image / "dev/nvidia-caps/nvidia-cap3").lstat()
    assert (made.st_rdev, stat.S_IMODE(made.st_mode)) == (os.makedev(234, 3), 0o444)


def test_without_devbind_no_node_is_mounted(host: Path, image: Path) -> None:
    with namespaced(image) as pid:
        live.apply(injection(host), pid, str(image), cgroups=False, devbind=False, driver_root=str(host))
        assert f"{image}/dev/nvidia0" not in mounts(pid)


def test_the_profile_shows_the_gpus(host: Path, image: Path) -> None:
    work = Injection(rootfs=RootfsWork(profile_minors=(0, 1)))
    with namespaced(image) as pid:
        live.apply(work, pid, str(image), cgroups=False)
        file = Path(f"/proc/{pid}/root{image}/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf")
        assert file.read_text() == (
            '{"profiles": [{"name": "_container_", "settings": ["EGLVisibleDGPUDevices", 0x3]}],'
            ' "rules": [{"pattern": [], "profile": "_container_"}]}'
        )


def test_files_in_a_user_namespace_belong_to_its_root(host: Path, image: Path) -> None:
    for folder, folders, _ in os.walk(image):
        for name in [folder, *folders]:
            os.chown(Path(folder, name), 100000, 100000, follow_symlinks=False)
    for parent in list(image.parents)[:-2]:
        parent.chmod(0o755)
    with namespaced(image, user=True) as pid:
        live.apply(injection(host), pid, str(image), cgroups=False, driver_root=str(host))
        assert f"{image}/dev/nvidia0" in mounts(pid)
    assert (image / "run/nvidia-persistenced").stat().st_uid == 100000
    assert (image / "etc/ld.so.cache").stat().st_uid == 100000


def test_a_faulty_child_is_heard() -> None:
    def crash() -> tuple[str, ...]:
        raise ZeroDivisionError("odd")

    with pytest.raises(StepFailed, match="ZeroDivisionError: odd"):
        live.in_child(crash)


def test_a_process_that_is_gone() -> None:
    with pytest.raises(StepFailed, match="open namespace /proc/4194304/ns/mnt"):
        live.apply(Injection(), 4194304, "/nowhere", cgroups=False)
