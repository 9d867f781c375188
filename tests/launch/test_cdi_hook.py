"""gpulet-cdi-hook: its flags, where the container's root comes from, and what each hook leaves behind."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpulet import linux, mount_api
from gpulet.injection import frozen
from gpulet.injection.beneath import Root
from gpulet.launch import cdi_hook
from gpulet.node import ldcache
from support.made_elf import library
from support.namespaced import namespaced, tree
from support.real_container import Bundle, config, started_by_others


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "rootfs/etc").mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps({"ociVersion": "1.0.2", "root": {"path": "rootfs"}}))
    return tmp_path


@pytest.fixture
def call(bundle: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Calls the hook with the bundle's state on standard input."""

    def run(*arguments: str, **state: object) -> int:
        text = json.dumps({"ociVersion": "1.0.2", "bundle": str(bundle), "pid": 1, **state})
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return cdi_hook.main(list(arguments))

    return run


class TestCommandLine:
    @pytest.mark.parametrize(
        "arguments",
        [[], ["--debug"], ["future-hook"], ["future-hook", "--odd", "x"], ["--quiet", "future-hook", "-z"]],
        ids=" ".join,
    )
    def test_what_it_doesnt_know_is_a_warning(self, call, capsys, arguments: list[str]) -> None:  # type: ignore[no-untyped-def]
        assert call(*arguments) == 0
        assert "warning" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["prepare", "--odd"], "--odd"),
            (["create-symlinks", "--link", "one"], "TARGET::LINK"),
            (["create-symlinks", "--link", "a::b::c"], "TARGET::LINK"),
            (["create-symlinks", "--link"], "no value"),
            (["chmod", "--mode", "rwx", "--path", "/etc"], "octal"),
            (["update-ldcache", "word"], "word"),
        ],
    )
    def test_a_known_hook_with_a_bad_flag_fails(self, call, capsys, arguments: list[str], message: str) -> None:  # type: ignore[no-untyped-def]
        assert call(*arguments) == 1
        assert message in capsys.readouterr().err

    def test_noop_and_help_need_no_container(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cdi_hook.main(["noop", "--debug"]) == 0
        assert cdi_hook.main(["prepare", "--help"]) == 0
        assert "usage:" in capsys.readouterr().out


class TestContainerRoot:
    def test_from_the_bundle(self, call, bundle: Path) -> None:  # type: ignore[no-untyped-def]
        assert call("create-symlinks", "--link", "a::/x") == 0
        assert os.readlink(bundle / "rootfs/x") == "a"

    def test_from_the_states_own_field(self, call, bundle: Path) -> None:  # type: ignore[no-untyped-def]
        (bundle / "other").mkdir()
        assert call("create-symlinks", "--link=a::/x", root=str(bundle / "other")) == 0
        assert os.readlink(bundle / "other/x") == "a"

    def test_from_a_file(self, bundle: Path) -> None:
        (bundle / "state.json").write_text(json.dumps({"bundle": str(bundle), "pid": 0}))
        assert (
            cdi_hook.main(["create-symlinks", "--container-spec", str(bundle / "state.json"), "--link", "a::/x"]) == 0
        )
        assert os.readlink(bundle / "rootfs/x") == "a"

    @pytest.mark.parametrize("named", ["", "rootfs"])
    def test_no_config_json_of_the_image_is_believed(  # type: ignore[no-untyped-def]
        self, call, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys, named: str
    ) -> None:
        for folder in (bundle / "rootfs", bundle / "rootfs/rootfs"):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps({"root": {"path": str(bundle)}}))
        monkeypatch.chdir(bundle / "rootfs")
        assert call("create-symlinks", "--link", "a::/x", bundle=named) == 1
        assert "wanted an absolute path" in capsys.readouterr().err
        assert not os.path.lexists(bundle / "x")

    @pytest.mark.parametrize(("named", "root"), [("", "out"), ("b", "../out"), ("b", "out")])
    def test_no_root_is_looked_for_from_where_the_hook_stands(  # type: ignore[no-untyped-def]
        self, call, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys, named: str, root: str
    ) -> None:
        """It stands in the image, whose links lead anywhere."""
        for folder in (bundle / "victim", bundle / "rootfs/b"):
            folder.mkdir()
        (bundle / "rootfs/out").symlink_to(bundle / "victim")
        (bundle / "rootfs/b/out").symlink_to(bundle / "victim")
        monkeypatch.chdir(bundle / "rootfs")
        assert call("create-symlinks", "--link", "a::/x", bundle=named, root=root) == 1
        assert "wanted an absolute path" in capsys.readouterr().err
        assert not any((bundle / "victim").iterdir())

    @pytest.mark.root
    def test_never_this_machines_own_by_a_mount(self, bundle: Path) -> None:
        state = json.dumps({"bundle": str(bundle), "pid": 1})
        script = f"mount --bind / {bundle}/rootfs && exec {sys.executable} -m gpulet.launch.cdi_hook create-symlinks"
        command = ["unshare", "-m", "sh", "-c", f"{script} --link a::/gpulet-must-not-exist"]
        done = subprocess.run(command, input=state, capture_output=True, text=True)
        assert done.returncode == 1
        assert "wanted a folder other than /" in done.stderr
        assert not os.path.lexists("/gpulet-must-not-exist")

    @pytest.mark.parametrize("root", ["/", "//", "/proc/.."])
    def test_never_this_machines_own(self, call, capsys, root: str) -> None:  # type: ignore[no-untyped-def]
        assert call("create-symlinks", "--link", "a::/gpulet-must-not-exist", root=root) == 1
        assert "wanted a folder other than /" in capsys.readouterr().err
        assert not os.path.lexists("/gpulet-must-not-exist")


def standing(pid: int, user: bool, bundle: Path, folder: Path, bound: tuple[str, Path] | None) -> tuple[int, str]:
    """The hook's exit status and what it says, in the namespaces of `pid`, started in `folder`. bound: what is mounted
    there before, and where."""
    from gpulet.injection import cgroup, rootfs  # noqa: F401  # inside, their files may be out of reach
    from gpulet.node import elf  # noqa: F401
    from gpulet.request import bundle as _bundle  # noqa: F401

    kinds = [("mnt", linux.CLONE_NEWNS), *([("user", linux.CLONE_NEWUSER)] if user else [])]
    namespaces = [(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), kind) for name, kind in kinds]
    said, tell = os.pipe()
    child = os.fork()
    if not child:
        status = 99
        try:
            for fd, kind in namespaces:
                linux.setns(fd, kind)
            if bound is not None:
                mount_api.mount(bound[0], str(bound[1]), "", mount_api.MS_BIND | mount_api.MS_REC)
            own = 0 if user else 100000
            os.setresgid(own, own, own)
            os.setresuid(own, own, own)
            linux.prctl(4, 1)  # PR_SET_DUMPABLE, as after exec: its files in /proc are its own
            os.chdir(folder)
            sys.stdin = io.TextIOWrapper(io.BytesIO(json.dumps({"bundle": str(bundle), "pid": 1}).encode()))
            sys.stderr = os.fdopen(tell, "w")
            status = cdi_hook.main(["prepare", "--link", "a::/x", "--folder", "/opt/lib"])
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(tell)
    with open(said) as pipe:
        text = pipe.read()
    for fd, _ in namespaces:
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


@pytest.mark.root
class TestABundleThatMayNotBeRead:
    """As in a user namespace, where podman's bundles are root's own."""

    @pytest.fixture
    def image(self, tmp_path: Path) -> Path:
        image = tmp_path / "image"
        for name in ("etc", "proc"):
            (image / name).mkdir(parents=True)
        for folder in (image, image / "etc", image / "proc"):
            os.chown(folder, 100000, 100000)
        for parent in list(image.parents)[:-2]:
            parent.chmod(0o755)
        (tmp_path / "bundle").mkdir(mode=0o700)
        (tmp_path / "bundle/config.json").write_text(json.dumps({"root": {"path": str(image)}}))
        return image

    def test_the_root_is_where_runc_starts_its_hooks(self, image: Path) -> None:
        with namespaced(image, user=True) as pid:
            done = standing(pid, True, image.parent / "bundle", image, ("/proc", image / "proc"))
        assert done == (0, "")
        assert os.readlink(image / "x") == "a"
        assert (image / "etc/ld.so.cache").stat().st_uid == 100000

    @pytest.mark.parametrize(
        ("user", "place", "bound"),
        [
            (True, "", None),
            (True, "etc", ("/proc", "proc")),
            (True, "/", ("/proc", "proc")),
            (False, "", ("/proc", "proc")),
        ],
        ids=["no proc in it", "no mount", "the host's root", "the machine's own user namespace"],
    )
    def test_no_other_folder_is_taken_for_it(
        self, image: Path, user: bool, place: str, bound: tuple[str, str] | None
    ) -> None:
        with namespaced(image, user=user) as pid:
            at = None if bound is None else (bound[0], image / bound[1])
            status, said = standing(pid, user, image.parent / "bundle", image / place, at)
        assert (status, "config.json: Permission denied" in said) == (1, True), said
        assert not os.path.lexists(image / "x") and not os.path.lexists("/x")

    def test_the_hosts_root_mounted_elsewhere_is_not_taken_for_it(self, image: Path) -> None:
        with namespaced(image, user=True) as pid:
            status, said = standing(pid, True, image.parent / "bundle", image, ("/", image))
        assert (status, "wanted a folder other than /" in said) == (1, True), said

    @pytest.mark.e2e
    def test_runc_starts_the_container(self, tmp_path: Path) -> None:
        real = Bundle(tmp_path)
        root = real.root.rename(tmp_path / "root")
        subprocess.run(["chown", "-R", "100000:100000", str(root)], check=True)
        for folder in list(root.parents)[:-2]:
            folder.chmod(0o755)
        real.bundle.chmod(0o700)
        program = started_by_others(real.programs["gpulet-cdi-hook"])
        arguments = [program, "prepare", "--link", "a::/x", "--folder", "/opt/lib"]
        made = config(["/bin/sh", "-c", "exit 7"], root={"path": str(root)})
        made["hooks"] = {"createContainer": [{"path": program, "args": arguments, "env": ["GPULET_HOOK=1"]}]}
        made["linux"]["namespaces"].append({"type": "user"})
        ids = [{"containerID": 0, "hostID": 100000, "size": 65536}]
        made["linux"] |= {"uidMappings": ids, "gidMappings": ids}
        made["mounts"] = [mount for mount in made["mounts"] if mount["destination"] != "/sys"]
        done = real.run(made)
        assert done.returncode == 7, done.stderr
        assert os.readlink(root / "x") == "a"
        assert (root / "etc/ld.so.conf.d/00-gpulet.conf").stat().st_uid == 100000


class TestHooks:
    def test_prepare_does_it_all_and_twice_is_as_once(self, call, bundle: Path) -> None:  # type: ignore[no-untyped-def]
        folder = bundle / "rootfs/opt/driver"
        folder.mkdir(parents=True)
        (folder / "libcuda.so.570.86.15").write_bytes(library("libcuda.so.1"))
        arguments = ["prepare", "--link", "libcuda.so.1::/opt/driver/libcuda.so", "--folder", "/opt/driver"]
        assert call(*arguments) == 0
        assert os.readlink(folder / "libcuda.so.1") == "libcuda.so.570.86.15"
        assert os.readlink(folder / "libcuda.so") == "libcuda.so.1"
        assert (bundle / "rootfs/etc/ld.so.conf.d/00-gpulet.conf").read_text() == "/opt/driver\n"
        before = tree(bundle)
        assert call(*arguments) == 0
        assert tree(bundle) == before

    def test_peers_names_one_step_each(self, call, bundle: Path) -> None:  # type: ignore[no-untyped-def]
        root = bundle / "rootfs"
        compat = root / "usr/local/cuda/compat"
        compat.mkdir(parents=True)
        (compat / "libcuda.so.575.57.08").write_bytes(library("libcuda.so.1"))
        assert call("enable-cuda-compat", "--host-driver-version=535.129.03") == 0
        assert (root / "etc/ld.so.conf.d/00-compat-gpulet.conf").read_text() == "/usr/local/cuda/compat\n"
        (root / "opt/lib").mkdir(parents=True)
        (root / "opt/lib/libcuda.so.535.129.03").write_bytes(library("libcuda.so.1"))
        assert call("create-symlinks", "--link", "libcuda.so.1::/opt/lib/libcuda.so") == 0
        assert call("update-ldcache", "--folder", "/opt/lib", "--ldconfig-path", "/sbin/ldconfig") == 0
        assert ldcache.parse((root / "etc/ld.so.cache").read_bytes()).find("libcuda.so") == "/opt/lib/libcuda.so"
        (root / "bin").mkdir()
        (root / "bin/tool").write_text("")
        assert call("chmod", "--mode", "755", "--path", "/bin/tool", "--path", "/missing") == 0
        assert stat.S_IMODE((root / "bin/tool").stat().st_mode) == 0o755

    def test_compat_of_an_earlier_hook_stays_when_folders_follow(self, call, bundle: Path) -> None:  # type: ignore[no-untyped-def]
        compat = bundle / "rootfs/usr/local/cuda/compat"
        compat.mkdir(parents=True)
        (compat / "libcuda.so.575.57.08").write_bytes(library("libcuda.so.1"))
        (bundle / "rootfs/opt/lib").mkdir(parents=True)
        (bundle / "rootfs/opt/lib/libcuda.so.535.129.03").write_bytes(library("libcuda.so.1"))
        call("enable-cuda-compat", "--host-driver-version=535.129.03")
        call("update-ldcache", "--folder", "/opt/lib")
        configuration = bundle / "rootfs/etc/ld.so.conf.d"
        lines = [(file.name, file.read_text()) for file in sorted(configuration.iterdir())]
        assert lines == [("00-compat-gpulet.conf", "/usr/local/cuda/compat\n"), ("00-gpulet.conf", "/opt/lib\n")]
        cache = ldcache.parse((bundle / "rootfs/etc/ld.so.cache").read_bytes())
        assert cache.find("libcuda.so.1") == "/usr/local/cuda/compat/libcuda.so.575.57.08"

    @pytest.mark.root
    def test_application_profile_shows_the_nodes_that_are_there(self, call, bundle: Path) -> None:  # type: ignore[no-untyped-def]
        dev = bundle / "rootfs/dev"
        dev.mkdir()
        for minor in (1, 4):
            os.mknod(dev / f"nvidia{minor}", stat.S_IFCHR | 0o666, os.makedev(195, minor))
        (dev / "nvidia7").write_text("no device")
        assert call("update-application-profile") == 0
        file = bundle / "rootfs/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
        assert '"EGLVisibleDGPUDevices", 0x12' in file.read_text()

    def test_links_of_the_image_are_not_followed_out(self, call, bundle: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
        outside = tmp_path / "outside"
        outside.mkdir()
        (bundle / "rootfs/lib").symlink_to(outside)
        assert call("create-symlinks", "--link", "a::/lib/x") == 0
        assert not list(outside.iterdir())


@pytest.mark.root
def test_a_root_that_cant_be_written_is_a_warning(bundle: Path) -> None:
    """As where a runtime mounts the root read-only beforehand."""
    script = (
        f"mount --bind {bundle}/rootfs {bundle}/rootfs && mount -o remount,ro,bind {bundle}/rootfs && "
        f'echo \'{{"bundle": "{bundle}", "pid": 0}}\' | '
        f"{sys.executable} -m gpulet.launch.cdi_hook prepare --link a::/x --folder /opt/lib"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Read-only file system; no links and no loader's cache lead to the driver's libraries" in done.stderr
    assert "gpulet-runtime" in done.stderr
    assert not (bundle / "rootfs/x").exists()


@pytest.mark.root
@pytest.mark.parametrize(
    ("mount", "place"),
    [
        ("--bind {host}/libcuda.so.1", "opt/lib/libcuda.so.1"),
        ("--bind /dev/null", "opt/lib/libcuda.so.1"),
        ("--bind {host}", "opt/lib/libcuda.so.1"),
        ("--bind {host}/cache", "etc/ld.so.cache"),
        ("--bind {host}/cache", "etc/ld.so.conf.d/00-gpulet.conf"),
    ],
    ids=["library", "device", "folder", "cache", "configuration"],
)
def test_what_somebody_mounted_over_a_place_stays_and_all_else_is_done(bundle: Path, mount: str, place: str) -> None:
    """As where a user binds a driver's library by its soname besides asking for a GPU."""
    host, root = bundle / "host", bundle / "rootfs"
    for folder in (host, root / "opt/lib", root / "etc/ld.so.conf.d"):
        folder.mkdir(parents=True)
    (host / "libcuda.so.1").write_bytes(library("libcuda.so.1"))
    (host / "cache").write_text("theirs")
    driver = root / "opt/lib/libcuda.so.570.86.15"
    driver.write_bytes(library("libcuda.so.1"))
    (root / place).mkdir() if mount.endswith("{host}") else (root / place).touch()
    script = (
        f"mount --bind {driver} {driver} && mount {mount.format(host=host)} {root / place} && "
        f'echo \'{{"bundle": "{bundle}", "pid": 0}}\' | {sys.executable} -m gpulet.launch.cdi_hook prepare '
        "--link libcuda.so.570.86.15::/opt/lib/libcuda.so.1 --link libcuda.so.1::/opt/lib/libcuda.so --folder /opt/lib"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"gpulet-cdi-hook: warning: /{place}: something is mounted there, and left as it is\n"
    assert os.readlink(root / "opt/lib/libcuda.so") == "libcuda.so.1"
    if place != "etc/ld.so.cache":
        cache = ldcache.parse((root / "etc/ld.so.cache").read_bytes())
        assert {entry.name for entry in cache.entries} == {"libcuda.so.1", "libcuda.so"}
    assert (host / "cache").read_text() == "theirs"


@pytest.mark.root
def test_freezing_covers_the_parameters_in_the_container_alone(tmp_path: Path) -> None:
    root, proc = tmp_path / "root", tmp_path / "proc"
    (root / "proc").mkdir(parents=True)
    (proc / "driver/nvidia").mkdir(parents=True)
    (proc / "driver/nvidia/params").write_text("ModifyDeviceFiles: 1\n")
    (proc / "driver/nvidia/version").write_text("version\n")
    with namespaced(root, proc=proc) as pid:
        pidfd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        child = os.fork()
        if not child:
            from gpulet import linux

            linux.setns(pidfd, linux.CLONE_NEWNS)
            with Root(str(root)) as held:
                frozen.cover(held, b"ModifyDeviceFiles: 0\n")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        os.close(pidfd)
        inside = Path(f"/proc/{pid}/root{root}/proc/driver/nvidia")
        assert (inside / "params").read_text() == "ModifyDeviceFiles: 0\n"
        assert (inside / "version").read_text() == "version\n"
        line = next(x for x in Path(f"/proc/{pid}/mountinfo").read_text().splitlines() if "nvidia/params" in x)
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(line.split()[5].split(","))
        assert "shared:" not in line
    assert (proc / "driver/nvidia/params").read_text() == "ModifyDeviceFiles: 1\n"
