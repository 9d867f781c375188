"""bundle.py: reading a config.json without losing anything, and what tells one container from another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpulet.errors import BundleError
from gpulet.request.bundle import Container, State, read_config, write_config
from support.containers import UID, config, container, pod


def test_what_matters_is_read() -> None:
    seen = container("A=1", "B=x=y", "A=2", mounts=("0",), annotations=pod(), privileged=True)
    assert seen.env == (("PATH", "/bin"), ("A", "1"), ("B", "x=y"), ("A", "2"))
    assert seen.variable("A") == "2"
    assert seen.position("A") == "process.env[3]"
    assert seen.variable("C") is None
    assert seen.mounts[1] == ("/dev/null", "/var/run/nvidia-container-devices/0")
    assert seen.privileged
    assert seen.root == "/bundle/rootfs"
    assert (seen.pod_uid, seen.pod_namespace, seen.pod_name, seen.name, seen.type) == (
        UID, "default", "two", "main", "container",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cgroup", "confirmed"),
    [
        (f"/kubepods/besteffort/pod{UID}/abc", True),
        (f"kubepods-besteffort-pod{UID.replace('-', '_')}.slice:cri-containerd:abc", True),
        (f"/kubepods/pod{UID}", True),
        ("/kubepods/besteffort/pod00000000-982e-49cd-b949-24046615e118/abc", False),
        (f"/kubepods/x{UID}/abc", False),
        (f"/kubepods/pod{UID}0/abc", False),
        ("", False),
    ],
)
def test_the_cgroup_confirms_the_pod(cgroup: str, confirmed: bool) -> None:
    assert container(annotations=pod(), cgroup=cgroup).confirmed is confirmed


def test_without_annotations_nothing_is_confirmed() -> None:
    assert not container().confirmed


CRIO = {
    "io.kubernetes.pod.uid": UID,
    "io.kubernetes.container.name": "main",
    "io.kubernetes.pod.namespace": "default",
    "io.kubernetes.pod.name": "two",
    "io.kubernetes.cri-o.ContainerType": "container",
}


def test_crio_names_its_pods_too() -> None:
    seen = container(annotations=CRIO | {"io.kubernetes.cri-o.ContainerType": "sandbox"})
    assert (seen.type, seen.name, seen.pod_uid, seen.confirmed) == ("sandbox", "main", UID, True)


@pytest.mark.parametrize(
    ("own", "forged", "fields"),
    [
        (CRIO, {"io.kubernetes.cri.container-type": "sandbox"}, ("type",)),
        (CRIO, {"io.kubernetes.cri.container-name": "other"}, ("name",)),
        (CRIO, {"io.kubernetes.cri.sandbox-uid": "other"}, ("pod_uid",)),
        (CRIO, {"io.kubernetes.cri.sandbox-name": "other"}, ("pod_name",)),
        (CRIO, {"io.kubernetes.cri.sandbox-namespace": "kube-system"}, ("pod_namespace",)),
        (CRIO, pod(name="other", kind="sandbox"), ("type", "pod_name")),
        (pod(), {"io.kubernetes.cri-o.ContainerType": "sandbox"}, ("type",)),
        (pod(), CRIO | {"io.kubernetes.container.name": "other"}, ("name",)),
    ],
)
def test_a_field_holds_nothing_where_somebody_says_otherwise(
    own: dict[str, str], forged: dict[str, str], fields: tuple[str, ...]
) -> None:
    seen = container(annotations=own | forged)
    assert not seen.confirmed
    for field in fields:
        assert getattr(seen, field) == "", field
    if len(forged) > 1:  # speaks of all: what both say stands
        honest = container(annotations=own)
        rest = {"type", "name", "pod_uid", "pod_name", "pod_namespace"} - set(fields)
        assert all(getattr(seen, field) == getattr(honest, field) for field in rest)


def test_engines_that_agree_are_believed() -> None:
    assert container(annotations=CRIO | pod()) == container(annotations=CRIO | pod()).replace(
        type="container", name="main", pod_uid=UID, pod_name="two", pod_namespace="default", confirmed=True
    )


@pytest.mark.parametrize(
    ("version", "capabilities", "privileged"),
    [
        ("1.0.2", {"bounding": ["CAP_SYS_ADMIN"]}, True),
        ("1.0.2", {"effective": ["CAP_SYS_ADMIN"]}, False),
        ("1.0.2", {}, False),
        ("1.0.2", None, False),
        ("1.0.0-rc2", ["CAP_SYS_ADMIN"], True),
        ("1.0.0-rc2", [], False),
    ],
)
def test_privileged(version: str, capabilities: object, privileged: bool) -> None:
    data = config() | {"ociVersion": version}
    data["process"]["capabilities"] = capabilities
    assert Container.from_config(data).privileged is privileged


@pytest.mark.parametrize(
    "change",
    [
        {"process": {"env": ["NOEQUALS"]}},
        {"process": []},
        {"process": {"env": "A=1"}},
        {"process": {"capabilities": ["CAP_SYS_ADMIN"]}},
        {"mounts": {}},
        {"mounts": ["x"]},
        {"annotations": ["x"]},
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(BundleError):
        Container.from_config(config() | change)


def test_null_means_absent() -> None:
    seen = Container.from_config({"process": None, "mounts": None, "annotations": None, "linux": None, "root": None})
    assert seen == Container()


def test_state_of_old_and_new_engines() -> None:
    assert State.parse(b'{"pid": 7, "bundle": "/b", "id": "x", "extra": 1}') == State(7, "/b", "x")
    assert State.parse(b'{"pid": 7, "bundlePath": "/b"} trailing') == State(7, "/b")
    for bad in (b"", b"[]", b'{"pid": "7"}', b'{"pid": 7, "bundle": "/b\\u0000"}', b'{"pid": 7, "root": "\\ud800"}'):
        with pytest.raises(BundleError):
            State.parse(bad)
    assert State.parse(b'{"pid": 0, "bundle": "/b"}', process=False) == State(0, "/b")


@pytest.mark.parametrize("pid", ["0", "-1", "true", "false", "7.0", "null", '"7"'])
def test_a_state_without_a_process(pid: str) -> None:
    with pytest.raises(BundleError, match="pid"):
        State.parse(f'{{"pid": {pid}, "bundle": "/b"}}'.encode())


def test_writing_keeps_mode_and_owner_and_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"unknown": {"deep": [1, None]}, "text": "<é>"}))
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    before = path.stat()
    content = read_config(str(path))
    write_config(str(path), content | {"more": 1})
    assert json.loads(path.read_text()) == {"unknown": {"deep": [1, None]}, "text": "<é>", "more": 1}
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert [item.name for item in tmp_path.iterdir()] == ["config.json"]


def test_what_killed_runs_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    names = ("config.json.gpulet.4194999", "config.json.gpulet.x", "config.json.gpulet.1", "other.gpulet.4194999")
    for name in ("config.json", *names):  # Linux has no process above 4194304, and always a first one
        (tmp_path / name).write_text("{}")
    write_config(str(path), {})
    assert sorted(item.name for item in tmp_path.iterdir()) == sorted(["config.json", *names[1:]])
    (tmp_path / names[0]).mkdir()
    write_config(str(path), {})
    assert (tmp_path / names[0]).is_dir()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises((TypeError, ValueError)):
        write_config(str(path), {"a": object()})
    assert [item.name for item in tmp_path.iterdir()] == ["config.json"]
    assert path.read_text() == "{}"


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_no_config_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(BundleError, match=r"config\.json"):
        read_config(str(path))
    path.write_text(text)
    with pytest.raises(BundleError, match=r"config\.json"):
        read_config(str(path))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"annotations": {"a": 5}}, "annotations: 5"),
        ({"mounts": [1]}, "mounts"),
        ({"mounts": [{"destination": 5}]}, "mounts: destination: 5"),
        ({"hooks": []}, "hooks"),
        ({"hooks": {"prestart": 5}}, "prestart"),
        ({"hooks": {"prestart": [1]}}, "prestart"),
        ({"hooks": {"createContainer": [{"path": 5}]}}, "createContainer: path: 5"),
        ({"linux": {"devices": [5]}}, "devices"),
        ({"linux": {"resources": 5}}, "resources: 5"),
        ({"linux": {"resources": {"devices": {"a": 1}}}}, "devices"),
        ({"process": {"user": 5}}, "user: 5"),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(broken: dict[str, object], says: str) -> None:
    with pytest.raises(BundleError, match=f"config.json: {says}"):
        Container.from_config(config() | broken)
    empty = {"annotations": {"a": None}, "hooks": None, "linux": {"devices": None}}
    assert Container.from_config(config() | empty).annotations == (("a", ""),)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """A pipe would make the engine wait for ever."""
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(BundleError, match="not a regular file"):
        read_config(str(path))


def test_a_sandbox_of_cri_o_stays_one_whatever_its_pod_calls_it() -> None:
    """CRI-O lets a Pod's annotation change a sandbox's type."""
    forged = CRIO | {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.container.name": "POD"}
    assert container(annotations=forged).type == "sandbox"
