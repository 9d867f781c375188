"""The work beneath a root file system: links, the loader's cache and configuration, profile; nothing leaves it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from gpulet import linux
from gpulet.errors import StepFailed
from gpulet.injection import frozen, loader, rootfs
from gpulet.injection.model import Mount, RootfsWork, SymLink
from gpulet.node import ldcache
from support.made_elf import I386, library
from support.namespaced import tree

LIB = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture(autouse=True, params=["openat2", "by hand"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything once as on a kernel of today, and once as on one without openat2."""
    monkeypatch.setattr(linux, "_have_openat2", request.param == "openat2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / LIB[1:]).mkdir(parents=True)
    (made / "etc").mkdir()
    (made / "etc/debian_version").write_text("12.5\n")
    return made


@pytest.fixture
def host(tmp_path: Path) -> Path:
    folder = tmp_path / "host"
    folder.mkdir()
    (folder / "libcuda.so.570.86.15").write_bytes(library("libcuda.so.1"))
    (folder / "libnvidia-glcore.so.570.86.15").write_bytes(library("libnvidia-glcore.so.570.86.15"))
    return folder


def mount(host: Path, name: str, folder: str = LIB, kind: str = "library") -> Mount:
    return Mount(str(host / name), f"{folder}/{name}", kind=kind)


def cached(root: Path) -> dict[tuple[str, int], str]:
    entries = ldcache.parse((root / "etc/ld.so.cache").read_bytes()).entries
    return {(entry.name, entry.flags): entry.path for entry in reversed(entries)}


CUDA = "libcuda.so.570.86.15"


def prepare(root: Path, host: Path, *folders: str) -> tuple[str, ...]:
    """Puts the host's libcuda in the first folder."""
    return rootfs.prepare(str(root), RootfsWork(folders=folders), [mount(host, CUDA, folders[0])])


class TestLinks:
    def test_made_with_their_folders(self, root: Path) -> None:
        done = rootfs.prepare(str(root), RootfsWork((SymLink("libcuda.so.1", "/opt/lib/libcuda.so"),)))
        assert os.readlink(root / "opt/lib/libcuda.so") == "libcuda.so.1"
        assert done == ("link /opt/lib/libcuda.so -> libcuda.so.1",)

    def test_made_twice_changes_nothing(self, root: Path) -> None:
        work = RootfsWork((SymLink("a", "/x"),))
        rootfs.prepare(str(root), work)
        before = (root / "x").lstat()
        assert rootfs.prepare(str(root), work) == ()
        assert (root / "x").lstat().st_ino == before.st_ino

    @pytest.mark.parametrize("what", ["link", "file"])
    def test_another_link_or_file_is_replaced(self, root: Path, what: str) -> None:
        (root / "x").symlink_to("old") if what == "link" else (root / "x").write_text("old")
        rootfs.prepare(str(root), RootfsWork((SymLink("new", "/x"),)))
        assert os.readlink(root / "x") == "new"
        assert sorted(path.name for path in root.iterdir()) == ["etc", "usr", "x"]

    def test_a_folder_in_the_way_is_an_error_and_nothing_stays(self, root: Path) -> None:
        (root / "x/inner").mkdir(parents=True)
        before = tree(root)
        with pytest.raises(StepFailed, match="write /x: a folder, device or pipe is there"):
            rootfs.prepare(str(root), RootfsWork((SymLink("a", "/new/y"), SymLink("b", "/x"))))
        assert tree(root) == before

    def test_a_folder_far_down_in_the_way_is_named_whole(self, root: Path) -> None:
        (root / LIB[1:] / "libcuda.so.1").mkdir()
        with pytest.raises(StepFailed, match=f"write {LIB}/libcuda.so.1: a folder"):
            rootfs.prepare(str(root), RootfsWork((SymLink(CUDA, f"{LIB}/libcuda.so.1"),)))

    def test_targets_may_be_anything_but_are_only_text(self, root: Path) -> None:
        rootfs.prepare(str(root), RootfsWork((SymLink("/../../etc/shadow", "/x"),)))
        assert os.readlink(root / "x") == "/../../etc/shadow"

    @pytest.mark.parametrize("path", ["/", "/..", "x/."])
    def test_a_path_without_a_name(self, root: Path, path: str) -> None:
        with pytest.raises(StepFailed, match="no last name"):
            rootfs.prepare(str(root), RootfsWork((SymLink("a", path),)))


class TestLoader:
    def test_libraries_that_are_yet_to_be_mounted(self, root: Path, host: Path) -> None:
        mounts = [mount(host, "libcuda.so.570.86.15"), mount(host, "libnvidia-glcore.so.570.86.15")]
        rootfs.prepare(str(root), RootfsWork(folders=(LIB,)), mounts)
        assert cached(root) == {
            ("libcuda.so.1", 0x303): f"{LIB}/libcuda.so.1",
            ("libnvidia-glcore.so.570.86.15", 0x303): f"{LIB}/libnvidia-glcore.so.570.86.15",
        }
        assert os.readlink(root / LIB[1:] / "libcuda.so.1") == "libcuda.so.570.86.15"

    def test_32_bit_libraries_have_flags_of_their_own(self, root: Path, host: Path) -> None:
        (host / "libcuda.so.1").write_bytes(library("libcuda.so.1", machine=I386))
        rootfs.prepare(
            str(root), RootfsWork(folders=("/usr/lib32",)), [mount(host, "libcuda.so.1", "/usr/lib32", "library32")]
        )
        assert cached(root) == {("libcuda.so.1", 0x3): "/usr/lib32/libcuda.so.1"}

    def test_the_images_own_entries_stay(self, root: Path, host: Path) -> None:
        own = ldcache.Entry("libz.so.1", "/lib/libz.so.1")
        (root / "etc/ld.so.cache").write_bytes(ldcache.merge(None, [own]))
        prepare(root, host, LIB)
        assert cached(root)[("libz.so.1", 0x303)] == "/lib/libz.so.1"
        assert cached(root)[("libcuda.so.1", 0x303)] == f"{LIB}/libcuda.so.1"

    def test_a_damaged_cache_is_replaced(self, root: Path, host: Path) -> None:
        (root / "etc/ld.so.cache").write_bytes(b"rubbish")
        prepare(root, host, LIB)
        assert ("libcuda.so.1", 0x303) in cached(root)

    def test_twice_is_as_once(self, root: Path, host: Path) -> None:
        work = RootfsWork(folders=("/opt/driver",))
        mounts = [mount(host, "libcuda.so.570.86.15", "/opt/driver")]
        rootfs.prepare(str(root), work, mounts)
        before = tree(root)
        assert rootfs.prepare(str(root), work, mounts) == ()
        assert tree(root) == before

    def test_a_real_file_of_the_sonames_name_is_left_alone(self, root: Path, host: Path) -> None:
        (root / LIB[1:] / "libcuda.so.1").write_text("the image's")
        prepare(root, host, LIB)
        assert (root / LIB[1:] / "libcuda.so.1").read_text() == "the image's"

    def test_without_mounts_the_folders_are_read_as_ldconfig_does(self, root: Path) -> None:
        folder = root / "opt/lib"
        folder.mkdir(parents=True)
        for name, soname in {
            "libcuda.so.535.9": "libcuda.so.1",
            "libcuda.so.535.10": "libcuda.so.1",  # the highest counts
            "libplain.so": "",
            "notes.txt": "",
        }.items():
            (folder / name).write_bytes(library(soname))
        (folder / "libscript.so").write_text("GROUP ( libc.so.6 )")
        (folder / "liblink.so.9").symlink_to("libcuda.so.535.9")
        os.mkfifo(folder / "libpipe.so")
        rootfs.prepare(str(root), RootfsWork(folders=("/opt/lib",)))
        assert cached(root) == {
            ("libcuda.so.1", 0x303): "/opt/lib/libcuda.so.1",
            ("libplain.so", 0x303): "/opt/lib/libplain.so",
        }
        assert os.readlink(folder / "libcuda.so.1") == "libcuda.so.535.10"

    def test_configuration_names_only_folders_that_ldconfig_would_miss(self, root: Path, host: Path) -> None:
        (root / "etc/ld.so.conf.d").mkdir()
        (root / "etc/ld.so.conf.d/image.conf").write_text("# the image's\n/opt/listed\n")
        (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
        prepare(root, host, LIB, "/opt/listed", "/opt/new")
        assert (root / "etc/ld.so.conf.d/00-gpulet.conf").read_text() == "/opt/new\n"

    def test_a_bare_image_gets_what_it_lacks(self, tmp_path: Path, host: Path) -> None:
        bare = tmp_path / "bare"
        bare.mkdir()
        prepare(bare, host, LIB)
        assert (bare / "etc/ld.so.conf").read_text() == "include /etc/ld.so.conf.d/*.conf\n"
        assert (bare / "etc/ld.so.conf.d/00-gpulet.conf").read_text() == f"{LIB}\n"
        assert ("libcuda.so.1", 0x303) in cached(bare)

    def test_musl_gets_its_path_file(self, root: Path, host: Path) -> None:
        (root / "lib").mkdir()
        (root / "lib/ld-musl-x86_64.so.1").write_text("loader")
        for _ in range(2):
            prepare(root, host, LIB)
        assert (root / "etc/ld-musl-x86_64.path").read_text() == f"/lib\n/usr/local/lib\n/usr/lib\n{LIB}\n"
        assert not (root / "etc/ld.so.cache").exists()

    def test_musl_keeps_names_that_are_no_unicode(self, root: Path, host: Path) -> None:
        (root / "lib").mkdir()
        (root / "lib/ld-musl-x86_64.so.1").touch()
        (root / "etc/ld-musl-x86_64.path").write_bytes(b"/\xff/lib\n")
        prepare(root, host, LIB)
        assert (root / "etc/ld-musl-x86_64.path").read_bytes() == b"/\xff/lib\n" + f"{LIB}\n".encode()

    def test_musl_keeps_the_images_own(self, root: Path, host: Path) -> None:
        (root / "lib").mkdir()
        (root / "lib/ld-musl-x86_64.so.1").write_text("loader")
        (root / "etc/ld-musl-x86_64.path").write_text("/mine:/yours")
        prepare(root, host, "/yours", LIB)
        assert (root / "etc/ld-musl-x86_64.path").read_text() == f"/mine:/yours\n{LIB}\n"

    @pytest.mark.skipif(not shutil.which("ldconfig"), reason="no ldconfig on this machine")
    def test_the_systems_ldconfig_reads_it_and_keeps_it(self, root: Path, host: Path) -> None:
        shutil.copytree(host, root / "opt/driver")
        prepare(root, host, "/opt/driver")
        cache = root / "etc/ld.so.cache"
        for again in (False, True):
            if again:
                subprocess.run(["ldconfig", "-r", str(root)], check=True, capture_output=True)
            shown = subprocess.run(["ldconfig", "-p", "-C", str(cache)], capture_output=True, text=True, check=True)
            assert "libcuda.so.1 (libc6,x86-64) => /opt/driver/libcuda.so.1" in shown.stdout

    def test_a_source_that_is_gone(self, root: Path, host: Path) -> None:
        before = tree(root)
        with pytest.raises(StepFailed, match=r"read library .*libgone.so: No such file"):
            rootfs.prepare(str(root), RootfsWork(folders=(LIB,)), [mount(host, "libgone.so")])
        assert tree(root) == before


class TestNamesOfLinks:
    """A program may load libcuda.so as well as libcuda.so.1, also where the loader searches the folder by its cache
    alone."""

    FOLDER = "/opt/driver"
    WORK = RootfsWork(
        (
            SymLink("libcuda.so.1", f"{FOLDER}/libcuda.so"),  # by the soname's link, which nobody asked for
            SymLink("libGLX_nvidia.so.570.86.15", f"{FOLDER}/libGLX_indirect.so.0"),
            SymLink("libGLX_again.so", f"{FOLDER}/libGLX_twice.so"),
            SymLink(f"{FOLDER}/libGLX_indirect.so.0", f"{FOLDER}/libGLX_again.so"),
            SymLink("../libcuda.so.1", f"{FOLDER}/sub/libcuda_below.so"),  # no folder of the loader
            SymLink("libnone.so.1", f"{FOLDER}/libnone.so"),
            SymLink("libround.so", f"{FOLDER}/libround.so"),
        ),
        folders=(FOLDER,),
    )
    NAMES: ClassVar = {
        "libcuda.so.1": CUDA,
        "libcuda.so": CUDA,
        "libGLX_nvidia.so.0": "libGLX_nvidia.so.570.86.15",
        "libGLX_indirect.so.0": "libGLX_nvidia.so.570.86.15",
        "libGLX_again.so": "libGLX_nvidia.so.570.86.15",
        "libGLX_twice.so": "libGLX_nvidia.so.570.86.15",
    }

    @pytest.fixture
    def mounts(self, host: Path) -> list[Mount]:
        (host / "libGLX_nvidia.so.570.86.15").write_bytes(library("libGLX_nvidia.so.0"))
        return [mount(host, name, self.FOLDER) for name in (CUDA, "libGLX_nvidia.so.570.86.15")]

    def test_libraries_that_are_yet_to_be_mounted(self, root: Path, mounts: list[Mount]) -> None:
        rootfs.prepare(str(root), self.WORK, mounts)
        assert cached(root) == {(name, 0x303): f"{self.FOLDER}/{name}" for name in self.NAMES}
        before = tree(root)
        assert rootfs.prepare(str(root), self.WORK, mounts) == ()
        assert tree(root) == before

    def test_libraries_that_are_there(self, root: Path, host: Path, mounts: list[Mount]) -> None:
        shutil.copytree(host, root / self.FOLDER[1:])
        rootfs.prepare(str(root), self.WORK)
        others = {"libnvidia-glcore.so.570.86.15"}
        assert cached(root) == {(name, 0x303): f"{self.FOLDER}/{name}" for name in {*self.NAMES, *others}}

    def test_where_no_link_can_be_made_they_lead_to_the_file(self, root: Path, mounts: list[Mount]) -> None:
        with rootfs.Root(str(root)) as held:
            data = loader.cache_without_links(held, self.WORK, loader.libraries_of(mounts))
        entries = ldcache.parse(data).entries
        assert {entry.name: entry.path for entry in entries} == {
            name: f"{self.FOLDER}/{file}" for name, file in self.NAMES.items()
        }

    @pytest.mark.parametrize("text", [CUDA, "libcuda.so.1", f"{FOLDER}/libcuda.so.1"])
    def test_links_of_an_earlier_step(self, root: Path, host: Path, text: str) -> None:
        """As between create-symlinks and update-ldcache, which is told of no links."""
        folder = root / self.FOLDER[1:]
        shutil.copytree(host, folder)
        (folder / "libcuda.so").symlink_to(text)
        (folder / "libnvidia-glcore.so").symlink_to("/elsewhere/libnvidia-glcore.so.570.86.15")
        (folder / "libothername.so").symlink_to(CUDA)  # to ldconfig one more libcuda.so.1
        rootfs.prepare(str(root), RootfsWork(folders=(self.FOLDER,)))
        names = {"libcuda.so.1", "libcuda.so", "libnvidia-glcore.so.570.86.15"}
        assert cached(root) == {(name, 0x303): f"{self.FOLDER}/{name}" for name in names}

    @pytest.mark.skipif(not shutil.which("ldconfig"), reason="no ldconfig on this machine")
    def test_as_the_systems_ldconfig_says(self, root: Path, host: Path) -> None:
        shutil.copytree(host, root / self.FOLDER[1:])
        link = SymLink("libcuda.so.1", f"{self.FOLDER}/libcuda.so")
        rootfs.prepare(str(root), RootfsWork((link,), folders=(self.FOLDER,)))
        ours = cached(root)
        subprocess.run(["ldconfig", "-r", str(root)], check=True, capture_output=True)
        assert cached(root) == ours


class TestCompat:
    FOLDER = "usr/local/cuda/compat"

    def image(self, root: Path, note: object = None) -> None:
        real = root / "usr/local/cuda-12.9/compat"
        real.mkdir(parents=True)
        (root / "usr/local/cuda").symlink_to("cuda-12.9")
        (real / "libcuda.so.575.57.08").write_bytes(library("libcuda.so.1", note=note))  # type: ignore[arg-type]
        (real / "libcuda.so.1").symlink_to("libcuda.so.575.57.08")

    def test_comes_first_on_an_older_driver(self, root: Path, host: Path) -> None:
        self.image(root)
        work = RootfsWork(folders=(LIB,), host_driver="535.129.03")
        rootfs.prepare(str(root), work, [mount(host, "libcuda.so.570.86.15")])
        assert cached(root)[("libcuda.so.1", 0x303)] == f"/{self.FOLDER}/libcuda.so.575.57.08"
        assert (root / "etc/ld.so.conf.d/00-compat-gpulet.conf").read_text() == f"/{self.FOLDER}\n"

    def test_comes_first_under_the_linkers_name_too(self, root: Path, host: Path) -> None:
        self.image(root)
        (root / "usr/local/cuda-12.9/compat/libcuda.so").symlink_to("libcuda.so.1")
        link = SymLink("libcuda.so.1", f"{LIB}/libcuda.so")
        work = RootfsWork((link,), folders=(LIB,), host_driver="535.129.03")
        rootfs.prepare(str(root), work, [mount(host, CUDA)])
        assert cached(root)[("libcuda.so", 0x303)] == f"/{self.FOLDER}/libcuda.so"

    def test_isnt_used_on_a_newer_driver_and_an_earlier_decision_is_taken_back(self, root: Path, host: Path) -> None:
        self.image(root)
        libraries = [mount(host, "libcuda.so.570.86.15")]
        rootfs.prepare(str(root), RootfsWork(folders=(LIB,), host_driver="535.129.03"), libraries)
        rootfs.prepare(str(root), RootfsWork(folders=(LIB,), host_driver="580.65.06"), libraries)
        assert cached(root)[("libcuda.so.1", 0x303)] == f"{LIB}/libcuda.so.1"
        assert (root / "etc/ld.so.conf.d/00-compat-gpulet.conf").read_text() == ""

    def test_the_note_counts(self, root: Path, host: Path) -> None:
        self.image(root, {"Format": 1, "CUDA Version": "12.9", "Driver": [550]})
        work = RootfsWork(folders=(LIB,), host_driver="535.129.03")
        rootfs.prepare(str(root), work, [mount(host, "libcuda.so.570.86.15")])
        assert cached(root)[("libcuda.so.1", 0x303)] == f"{LIB}/libcuda.so.1"


class TestHostile:
    def test_links_that_leave_the_root_end_in_it(self, root: Path, host: Path, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        before = tree(outside)
        up = "../" * 30 + str(outside)[1:]
        shutil.rmtree(root / "etc")
        (root / "etc").symlink_to(up)
        (root / "opt").symlink_to(outside)
        rootfs.prepare(
            str(root),
            RootfsWork((SymLink("x", "/opt/link"),), folders=("/opt/lib",), profile_minors=(0,)),
            [mount(host, "libcuda.so.570.86.15", "/opt/lib")],
        )
        assert tree(outside) == before
        assert os.readlink(root / str(outside)[1:] / "link") == "x"
        assert (root / str(outside)[1:] / "ld.so.cache").is_file()

    @pytest.mark.parametrize("name", ["ld.so.cache", "ld.so.conf", "ld.so.conf.d/00-gpulet.conf"])
    def test_a_link_in_place_of_a_file_is_replaced_not_followed(
        self, root: Path, host: Path, tmp_path: Path, name: str
    ) -> None:
        victim = tmp_path / "victim"
        victim.write_text("untouched")
        (root / "etc/ld.so.conf.d").mkdir()
        (root / "etc" / name).symlink_to(victim)
        prepare(root, host, "/opt/lib")
        assert victim.read_text() == "untouched"
        assert not (root / "etc" / name).is_symlink()

    @pytest.mark.parametrize("name", ["etc/ld.so.conf", "etc/ld.so.cache"])
    def test_a_pipe_in_place_of_a_file_doesnt_hang(self, root: Path, host: Path, name: str) -> None:
        os.mkfifo(root / name)
        with pytest.raises(StepFailed, match="a folder, device or pipe is there"):
            prepare(root, host, LIB)

    def test_a_configuration_that_includes_itself_ends(self, root: Path, host: Path) -> None:
        (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf\ninclude /etc/*\n")
        prepare(root, host, LIB)
        assert b"libcuda.so.1" in (root / "etc/ld.so.cache").read_bytes()

    def test_a_configuration_without_end_is_not_read_whole(self, root: Path, host: Path) -> None:
        folder = root / "etc/ld.so.conf.d"
        folder.mkdir()
        lines = "".join(f"/{number:07}\n" for number in range(1 << 18))
        for number in range(8):
            (folder / f"{number}.conf").write_text(lines)
        (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n" * 20_000)
        with rootfs.Root(str(root)) as held:
            assert len(loader._searched(held, held.read(loader.CONF) or b"")) < 1 << 17
        prepare(root, host, "/opt/lib")
        assert ("libcuda.so.1", 0x0303) in cached(root)

    @pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
    def test_a_pods_volume_among_the_libraries_is_not_opened(self, root: Path, tmp_path: Path, kind: str) -> None:
        """As an engine's own mount of it stands in config.json: opening a pipe would wait for ever."""
        odd = tmp_path / "libodd.so"
        if kind == "pipe":
            os.mkfifo(odd)
        elif kind == "device":
            odd.symlink_to("/dev/zero")
        else:
            odd.mkdir()
        assert loader.libraries_of([Mount(str(odd), f"{LIB}/libodd.so", kind="library")]) == []

    def test_links_in_circles(self, root: Path) -> None:
        (root / "a").symlink_to("b")
        (root / "b").symlink_to("a")
        with pytest.raises(StepFailed) as caught:
            rootfs.prepare(str(root), RootfsWork((SymLink("x", "/a/link"),)))
        assert caught.value.errno == errno.ELOOP


class TestOthers:
    def test_profile(self, root: Path) -> None:
        rootfs.prepare(str(root), RootfsWork(profile_minors=(0, 5, 64)))
        file = root / "etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
        assert '"EGLVisibleDGPUDevices", 0x21' in file.read_text()
        assert oct(file.stat().st_mode)[-3:] == "444"
        assert oct((root / "etc/nvidia").stat().st_mode)[-3:] == "755"

    def test_frozen_params(self, tmp_path: Path) -> None:
        (tmp_path / "driver/nvidia").mkdir(parents=True)
        assert frozen.params(str(tmp_path)) is None
        file = tmp_path / "driver/nvidia/params"
        file.write_text("DeviceFileMode: 438\nModifyDeviceFiles: 1\nX: 1\n")
        assert frozen.params(str(tmp_path)) == b"DeviceFileMode: 438\nModifyDeviceFiles: 0\nX: 1\n"
        file.write_text("ModifyDeviceFiles: 0\n")
        assert frozen.params(str(tmp_path)) is None

    def test_no_such_root(self) -> None:
        with pytest.raises(StepFailed, match="open root file system /nowhere"):
            rootfs.prepare("/nowhere", RootfsWork())
