"""oci.py: an Injection in a config.json. The input is never changed, twice is once, unknown fields stay."""

from __future__ import annotations

import copy
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpulet.injection import oci
from gpulet.injection.model import DeviceNode, Hook, Injection, Mount
from support import real_container
from support.real_container import Bundle

GPU = DeviceNode("/dev/nvidia1", "/x/dev/nvidia1", 195, 1)
LIBRARY = Mount("/host/libcuda.so.1", "/usr/lib/libcuda.so.1", kind="library")
HOOK = Hook("createContainer", "/bin/other", ("other", "go"), ("A=1",), 5)
DENY = {"allow": False, "access": "rwm"}
ALLOW = {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rwm"}
EVERYTHING = Injection(
    devices=(GPU,), mounts=(LIBRARY,), env=(("NVIDIA_VISIBLE_DEVICES", "void"),), gids=(44, 0), hooks=(HOOK,)
)


def config() -> dict[str, Any]:
    return {
        "ociVersion": "1.0.2",
        "x-unknown": {"deep": [1, {"a": None}]},
        "process": {
            "user": {"uid": 0, "gid": 0, "x": 1},
            "env": ["A=/b", "NVIDIA_VISIBLE_DEVICES=1"],
            "new": True,
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "x": 1},
            {"destination": "/usr/lib/deep/er/x", "source": "/a"},
            {"destination": "/data", "source": "/b"},
        ],
        "linux": {"resources": {"devices": [DENY], "memory": {}}, "seccomp": {"x": 1}},
    }


def test_the_parts_and_what_stays() -> None:
    before = config()
    kept = copy.deepcopy(before)
    after = oci.apply(before, EVERYTHING)
    assert before == kept
    assert after["process"]["env"] == ["A=/b", "NVIDIA_VISIBLE_DEVICES=void"]
    assert after["process"]["user"] == {"uid": 0, "gid": 0, "x": 1, "additionalGids": [44]}
    assert after["process"]["new"] is True
    assert after["linux"]["devices"] == [
        {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1, "fileMode": 0o666}
    ]
    assert after["linux"]["resources"] == {"devices": [DENY, ALLOW], "memory": {}}
    assert after["linux"]["seccomp"] == {"x": 1}
    assert after["hooks"] == {
        "createContainer": [{"path": "/bin/other", "args": ["other", "go"], "env": ["A=1"], "timeout": 5}]
    }
    assert after["x-unknown"] == kept["x-unknown"]
    assert [mount["destination"] for mount in after["mounts"]] == [
        "/proc",
        "/data",
        "/usr/lib/libcuda.so.1",
        "/usr/lib/deep/er/x",
    ]
    assert after["mounts"][0] == kept["mounts"][0]
    assert after["mounts"][2] == {
        "destination": "/usr/lib/libcuda.so.1",
        "source": "/host/libcuda.so.1",
        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
    }


def test_twice_is_once() -> None:
    once = oci.apply(config(), EVERYTHING)
    assert oci.apply(once, EVERYTHING) == once


def in_user_namespace(*spans: tuple[int, int, int]) -> dict[str, Any]:
    """spans: (containerID, hostID, size)."""
    maps = [dict(zip(("containerID", "hostID", "size"), span, strict=True)) for span in spans]
    return {"linux": {"namespaces": [{"type": "mount"}, {"type": "user"}], "gidMappings": maps}}


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ({"linux": {"namespaces": [{"type": "mount"}], "gidMappings": [{"hostID": 5}]}}, {44: 44, 105: 105}),
        (in_user_namespace((0, 0, 65536)), {44: 44, 105: 105}),
        (in_user_namespace((0, 0, 1)), {}),
        (in_user_namespace((0, 100000, 65536)), {}),
        (in_user_namespace((0, 1000, 1), (1, 100000, 65535), (70000, 44, 1)), {44: 70000}),
        (in_user_namespace((7, 40, 5), (12, 45, 60)), {44: 11}),
        (in_user_namespace(), {}),
        ({"linux": {"namespaces": [{"type": "user", "path": "/proc/7/ns/user"}]}}, {}),
        ({"linux": {"namespaces": [{"type": "user"}], "gidMappings": [{"size": 45}]}}, {44: 44}),
    ],
)
def test_a_group_has_the_number_that_the_container_knows_it_by(before: dict[str, Any], inside: dict[int, int]) -> None:
    assert oci.seen_inside(before, (44, 0, 105)) == inside
    after = oci.apply(before, Injection(gids=(44, 0, 105)))
    assert after["process"].get("user", {}).get("additionalGids", []) == list(inside.values())


@pytest.mark.root
@pytest.mark.e2e
@pytest.mark.parametrize("low", ["runc", "crun"])
def test_a_container_starts_whose_user_namespace_lacks_the_group(tmp_path: Path, low: str) -> None:
    """As without root and without ranges of ids: there is one group."""
    real = Bundle(tmp_path)
    made = real_container.config(["/bin/sh", "-c", "cat /proc/self/status"])
    lacking = in_user_namespace((0, 0, 1))["linux"]
    made["linux"] |= {"gidMappings": lacking["gidMappings"], "uidMappings": lacking["gidMappings"]}
    made["linux"]["namespaces"].append({"type": "user"})
    made["mounts"] = [mount for mount in made["mounts"] if mount["destination"] != "/sys"]
    done = real.run(oci.apply(made, Injection(gids=(44,))), low, "v1")
    assert done.returncode == 0, done.stderr
    assert "44" not in next(line for line in done.stdout.splitlines() if line.startswith("Groups:")).split()


def test_a_node_that_a_mount_brings_is_not_made_as_well() -> None:
    before = config()
    before["mounts"].append({"destination": "/dev//nvidia1", "source": "/dev/nvidia1", "options": ["rbind"]})
    linux = oci.apply(before, EVERYTHING)["linux"]
    assert "/dev/nvidia1" not in [node["path"] for node in linux.get("devices", [])]
    assert ALLOW in linux["resources"]["devices"]


BOUND = {
    "destination": "/dev/nvidia1",
    "source": "/x/dev/nvidia1",
    "type": "bind",
    "options": ["rw", "nosuid", "noexec", "bind", "rprivate"],
}


def test_in_a_user_namespace_a_node_of_another_root_is_bound_not_made() -> None:
    """There low-level runtimes bind the host's /dev/nvidia1, which isn't there."""
    before = in_user_namespace((0, 100000, 65536))
    before["linux"]["devices"] = [{"path": "/dev/nvidia1"}, {"path": "/dev/fuse"}]  # the first is an engine's
    own = DeviceNode("/dev/nvidiactl", "/dev/nvidiactl", 195, 255)
    after = oci.apply(before, Injection(devices=(GPU, own)))
    assert after["mounts"] == [BOUND]
    assert [node["path"] for node in after["linux"]["devices"]] == ["/dev/fuse", "/dev/nvidiactl"]
    assert [rule["minor"] for rule in after["linux"]["resources"]["devices"]] == [1, 255]
    assert oci.apply(after, Injection(devices=(GPU, own))) == after
    assert "mounts" not in oci.apply({}, Injection(devices=(GPU,)))


@pytest.mark.root
@pytest.mark.e2e
@pytest.mark.parametrize("low", ["runc", "crun"])
def test_a_container_in_a_user_namespace_has_a_node_of_another_root(tmp_path: Path, low: str) -> None:
    node = tmp_path / "nvidia1"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, 1))
    node.chmod(0o666)
    real = Bundle(tmp_path)
    made = real_container.config(["/bin/sh", "-c", "stat -c '%t %T' /dev/nvidia1; true < /dev/nvidia1"])
    spans = in_user_namespace((0, 0, 65536))["linux"]["gidMappings"]
    made["linux"] |= {"gidMappings": spans, "uidMappings": spans}
    made["linux"]["namespaces"].append({"type": "user"})
    made["mounts"] = [mount for mount in made["mounts"] if mount["destination"] != "/sys"]
    done = real.run(oci.apply(made, Injection(devices=(GPU.replace(host_path=str(node)),))), low, "v1")
    assert done.stdout.split() == ["c3", "1"], done.stderr
    assert "No such device" in done.stderr  # ENXIO, not EPERM: the node may be opened, and has no driver


def test_nothing_to_do_changes_nothing_not_even_the_order_of_mounts() -> None:
    assert oci.apply(config(), Injection()) == config()


def test_an_empty_config_gets_its_parts() -> None:
    after = oci.apply({}, EVERYTHING)
    assert after["process"] == {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "user": {"additionalGids": [44]}}
    assert after["linux"]["resources"]["devices"] == [ALLOW]


def test_null_parts_are_empty_parts() -> None:
    nothing = {"process": None, "mounts": None, "hooks": None, "linux": {"devices": None, "resources": None}}
    assert oci.apply(nothing, EVERYTHING) == oci.apply({}, EVERYTHING)


def test_a_variable_is_replaced_where_it_stands_and_its_repetitions_go() -> None:
    before = {"process": {"env": ["A=1", "B=2", "A=3", "AB=4"]}}
    assert oci.set_env(before, (("A", "x"), ("C", "y")))["process"]["env"] == ["A=x", "B=2", "AB=4", "C=y"]
    assert oci.put_env(before, "A", None)["process"]["env"] == ["B=2", "AB=4"]


def test_a_device_replaces_the_one_at_its_path() -> None:
    before = {"linux": {"devices": [{"path": "/dev/nvidia1", "type": "b"}, {"path": "/dev/x", "type": "c"}]}}
    devices = oci.apply(before, Injection(devices=(GPU,)))["linux"]["devices"]
    assert [(entry["path"], entry["type"]) for entry in devices] == [("/dev/x", "c"), ("/dev/nvidia1", "c")]


@pytest.mark.parametrize(
    ("user", "node", "owner"),
    [
        ({"uid": 1000, "gid": 100}, GPU, (1000, 100)),
        ({"uid": 1000}, GPU.replace(uid=7, gid=44), (7, 44)),
        ({}, GPU, (None, None)),
    ],
)
def test_a_node_without_owner_belongs_to_the_user(user: dict[str, int], node: DeviceNode, owner: object) -> None:
    entry = oci.apply({"process": {"user": user}}, Injection(devices=(node,)))["linux"]["devices"][0]
    assert (entry.get("uid"), entry.get("gid")) == owner


def test_a_rule_counts_only_behind_the_last_denial() -> None:
    def rules(*before: dict[str, Any]) -> list[dict[str, Any]]:
        linux = {"resources": {"devices": list(before)}}
        return oci.apply({"linux": linux}, Injection(devices=(GPU,)))["linux"]["resources"]["devices"]

    assert rules(DENY, ALLOW) == [DENY, ALLOW]
    assert rules(ALLOW, DENY) == [ALLOW, DENY, ALLOW]
    assert rules(DENY, ALLOW | {"access": "r"}) == [DENY, ALLOW | {"access": "r"}, ALLOW]
    pipe = GPU.replace(type="p")
    assert oci.apply({}, Injection(devices=(pipe,)))["linux"]["resources"]["devices"] == []


def test_mounts_with_one_destination_are_one_and_parents_come_first() -> None:
    before = {
        "mounts": [{"destination": "/usr/lib/libcuda.so.1/", "source": "/old"}, {"destination": "/a/b", "source": "/s"}]
    }
    added = (LIBRARY, Mount("/s", "/a", ("bind",), type="bind"), LIBRARY.replace(source="/newer"))
    after = oci.apply(before, Injection(mounts=added))["mounts"]
    assert [(entry["destination"], entry["source"]) for entry in after] == [
        ("/a", "/s"),
        ("/a/b", "/s"),
        ("/usr/lib/libcuda.so.1", "/newer"),
    ]
    assert after[0] == {"destination": "/a", "source": "/s", "type": "bind", "options": ["bind"]}


def test_a_mount_that_is_there_already_keeps_its_place() -> None:
    beside = Mount("/s", "/usr/lib/other", kind="other")
    once = oci.apply(oci.apply({}, Injection(mounts=(LIBRARY,))), Injection(mounts=(beside,)))
    assert oci.apply(once, Injection(mounts=(LIBRARY,))) == once


def test_hooks_are_added_once_and_replaced_whole() -> None:
    before = oci.add_hook({"hooks": {"poststop": [{"path": "/z", "unknown": 1}], "prestart": None}}, HOOK)
    assert oci.add_hook(before, HOOK) == before
    assert list(before["hooks"]) == ["poststop", "prestart", "createContainer"]
    assert oci.with_hooks(before, {"poststop": before["hooks"]["poststop"], "prestart": []})["hooks"] == {
        "poststop": [{"path": "/z", "unknown": 1}]
    }
    assert "hooks" not in oci.with_hooks(before, {})


def test_network_devices_and_resource_control() -> None:
    injection = Injection(net_devices=(("eth9", "net0"),), intel_rdt=(("closID", "x"), ("schemata", ("a", "b"))))
    linux = oci.apply({"linux": {"netDevices": {"eth8": {"name": "y"}}, "intelRdt": {"z": 1}}}, injection)["linux"]
    assert linux == {
        "netDevices": {"eth8": {"name": "y"}, "eth9": {"name": "net0"}},
        "intelRdt": {"closID": "x", "schemata": ["a", "b"]},
    }


MOUNTED = Injection(mounts=(Mount("/host/libcuda.so.1", "/usr/lib/libcuda.so.1", ("ro", "rbind")),))


def test_in_a_user_namespace_every_bind_mount_has_a_type() -> None:
    """Else crun until 1.28 dies where a container joins the namespaces of its Pod."""
    before = config() | {
        "mounts": [{"destination": "/data", "source": "/b", "options": ["bind"]}, {"destination": "/x"}]
    }
    before["linux"]["namespaces"] = [{"type": "user"}]
    after = oci.apply(before, MOUNTED)
    kinds = {entry["destination"]: entry.get("type") for entry in after["mounts"]}
    assert kinds == {"/data": "bind", "/usr/lib/libcuda.so.1": "bind", "/x": None}
    assert oci.apply(after, MOUNTED) == after
    assert "type" not in before["mounts"][0]


def test_elsewhere_a_mount_is_written_as_the_specification_has_it() -> None:
    added = {entry["destination"]: entry for entry in oci.apply(config(), MOUNTED)["mounts"]}["/usr/lib/libcuda.so.1"]
    assert "type" not in added
