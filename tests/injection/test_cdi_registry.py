"""CDI spec folders: priority, conflicts, broken files, names, and what an engine makes of the edits."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpulet.errors import CdiError
from gpulet.injection import cdi, oci
from gpulet.injection.model import DeviceNode, Hook, RootfsWork, SymLink


def spec(
    *names: str, version: str = "0.5.0", kind: str = "nvidia.com/gpu", common: Any = None, **edits: Any
) -> dict[str, Any]:
    each = edits or {"env": ["X=1"]}
    devices = [{"name": name, "containerEdits": each} for name in names]
    return {"cdiVersion": version, "kind": kind, "devices": devices, "containerEdits": common or {}}


def put(folder: Path, name: str, content: object) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def env_of(registry: cdi.Registry, *names: str) -> dict[str, str]:
    return dict(registry.resolve(names).env)


def test_later_folders_win(tmp_path: Path) -> None:
    put(tmp_path / "etc", "nvidia.yaml", spec("0", "1", env=["DRIVER=535"]))
    put(tmp_path / "run", "nvidia.json", spec("0", env=["DRIVER=570"]))
    registry = cdi.Registry([str(tmp_path / "etc"), str(tmp_path / "run")])
    assert env_of(registry, "nvidia.com/gpu=0") == {"DRIVER": "570"}
    assert env_of(registry, "nvidia.com/gpu=1") == {"DRIVER": "535"}
    assert registry.source("nvidia.com/gpu=0").endswith("run/nvidia.json")


def test_two_files_of_one_folder_with_one_name_conflict_and_spoil_that_name_alone(tmp_path: Path) -> None:
    put(tmp_path, "a.json", spec("0", "1"))
    put(tmp_path, "b.json", spec("0", "2"))
    put(tmp_path / "later", "c.json", spec("0"))  # doesn't rescue it
    registry = cdi.Registry([str(tmp_path), str(tmp_path / "later")])
    with pytest.raises(CdiError, match=r"gpu=0 is defined by each of \S+a\.json, \S+b\.json"):
        registry.resolve(["nvidia.com/gpu=0"])
    assert registry.names() == ["nvidia.com/gpu=1", "nvidia.com/gpu=2"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (spec("0") | {"foo": 1}, "'foo'"),
        (spec("0", deviceNodes=[{"path": "/dev/x", "hostspath": "/dev/y"}]), "'hostspath'"),
        (spec("0", version="0.4.0"), "0.5.0 or newer, because of device name '0'"),
        (
            spec("gpu0", version="0.3.0", mounts=[{"hostPath": "a", "containerPath": "/a", "type": "tmpfs"}]),
            "mounts.type",
        ),
        (spec("gpu0", version="0.2.0"), "0.3.0 or newer"),
        (spec("gpu0", version="0.9.0"), "unknown CDI version"),
        (spec("gpu0", kind="1a/b"), "vendor"),
        (spec("gpu0", kind="nvidia"), "class"),
        (spec("-x"), "device name"),
        (spec("a", "a"), "two devices"),
        (spec(), "no devices"),
        (spec("a", env=["=x"]), "environment"),
        (spec("a", env=[]), "no edits"),
        (spec("a", deviceNodes=[{"path": ""}]), "no path"),
        (spec("a", deviceNodes=[{"path": "/dev/x", "type": "q"}]), "type of device"),
        (spec("a", deviceNodes=[{"path": "/dev/x", "permissions": "rx"}]), "permissions"),
        (spec("a", deviceNodes=[{"path": "/dev/x", "major": "195"}]), "wrong type"),
        (spec("a", deviceNodes=[{"path": "/dev/x", "major": 195.5}]), "wrong type"),
        (spec("a", deviceNodes=[{"path": "/dev/x", "major": 1 << 63}]), "out of range"),
        (spec("a", hooks=[{"hookName": "later", "path": "/x"}]), "hookName"),
        (spec("a", mounts=[{"hostPath": "/x"}]), "containerPath"),
        (spec("a", version="0.7.0", intelRdt={"closID": "a/b"}), "closID"),
        (spec("a", version="1.1.0", netDevices=[{"hostInterfaceName": "e0", "name": ""}]), "name"),
        (spec("a", additionalGids=[5]), "additionalGids"),
        ("", "no CDI spec data"),
        ("[1]", "no CDI spec data"),
        ("a: [", "not YAML"),
        ("kind: a/b\nkind: a/b\n", "occurs twice"),
    ],
)
def test_a_broken_file_is_named_with_its_reason_and_hides_no_other(
    tmp_path: Path, content: object, reason: str
) -> None:
    bad = put(tmp_path, "bad.yaml", content)
    put(tmp_path, "good.yaml", spec("ok"))
    registry = cdi.Registry([str(tmp_path)])
    assert registry.names() == ["nvidia.com/gpu=ok"]
    assert list(registry.errors) == [bad]
    with pytest.raises(CdiError) as raised:
        registry.resolve(["nvidia.com/gpu=0"])
    assert bad in str(raised.value) and reason in str(raised.value) and str(tmp_path) in str(raised.value)


BY_HAND = """
Kind: nvidia.com/gpu
CDIVersion: 0.6.0
annotations: {driver: 570.10, mig: no, none: null, mask: 0x_}
devices:
- name: 0
  containerEdits: {deviceNodes: [{path: /dev/a, type: c, major: 195.0, fileMode: 0o640}]}
- name: 1:0
  containerEdits: {devicenodes: [{path: /dev/b, type: c, major: 195, filemode: 0640}]}
- name: yes
  containerEdits:
    mounts: [{hostPath: /, containerPath: /c, options: [1.5, 2.0, true]}]
    hooks: [{hookName: poststop, path: /x, args: [x, null]}]
- {name: 2024-01-01, containerEdits: {env: [A=1]}}
- {name: 08, containerEdits: {env: [A=1]}}
"""


def test_a_spec_written_by_hand_is_read_as_cdis_own_library_reads_it(tmp_path: Path) -> None:
    put(tmp_path, "a.yaml", BY_HAND)
    registry = cdi.Registry([str(tmp_path)])
    assert registry.names() == [f"nvidia.com/gpu={name}" for name in ("0", "1:0", "2024-01-01", "8", "true")]
    found = registry.resolve(registry.names())
    assert [(node.major, node.mode) for node in found.devices] == [(195, 0o640), (195, 0o640)]
    assert (found.mounts[0].options, found.hooks[0].args) == (("1.5", "2", "true"), ("x", ""))


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("devices: {}", "a device is no object"),
        ("annotations: {{x: {}}}", "wrong type of the spec.annotations: list"),
        ("annotations:\n  ? {}\n  : x", "unhashable key"),
    ],
)
def test_lists_of_lists_without_end_are_refused_at_once(tmp_path: Path, where: str, reason: str) -> None:
    nested = "&a0 [x]"
    for level in range(1, 60):
        nested = f"&a{level} [{nested}, *a{level - 1}, *a{level - 1}]"
    path = put(tmp_path, "a.yaml", f"cdiVersion: 0.6.0\nkind: a.com/b\n{where.format(nested)}\n")
    assert reason in str(cdi.Registry([str(tmp_path)]).errors[path])


def test_maps_may_be_merged(tmp_path: Path) -> None:
    text = "- {name: a, containerEdits: &edits {env: [A=1]}}\n- {name: b, containerEdits: {<<: *edits, hooks: []}}\n"
    put(tmp_path, "a.yaml", f"cdiVersion: 0.5.0\nkind: x.com/gpu\ndevices:\n{text}")
    assert cdi.Registry([str(tmp_path)]).names() == ["x.com/gpu=a", "x.com/gpu=b"]


def test_empty_resource_control_is_an_edit(tmp_path: Path) -> None:
    put(tmp_path, "a.json", spec("a", version="0.7.0", intelRdt={}))
    assert cdi.Registry([str(tmp_path)]).names() == ["nvidia.com/gpu=a"]


def test_only_json_and_yaml_files_right_in_the_folder(tmp_path: Path) -> None:
    put(tmp_path, "a.yml", spec("no"))
    put(tmp_path, "b.json.bak", spec("no"))
    put(tmp_path / "deep", "c.json", spec("no"))
    (tmp_path / "d.json").mkdir()
    put(tmp_path, "e.json", spec("yes"))
    (tmp_path / "f.yaml").symlink_to(put(tmp_path / "elsewhere", "g.txt", spec("linked")))
    registry = cdi.Registry([str(tmp_path), str(tmp_path / "absent")])
    assert registry.names() == ["nvidia.com/gpu=linked", "nvidia.com/gpu=yes"] and not registry.errors


@pytest.mark.parametrize("name", ["odd.yaml", "odd.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "endless"])
def test_what_is_no_file_to_read_stops_nobody(tmp_path: Path, name: str, kind: str) -> None:
    put(tmp_path, "good.json", spec("0"))
    odd = tmp_path / name
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "device":
        odd.symlink_to("/dev/zero")
    else:
        odd.touch()
        os.truncate(odd, 1 << 40)
    registry = cdi.Registry([str(tmp_path)])
    assert registry.resolve(["nvidia.com/gpu=0"])
    assert ("too large" if kind == "endless" else "no regular file") in str(registry.errors[str(odd)])


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_byte_order_mark_is_passed_over(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, "\ufeff" + json.dumps(spec("0")))
    assert cdi.Registry([str(tmp_path)]).names() == ["nvidia.com/gpu=0"]


def test_files_are_read_again_on_load(tmp_path: Path) -> None:
    registry = cdi.Registry([str(tmp_path)])
    assert registry.names() == []
    put(tmp_path, "a.json", spec("0"))
    assert registry.load().names() == ["nvidia.com/gpu=0"]


def test_common_edits_come_once_for_each_file_before_its_devices(tmp_path: Path) -> None:
    hook = {"hookName": "createRuntime", "path": "/x"}
    put(tmp_path, "a.json", spec("0", "1", common={"env": ["A=common", "B=common"], "hooks": [hook]}, env=["A=device"]))
    put(tmp_path, "b.json", spec("x", kind="other/thing", env=["B=thing"]))
    names = ["nvidia.com/gpu=0", "other/thing=x", "nvidia.com/gpu=1", "nvidia.com/gpu=0"]
    injection = cdi.Registry([str(tmp_path)]).resolve(names)
    assert dict(injection.env) == {"A": "device", "B": "thing"}
    assert injection.hooks == (Hook("createRuntime", "/x"),)


def test_every_field_of_the_edits(tmp_path: Path) -> None:
    source = put(tmp_path / "files", "libx.so.1", "")
    edits = {
        "env": ["A=b=c", "E="],
        "deviceNodes": [{"path": "/dev/x", "hostPath": "/dev/none", "type": "c", "major": 7, "minor": 3,
                         "fileMode": 384, "permissions": "none", "uid": 5, "gid": 6}],
        "netDevices": [{"hostInterfaceName": "eth9", "name": "net0"}],
        "hooks": [{"hookName": "poststop", "path": "/h", "args": ["h", "x"], "env": ["Q=1"], "timeout": 9}],
        "mounts": [{"hostPath": source, "containerPath": "/usr/lib/libx.so.1", "options": ["ro"]},
                   {"hostPath": "tmpfs", "containerPath": "/t", "type": "tmpfs"}],
        "intelRdt": {"closID": "gold", "schemata": ["L3:0=f"]},
        "additionalGids": [0, 44, 44],
    }  # fmt: skip
    put(tmp_path, "a.json", spec("a", version="1.1.0", **edits))
    got = cdi.Registry([str(tmp_path)]).resolve(["nvidia.com/gpu=a"])
    assert dict(got.env) == {"A": "b=c", "E": ""}
    why = f"CDI spec {tmp_path}/a.json"
    assert got.devices == (DeviceNode("/dev/x", "/dev/none", 7, 3, "c", 0o600, 5, 6, "", why),)
    assert [(m.source, m.path, m.options, m.kind, m.type) for m in got.mounts] == [
        (source, "/usr/lib/libx.so.1", ("ro",), "library", ""),
        ("tmpfs", "/t", (), "other", "tmpfs"),
    ]
    assert got.hooks == (Hook("poststop", "/h", ("h", "x"), ("Q=1",), 9),)
    assert (got.gids, got.net_devices) == ((44,), (("eth9", "net0"),))
    assert got.intel_rdt == (("closID", "gold"), ("schemata", ("L3:0=f",)))


@pytest.mark.root
def test_what_a_device_node_leaves_open_is_looked_up_on_the_host(tmp_path: Path) -> None:
    host = tmp_path / "node"
    os.mknod(host, stat.S_IFCHR | 0o640, os.makedev(508, 1))
    host.chmod(0o640)
    put(tmp_path, "a.json", spec("a", deviceNodes=[{"path": "/dev/nvidia-uvm", "hostPath": str(host)}]))
    (node,) = cdi.Registry([str(tmp_path)]).resolve(["nvidia.com/gpu=a"]).devices
    assert (node.type, node.major, node.minor, node.mode, node.access) == ("c", 508, 1, 0o640, "rwm")
    put(tmp_path, "a.json", spec("a", deviceNodes=[{"path": "/dev/x", "hostPath": str(host), "type": "b"}]))
    with pytest.raises(CdiError, match="another type"):
        cdi.Registry([str(tmp_path)]).resolve(["nvidia.com/gpu=a"])
    whole = {"path": "/dev/x", "hostPath": str(host), "type": "b", "major": 7}  # says all: the host's isn't asked
    put(tmp_path, "a.json", spec("a", deviceNodes=[whole]))
    (node,) = cdi.Registry([str(tmp_path)]).resolve(["nvidia.com/gpu=a"]).devices
    assert (node.type, node.major, node.minor, node.mode) == ("b", 7, 0, 0o640)


def test_an_owner_that_a_spec_names_is_the_owner_root_too(tmp_path: Path) -> None:
    node = {"path": "/dev/x", "type": "c", "major": 240}
    put(tmp_path, "a.json", spec("a", deviceNodes=[node | {"uid": 0, "gid": 0}]))
    put(tmp_path, "b.json", spec("b", deviceNodes=[node | {"uid": 7}]))
    registry = cdi.Registry([str(tmp_path)])
    before = {"process": {"user": {"uid": 1000, "gid": 1000}}}

    def owner(name: str) -> tuple[int, int]:
        (entry,) = oci.apply(before, registry.resolve([f"nvidia.com/gpu={name}"]))["linux"]["devices"]
        return entry.get("uid", 0), entry.get("gid", 0)

    assert [owner("a"), owner("b")] == [(0, 0), (7, 1000)]


@pytest.mark.parametrize(
    "edits",
    [
        {"deviceNodes": [{"path": "/dev/gone"}]},
        {"deviceNodes": [{"path": "/dev/x", "hostPath": "/etc/hostname"}]},
        {"mounts": [{"hostPath": "/usr/lib/libcuda.so.550.90.07", "containerPath": "/x"}]},
    ],
)
def test_a_stale_spec_is_told_with_the_command_that_mends_it(tmp_path: Path, edits: dict[str, Any]) -> None:
    path = put(tmp_path, "nvidia.json", spec("a", **edits))
    with pytest.raises(CdiError, match=f"gpulet cdi generate --output {path}"):
        cdi.Registry([str(tmp_path)]).resolve(["nvidia.com/gpu=a"])


def test_nothing_is_resolved_by_half(tmp_path: Path) -> None:
    put(tmp_path, "a.json", spec("a"))
    with pytest.raises(CdiError, match=r"unresolvable CDI devices nvidia\.com/gpu=b, x/y=z") as raised:
        cdi.Registry([str(tmp_path)]).resolve(["nvidia.com/gpu=a", "nvidia.com/gpu=b", "x/y=z"])
    assert "gpulet cdi why nvidia.com/gpu=b" in str(raised.value)


@pytest.mark.parametrize("name", ["nvidia.com/gpu=0", "a/b=c", "nvidia.com/gpu=0:1", "v_1/c-2.x=d.e:f_g"])
def test_qualified_names(name: str) -> None:
    assert cdi.is_qualified(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0",
        "gpu=0",
        "/gpu=0",
        "nvidia.com/=0",
        "nvidia.com/gpu=",
        "nvidia.com/gpu=a=b",
        "1v/c=d",
        "v/c=:a",
        "v/c-=a",
        "v/c=é",
    ],
)
def test_what_is_no_qualified_name(name: str) -> None:
    assert not cdi.is_qualified(name)


# -- hooks taken over --


def hook(*args: str, path: str = "/usr/bin/nvidia-cdi-hook") -> dict[str, Any]:
    return {"path": path, "args": list(args), "env": ["NVIDIA_CTK_DEBUG=false"]}


PEERS = [
    hook(
        "nvidia-cdi-hook",
        "create-symlinks",
        "--link",
        "libcuda.so.1::/usr/lib/libcuda.so",
        "--link=x.so.9::/usr/lib/x.so",
    ),
    hook("nvidia-cdi-hook", "enable-cuda-compat", "--host-driver-version=570.86.15"),
    hook("nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib", "--ldconfig-path=@/sbin/ldconfig"),
    hook("nvidia-cdi-hook", "chmod", "--mode", "755", "--path", "/dev/dri"),
    hook("nvidia-ctk", "--debug", "hook", "disable-device-node-modification", path="/usr/bin/nvidia-ctk"),
    hook("nvidia-cdi-hook", "update-application-profile"),
]
WORK = RootfsWork(
    (SymLink("libcuda.so.1", "/usr/lib/libcuda.so"), SymLink("x.so.9", "/usr/lib/x.so")),
    ("/usr/lib",),
    "570.86.15",
    freeze_device_nodes=True,
    profile_minors=(3,),
)


def test_the_peers_hooks_are_taken_over_as_work() -> None:
    other = {"path": "/usr/bin/other"}
    work, remaining = cdi.take_over({"createContainer": [*PEERS, other], "poststop": [other]}, minors=[3])
    assert work == WORK
    assert remaining == {"createContainer": [other], "poststop": [other]}


def test_our_own_hook_says_the_same_in_one() -> None:
    from gpulet.injection.cdi_hooks import hook_args

    ours = hook(*hook_args("gpulet-cdi-hook", WORK, profile=True), path="/usr/bin/gpulet-cdi-hook")
    assert cdi.take_over({"createContainer": [ours]}, minors=[3]) == (WORK, {})
    tegra = RootfsWork(host_cuda="12.6", compat_folder="/usr/local/cuda/compat_orin")
    ours = hook(*hook_args("gpulet-cdi-hook", tegra, profile=False), path="/usr/bin/gpulet-cdi-hook")
    assert cdi.take_over({"createContainer": [ours]}) == (tegra, {})


@pytest.mark.parametrize(
    "left",
    [
        hook("nvidia-cdi-hook", "something-new"),
        hook("nvidia-cdi-hook", "update-ldcache", "--new-flag"),
        hook("nvidia-cdi-hook", "create-symlinks", "--link", "no-target"),
        hook("nvidia-cdi-hook", "create-symlinks", "--link"),
        hook("nvidia-cdi-hook"),
        hook("x", "update-ldcache", "--folder", "/usr/lib", path="/usr/bin/x"),
        {"path": "/usr/bin/nvidia-ctk"},
    ],
)
def test_what_is_not_understood_wholly_stays(left: dict[str, Any]) -> None:
    assert cdi.take_over({"createContainer": [left]}) == (RootfsWork(), {"createContainer": [left]})


def test_hooks_of_other_stages_stay() -> None:
    hooks = {"createRuntime": [PEERS[2]]}
    assert cdi.take_over(hooks) == (RootfsWork(), hooks)
