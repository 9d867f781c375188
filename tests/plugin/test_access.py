"""Containers that lose the GPU that they were given: real ones of runc, whose device rules are written anew."""

from __future__ import annotations

import json
import os
import secrets
import stat
import subprocess
from pathlib import Path

import pytest

from gpulet.injection import cgroup_bpf
from gpulet.injection.cgroup import Cgroup
from gpulet.plugin import access, news
from gpulet.sim.cgroups import remove_tree
from gpulet.sim.kubelet import Kubelet
from gpulet.sim.pods import ContainerSpec, Pod
from support import plugin_process as plugin
from support.cgroup_folders import attach, hierarchy
from support.hand_made import facts, gpu_uuid
from support.real_container import SEEN, Bundle, config

GPU = "nvidia.com/gpu"
DENY = cgroup_bpf.instruction(cgroup_bpf.MOV_K, 0, value=0) + cgroup_bpf.instruction(cgroup_bpf.EXIT)
UID = "1d5e7c2a-0b1f-4c55-9f0e-2b7a6d1c9e01"


class Container:
    """One that runs until the test's end, in the cgroup of a Pod. nodes: its character devices of major 195."""

    def __init__(self, bundle: Bundle, version: str, pods: str, nodes: list[int]) -> None:
        rules = [{"allow": False, "access": "rwm"}]
        rules += [{"allow": True, "type": "c", "major": 195, "minor": node, "access": "rw"} for node in nodes]
        made = config(["/bin/sleep", "60"], linux={"resources": {"devices": rules}})
        made["linux"]["devices"] = [
            {"path": f"/dev/nvidia{node}", "type": "c", "major": 195, "minor": node, "fileMode": 0o666}
            for node in nodes
        ]
        made["linux"]["cgroupsPath"] = f"/{pods}/{bundle.id}"
        (bundle.bundle / "config.json").write_text(json.dumps(made))
        self.command = ["runc", "--root", str(bundle.folder / "state")]
        self.id = bundle.id
        command = [*SEEN[version], *self.command, "run", "-d", "--bundle", str(bundle.bundle), bundle.id]
        subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def end(self) -> None:
        subprocess.run([*self.command, "delete", "--force", self.id], capture_output=True)


@pytest.fixture
def top(request, monkeypatch):
    """Where this version's Pods are; the machine has both versions."""
    monkeypatch.setattr(access, "EVERY", 0.0)
    if request.param == "v2":
        folder = hierarchy("cgroup2")
        monkeypatch.setattr(access, "hierarchies", lambda proc: iter([Cgroup(2, str(folder))]))
    else:
        folder = hierarchy("cgroup", "devices")
    name = f"kubepods-test-{secrets.token_hex(4)}"
    yield request.param, folder, name
    remove_tree(name)


@pytest.mark.root
@pytest.mark.e2e
@pytest.mark.parametrize("top", ["v1", "v2"], indirect=True)
@pytest.mark.parametrize("layout", ["burstable/pod{}", "kubepods-burstable.slice/kubepods-burstable-pod{}.slice"])
def test_device_rules_written_anew(top, layout, tmp_path):
    version, folder, name = top
    uid = UID.replace("-", "_") if "slice" in layout else UID
    pods = f"{name}/{layout.format(uid)}"
    told = []
    with plugin.short_folder() as short:
        (short / "root" / "dev").mkdir(parents=True)
        os.mknod(short / "root" / "dev" / "nvidia0", stat.S_IFCHR | 0o666, os.makedev(195, 0))
        words = (f"--driver-root={short}/root", "--metrics-address=127.0.0.1:0", "--driver-root-ctr-path=/nowhere")
        with (
            Kubelet(short / "kubelet", short / "pod-resources" / "kubelet.sock") as kubelet,
            plugin.running(
                short / "kubelet", lambda: facts(1), *words, refresh_every=0.1, report=told.append
            ) as running,
        ):
            kubelet.wait_for(GPU, 1)
            kubelet.admit(Pod("trainer", (ContainerSpec("main", limits={GPU: 1}),), namespace="team", uid=UID))
            container = Container(Bundle(tmp_path / "main", "none"), version, pods, [0])
            beside = Container(Bundle(tmp_path / "sidecar", "none"), version, pods, [])  # of the same Pod, without GPU
            try:
                before = running.daemon.news.access
                watched = before._look(running.daemon.generation)
                assert list(watched) == []
                assert "container_gpu_access_lost{" not in plugin.get(running.endpoint.port, "/metrics")[1]
                if version == "v1":
                    (folder / pods / container.id / "devices.deny").write_text("c 195:0 rw")
                else:
                    os.close(attach(folder / pods / container.id, DENY, 2))
                plugin.until(lambda: told)
                labels = f'{{container="main",namespace="team",pod="trainer",uuid="{gpu_uuid(0)}"}}'
                assert f"container_gpu_access_lost{labels} 1.0\n" in plugin.get(running.endpoint.port, "/metrics")[1]
                kubelet.stop()  # then the checkpoint alone tells
                labels = f'{{container="main",namespace="",pod="{UID}",uuid="{gpu_uuid(0)}"}}'
                assert f"container_gpu_access_lost{labels} 1.0\n" in plugin.get(running.endpoint.port, "/metrics")[1]
            finally:
                container.end()
                beside.end()
            plugin.until(lambda: "container_gpu_access_lost{" not in plugin.get(running.endpoint.port, "/metrics")[1])
    (notice,) = told
    assert (notice.kind, notice.pod) == ("GPUAccessLost", ("team", "trainer", UID))
    assert notice.text.startswith("container main of Pod team/trainer may no longer use /dev/nvidia0 of GPU GPU-")


def test_a_moment_is_not_believed(monkeypatch):
    """A container that is just being made has its nodes before its rules, or its rules before its nodes."""
    lost = access.AccessLost(access.Holder("", "u", "main", GPU, "d"), "d", "/dev/nvidia0")
    looks = iter([[lost], [], [lost], [lost], [lost], [], [lost]])
    watch = access.AccessWatch()
    monkeypatch.setattr(access, "EVERY", 0.0)
    monkeypatch.setattr(watch, "_look", lambda current: iter(next(looks)))
    assert [watch.look(None) for _ in range(7)] == [[], [], [], [lost], [], [], []]
    assert watch.lost == frozenset()
    assert news.News(None, None).access.lost == frozenset()


def test_looks_are_seldom(monkeypatch):
    calls = []
    watch = access.AccessWatch()
    monkeypatch.setattr(watch, "_look", lambda current: iter(calls.append(1) or []))
    for _ in range(10):
        watch.look(None)
    assert len(calls) == 1


def test_the_hosts_own_dev_says_nothing(tmp_path):
    rules = {"/dev/null": (1, 3)}
    assert access._refused("/proc/self/root", "/proc/1/root", Cgroup(1, str(tmp_path)), rules) == set()
    assert access._refused(str(tmp_path), "/proc/1/root", Cgroup(1, str(tmp_path)), rules) == set()


def test_pods_are_found_wherever_the_kubelet_puts_them(tmp_path: Path):
    places = (
        "kubepods/pod1-2",
        "kubepods/besteffort/pod3-4",
        "kubepods.slice/kubepods-pod5_6.slice",
        "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod7_8.slice",
    )
    for place in (*places, "other/pod1-2", "kubepods/pod9"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "kubepods" / "link").symlink_to(tmp_path)
    names = {name: uid for uid in ("1-2", "3-4", "5-6", "7-8") for name in (f"pod{uid}", f"pod{uid.replace('-', '_')}")}
    found = {uid: os.path.relpath(path, tmp_path) for uid, path in access._pods(str(tmp_path), names)}
    assert found == dict(zip(("1-2", "3-4", "5-6", "7-8"), places, strict=True))


def test_pods_are_found_in_a_cgroup_root_of_any_name(tmp_path: Path):
    for place in ("cluster/one/kubepods/burstable/pod1-2", "system.slice/kubelet.service", "init.scope"):
        (tmp_path / place).mkdir(parents=True)
    found = list(access._pods(str(tmp_path), {"pod1-2": "1-2"}))
    assert found == [("1-2", f"{tmp_path}/cluster/one/kubepods/burstable/pod1-2")]
    assert list(access._pods(f"{tmp_path}/system.slice", {"pod1-2": "1-2"})) == []
