"""What can't be written into the root: links in /dev, a root that is read-only on disk, the driver's parameters."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gpulet import settings as settings_file
from gpulet.injection import frozen
from gpulet.injection.model import Hook, RootfsWork, SymLink
from gpulet.launch import beside
from gpulet.launch.beside import Laid
from gpulet.launch.plan import Bundle as Planned
from gpulet.sim import node as sim
from gpulet.sim.node import SimNode
from support import containers
from support.machine import Machine
from support.real_container import Bundle, config

V = "NVIDIA_VISIBLE_DEVICES"
BY_PATH = "/dev/dri/by-path"
LINKS = (SymLink("../card1", f"{BY_PATH}/pci-1"), SymLink("../card0", f"{BY_PATH}/pci-0"))
DEV = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}


# -- what is laid


def test_a_folder_of_links_and_a_file_are_laid_once(tmp_path: Path) -> None:
    things = [Laid(f"{tmp_path}/s/links/a", links=(("x", "../y"),)), Laid(f"{tmp_path}/s/caches/b", b"data")]
    beside.lay(things)
    inode = os.stat(things[1].path).st_ino
    beside.lay(things)
    assert os.readlink(f"{things[0].path}/x") == "../y"
    assert os.stat(things[1].path).st_ino == inode
    assert stat.S_IMODE(os.stat(things[1].path).st_mode) == 0o444
    assert sorted(path.name for path in (tmp_path / "s").rglob("*")) == ["a", "b", "caches", "links", "x"]


def test_something_else_in_its_place_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "links/a").mkdir(parents=True)
    (tmp_path / "links/a/evil").symlink_to("/")
    with pytest.raises(OSError, match="something else"):
        beside.lay([Laid(f"{tmp_path}/links/a", links=(("x", "../y"),))])
    assert [path.name for path in (tmp_path / "links").iterdir()] == ["a"]


def test_links_in_a_new_dev_become_one_mount() -> None:
    work, laid, mounts = beside.device_links({"mounts": [DEV]}, RootfsWork((*LINKS, SymLink("a", "/usr/b"))), "/run/g")
    assert work.links == (SymLink("a", "/usr/b"),)
    assert laid == (Laid(laid[0].path, links=(("pci-0", "../card0"), ("pci-1", "../card1"))),)
    assert [(mount.source, mount.path) for mount in mounts] == [(laid[0].path, BY_PATH)]
    assert "ro" in mounts[0].options


def test_our_own_mount_of_an_earlier_run_is_in_nobodys_way() -> None:
    _, _, mounts = first = beside.device_links({"mounts": [DEV]}, RootfsWork(LINKS), "/run/g")
    again = {"mounts": [DEV, {"destination": BY_PATH, "source": mounts[0].source}]}
    assert beside.device_links(again, RootfsWork(LINKS), "/run/g") == first


@pytest.mark.parametrize(
    "spec",
    [
        {"mounts": []},
        {"mounts": [{**DEV, "type": "bind", "source": "/dev"}]},
        {"mounts": [DEV], "linux": {"mountLabel": "system_u:object_r:container_file_t:s0"}},
        {"mounts": [DEV, {"destination": BY_PATH, "type": "bind"}]},
        {"mounts": [DEV], "linux": {"devices": [{"path": f"{BY_PATH}/pci-7"}]}},
    ],
    ids=["none", "the-hosts", "labelled", "mounted", "nodes"],
)
def test_where_that_cannot_be_the_links_stay_in_the_work(spec: dict[str, Any]) -> None:
    work = RootfsWork(LINKS)
    assert beside.device_links(spec, work, "/run/g") == (work, (), ())


# -- in real containers


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> SimNode:
    return sim.create(tmp_path_factory.mktemp("node") / "n", "h100x8")


class Prepared:
    """A bundle that goes through gpulet-runtime."""

    def __init__(self, folder: Path, node: SimNode, libc: str = "glibc") -> None:
        self.bundle = Bundle(folder, libc)
        self.folder = folder
        (folder / "config.toml").write_text(
            f"[nvidia-container-cli]\nroot = '{node.root}'\n"
            f"[nvidia-container-runtime]\nruntimes = ['/bin/true']\n[gpulet]\nstate-dir = '{folder}/run'\n"
        )

    def create(self, made: dict[str, Any], *env: str, before: str = "") -> dict[str, Any]:
        """The config.json after `create`. before: shell commands that go first, in the same mount namespace."""
        made["process"]["env"] += env
        path = self.bundle.bundle / "config.json"
        path.write_text(json.dumps(made))
        program = self.bundle.programs["gpulet-runtime"]
        script = f"mount --make-rprivate / && {before or 'true'} && exec {program} create --bundle {path.parent} x"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": os.environ["PATH"], "GPULET_CONFIG": f"{self.folder}/config.toml"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        after: dict[str, Any] = json.loads(path.read_text())
        return after

    def run(self, after: dict[str, Any]) -> str:
        """What the container's process prints."""
        ran = self.bundle.run(after)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


@pytest.mark.root
@pytest.mark.e2e
def test_links_beside_device_nodes_need_no_hook(tmp_path: Path, node: SimNode) -> None:
    one = Prepared(tmp_path, node)
    after = one.create(config(["/bin/ls", "-l", BY_PATH]), f"{V}=2", "NVIDIA_DRIVER_CAPABILITIES=all")
    assert "hooks" not in after
    listed = one.run(after)
    facts = node.gpus[2]
    assert f"pci-{facts.bus_id[4:].lower()}-card -> ../card" in listed
    assert len([line for line in listed.splitlines() if "->" in line]) == 2


@pytest.mark.root
@pytest.mark.e2e
def test_without_a_state_folder_a_hook_makes_them(tmp_path: Path, node: SimNode) -> None:
    one = Prepared(tmp_path, node)
    (tmp_path / "run").write_text("a file where the folder should be")
    after = one.create(config(["/bin/ls", "-l", BY_PATH]), f"{V}=2", "NVIDIA_DRIVER_CAPABILITIES=all")
    (hook,) = after["hooks"]["createContainer"]
    assert hook["args"][1] == "prepare"
    assert "card -> ../card" in one.run(after)


@pytest.mark.root
@pytest.mark.e2e
def test_a_root_that_is_read_only_on_disk(tmp_path: Path, node: SimNode) -> None:
    """Its image has the places for the driver's files; the loader finds them by a cache that is mounted."""
    one = Prepared(tmp_path, node)
    planned = one.create(config(["/usr/bin/gpulet-probe"]), f"{V}=1")
    root = one.bundle.root
    (root / "etc/ld.so.cache").unlink()
    subprocess.run(["ldconfig", "-r", str(root)], check=False)
    for mount in planned["mounts"]:
        place = root / mount["destination"].lstrip("/")
        if mount.get("type") in ("proc", "tmpfs", "sysfs"):
            place.mkdir(parents=True, exist_ok=True)
        elif not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    for link in root.rglob("*"):
        if link.is_symlink() and ".so" in link.name and "nvidia" in os.readlink(link) + link.name:
            link.unlink()
    kept = (root / "etc/ld.so.cache").read_bytes()
    read_only = f"mount --bind {root} {root} && mount -o remount,bind,ro {root}"
    after = one.create(config(["/usr/bin/gpulet-probe"]), f"{V}=1", before=read_only)
    assert "hooks" not in after
    (cache,) = [mount for mount in after["mounts"] if mount["destination"] == "/etc/ld.so.cache"]
    assert cache["source"].startswith(f"{tmp_path}/run/caches/")
    told = json.loads(one.run(after).splitlines()[-1])
    assert [gpu["uuid"] for gpu in told["nvml"]] == [node.gpus[1].uuid]
    assert (root / "etc/ld.so.cache").read_bytes() == kept


@pytest.mark.root
@pytest.mark.e2e
def test_without_a_cache_to_mount_over_a_read_only_root_is_left_to_the_hook(tmp_path: Path, node: SimNode) -> None:
    one = Prepared(tmp_path, node)
    root = one.bundle.root
    (root / "etc/ld.so.cache").unlink(missing_ok=True)
    after = one.create(
        config(["/bin/true"]), f"{V}=1", before=f"mount --bind {root} {root} && mount -o remount,bind,ro {root}"
    )
    (hook,) = after["hooks"]["createContainer"]
    assert hook["args"][1] == "prepare"


# -- the driver's parameters


@pytest.mark.root
@pytest.mark.e2e
@pytest.mark.parametrize("users", [False, True], ids=["root", "user-namespace"])
def test_the_hosts_mount_covers_a_file_of_the_containers_proc(tmp_path: Path, users: bool) -> None:
    """The driver's own file is missing on a node without a driver: another file of /proc stands for it."""
    program = beside.mount_program()
    if not program:
        pytest.skip("no mount(8) of root's")
    laid = Laid(beside.named(f"{tmp_path}/run", "params", b"FROZEN\n"), b"FROZEN\n")
    beside.lay([laid])
    for folder in (tmp_path, *tmp_path.parents):
        if users and Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    script = "cat /proc/version; (echo x > /proc/version) 2>&1; grep ' /proc/version ' /proc/self/mountinfo"
    bundle = Bundle(tmp_path)
    made = config(["/bin/sh", "-c", script])
    if users:
        mapping = [{"containerID": 0, "hostID": 100000, "size": 65536}]
        made["linux"]["namespaces"].append({"type": "user"})
        made["linux"] |= {"uidMappings": mapping, "gidMappings": mapping}
        made["linux"].pop("resources")
        subprocess.run(["chown", "-R", "100000:100000", str(bundle.root)], check=True)
    hooks = beside.freeze(str(bundle.root), laid.path, program, "/proc/version")
    made["hooks"] = {"createContainer": [_entry(hook) for hook in hooks]}
    ran = bundle.run(made)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "FROZEN"
    assert "ead-only file system" in lines[1] or "ermission denied" in lines[1]
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(lines[2].split()[5].split(","))
    assert Path(laid.path).read_bytes() == b"FROZEN\n"
    assert "FROZEN" not in Path("/proc/version").read_text()


@pytest.mark.parametrize("program", ["/usr/bin/mount", ""])
def test_where_the_driver_makes_nodes_its_parameters_are_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    params = b"ModifyDeviceFiles: 0\n"
    machine = Machine(tmp_path)
    machine.configure(rest=f"[gpulet]\nstate-dir = '{tmp_path}/run'\n")
    monkeypatch.setattr(frozen, "params", lambda: params)
    monkeypatch.setattr(beside, "mount_program", lambda: program)
    monkeypatch.setattr("sys.argv", [f"{tmp_path}/bin/gpulet-runtime"])
    settings = settings_file.load(str(machine.config_file), {})
    plan = Planned(str(machine.make(containers.config(f"{V}=0"))), settings).plan(settings)
    hooks = plan.config["hooks"]["createContainer"]
    target = f"{machine.bundle}/rootfs/proc/driver/nvidia/params"
    if program:
        assert [hook["args"][-1] for hook in hooks] == [target, target]
        assert [thing.data for thing in plan.laid] == [params]
        assert hooks[0]["args"][-2] == plan.laid[0].path
    else:
        assert [hook["args"] for hook in hooks] == [["gpulet-cdi-hook", "disable-device-node-modification"]]
        assert plan.laid == ()
    assert all(hook["env"] for hook in hooks)


def test_in_a_user_namespace_nobody_makes_nodes_and_nothing_is_covered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under crun no hook can run there, in whose folder root alone may be."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(frozen, "params", lambda: b"ModifyDeviceFiles: 0\n")
    asks = containers.config(f"{V}=0")
    asks["linux"]["namespaces"] = [{"type": "user"}]
    settings = settings_file.load(str(machine.config_file), {})
    plan = Planned(str(machine.make(asks)), settings).plan(settings)
    assert plan.injection.rootfs.freeze_device_nodes
    assert "hooks" not in plan.config and not plan.work.freeze_device_nodes


@pytest.mark.root
def test_only_roots_own_mount_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mount"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setattr(beside, "MOUNT_PROGRAMS", (f"{tmp_path}/none", str(path)))
    assert beside.mount_program() == str(path)
    path.chmod(0o775)
    assert beside.mount_program() == ""
    path.chmod(0o755)
    os.chown(path, 1000, 0)
    assert beside.mount_program() == ""
    busybox = tmp_path / "busybox"
    path.rename(busybox)
    os.chown(busybox, 0, 0)
    path.symlink_to(busybox)
    assert beside.mount_program() == ""


def _entry(hook: Hook) -> dict[str, Any]:
    assert hook.env
    return {"path": hook.path, "args": list(hook.args), "env": list(hook.env)}
