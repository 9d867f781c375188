"""Whatever stands in a config.json: it is taken, or refused in one clear line that leaves it as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulet.errors import BundleError, GpuletError
from gpulet.injection import cdi
from gpulet.launch import runtime
from gpulet.launch.call import Call
from gpulet.settings import Settings
from support import driver_tree
from support.containers import UID, config, pod

V = "NVIDIA_VISIBLE_DEVICES"
HOOK = {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "create-symlinks", "--link", "a::/usr/lib/b"]}
OLD_HOOK = {"path": "/x/gpulet-hook", "args": ["gpulet-hook", "prestart"], "env": ["GPULET_VISIBLE_DEVICES=0"]}
GPU = {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 438, "uid": 0, "gid": 0}
MOUNT = {"destination": "/usr/lib/libcuda.so.1", "source": "/nowhere/libcuda.so.1", "options": ["ro", "rbind"]}
DEV = {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]}


def docker() -> dict[str, Any]:
    """As dockerd writes it: no annotations, masked paths, a prestart hook of its own."""
    made = config(f"{V}=0")
    made["hooks"] = {"prestart": [{"path": "/proc/7/exe", "args": ["libnetwork-setkey", "-exec-root=/run", "x"]}]}
    made["linux"] |= {"maskedPaths": ["/proc/kcore"], "mountLabel": ""}
    made["mounts"].append(DEV)
    return made


def containerd() -> dict[str, Any]:
    made = config(f"{V}=all", "NVIDIA_DRIVER_CAPABILITIES=all", annotations=pod())
    made["process"]["user"] = {"uid": 1000, "gid": 1000, "additionalGids": [10]}
    made["mounts"].append(DEV)
    return made


def crio() -> dict[str, Any]:
    """With a CDI annotation, and with devices that CRI-O itself put in from a specification."""
    notes = {"io.kubernetes.pod.uid": UID, "io.kubernetes.container.name": "main", "cdi.k8s.io/a": "nvidia.com/gpu=0"}
    made = config(f"{V}=void", annotations=notes, cgroup=f"kubepods-pod{UID.replace('-', '_')}.slice:crio:x")
    made["hooks"] = {"createContainer": [HOOK]}
    made["linux"] |= {"devices": [GPU], "netDevices": {"eth0": {"name": "eth1"}}, "intelRdt": {"closID": "x"}}
    made["mounts"].append(MOUNT)
    return made


def legacy_image() -> dict[str, Any]:
    made = config("CUDA_VERSION=11.0.3", "NVIDIA_REQUIRE_JETPACK=x", "NVIDIA_GDS=enabled", mounts=("0", "imex/0"))
    return made | {"hooks": {"prestart": [OLD_HOOK]}}


def podman() -> dict[str, Any]:
    made = config(f"{V}=1,0", "NVIDIA_REQUIRE_CUDA=cuda>=11.0 brand=tesla,driver>=450", privileged=True)
    made["linux"] |= {"namespaces": [{"type": "user"}], "gidMappings": [{"containerID": 0, "hostID": 40, "size": 9}]}
    return made | {"annotations": {"io.podman.annotations.userns": ""}, "hostname": "x"}


SHAPES = (docker, containerd, crio, legacy_image, podman)
TEXTS = (
    "",
    "\0",
    "a\0b",
    "\ud800",
    "²",
    "/dev/nvidia²",
    "=",
    "A=\0",
    f"{V}=\0",
    f"{V}=\udcff",
    "/dev/nvidia" + "9" * 5000,
)
TEXTS += (f"{V}=0:{'9' * 5000}", "NVIDIA_REQUIRE_CUDA=cuda>=" + "9" * 5000, "CUDA_VERSION=" + "9" * 5000, "-", "/etc/x")
TEXTS += ("NVIDIA_IMEX_CHANNELS=" + "9" * 5000, f"{V}=nvidia.com/gpu=0", "A" * 70_000)
ODD = st.sampled_from(
    (None, True, 0, -1, 5, 1 << 70, 1.5, float("nan"), float("inf"), [], {}, [None], [5], [[]], {"a": 5}, [{}], *TEXTS)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(value: Any, path: tuple[Any, ...], odd: Any) -> None:
    """Puts `odd` at a path, or beside what is there where that is a list's last item."""
    for key in path[:-1]:
        value = value[key]
    if isinstance(value, list) and path[-1] == len(value) - 1:
        value.append(odd)
    else:
        value[path[-1]] = odd


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    driver_tree.create(folder / "root")
    for name in ("etc", "usr/lib", "dev", "proc"):
        (folder / "bundle" / "rootfs" / name).mkdir(parents=True)
    return folder


def settings_of(tree: Path, mode: str, grants: str) -> Settings:
    return Settings(
        mode=mode, policy_grants=grants, cli_root=str(tree / "root"), state_dir=str(tree / "state"),
        cdi_spec_dirs=(str(tree / "cdi"),), policy_checkpoint=str(tree / "none"), hook_path="/bin/true",
        visible_devices_envvars=(V, "CUDA_VISIBLE_DEVICES"), accept_volume_mounts=True,
    )  # fmt: skip


def outcome(tree: Path, content: Any, with_settings: Settings) -> GpuletError | None:
    """Prepares the bundle; the error, after which config.json must be as it was."""
    path = tree / "bundle" / "config.json"
    path.write_text(json.dumps(content))
    before = path.read_bytes()
    try:
        runtime.create(Call("create", str(tree / "bundle")), with_settings)
    except GpuletError as error:
        assert path.read_bytes() == before
        assert "\n" not in str(error)
        str(error).encode(errors="backslashreplace")
        return error
    finally:
        assert [item.name for item in path.parent.iterdir() if item.name.startswith("config.json.")] == []
    return None


@given(st.sampled_from(SHAPES), st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_part_may_be_anything(tree: Path, shape: Any, data: st.DataObject) -> None:
    content = copy.deepcopy(shape())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(sorted(places(content), key=repr)))
        put(content, path, copy.deepcopy(data.draw(ODD)))
    mode = data.draw(st.sampled_from(("auto", "jit-cdi", "cdi", "legacy")))
    outcome(tree, content, settings_of(tree, mode, data.draw(st.sampled_from(("env", "kubelet")))))


@pytest.mark.parametrize(
    ("path", "odd", "says"),
    [
        (("root", "path"), "a\0b", r"config\.json: root\.path: 'a\\x00b' \(wanted text without NUL"),
        (("process", "env"), [5], r"process\.env: 5 \(wanted text"),
        (("process", "env"), [f"{V}=0", "A=\0"], r"process\.env: 'A=\\x00'"),
        (("process", "user"), {"uid": "0"}, "uid: '0' .wanted a JSON number"),
        (("mounts",), [{"destination": "/a\0"}], "mounts: destination"),
        (("mounts",), [{"destination": "/a", "options": 5}], "options: 5 .wanted a JSON array"),
        (("mounts",), [{"destination": "/a", "options": [["bind"]]}], r"mounts: options: \['bind'\] .wanted text"),
        (("hooks",), {"createContainer": [{"path": "/x", "args": [None]}]}, "createContainer: args: None"),
        (("hooks",), {"prestart": [{"path": "/x/gpulet-hook", "env": [5]}]}, "prestart: env: 5"),
        (("linux", "netDevices"), [], "netDevices"),
        (("linux", "gidMappings"), {"hostID": 1}, "gidMappings"),
        (("linux", "gidMappings"), [[0, 0, 1]], "gidMappings: .*wanted a list of objects"),
        (("linux", "gidMappings"), [{"hostID": "0"}], "hostID: '0' .wanted a JSON number"),
        (("linux", "namespaces"), ["user"], "namespaces: .*wanted a list of objects"),
        (("x",), float("nan"), "what JSON can hold"),
    ],
)
def test_it_is_named(tree: Path, path: tuple[str, ...], odd: Any, says: str) -> None:
    content = config(f"{V}=0")
    put(content, path, odd)
    error = outcome(tree, content, settings_of(tree, "auto", "env"))
    assert isinstance(error, BundleError)
    with pytest.raises(BundleError, match=says):
        raise error


SPEC = {
    "cdiVersion": "0.7.0",
    "kind": "nvidia.com/gpu",
    "annotations": {"a": "b"},
    "devices": [
        {
            "name": "0",
            "containerEdits": {
                "deviceNodes": [{**GPU, "hostPath": "/dev/null", "major": 1, "minor": 3, "permissions": "rw"}],
                "additionalGids": [44],
                "intelRdt": {"closID": "x", "l3CacheSchema": "L3:0=ff"},
            },
        }
    ],
    "containerEdits": {
        "env": ["A=b"],
        "hooks": [{**HOOK, "hookName": "createContainer", "env": ["A=b"], "timeout": 1}],
        "mounts": [{"hostPath": "/etc/hostname", "containerPath": "/etc/x", "options": ["ro"], "type": "bind"}],
    },
}


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_part_of_a_cdi_specification_may_be_anything(tree: Path, data: st.DataObject) -> None:
    spec = copy.deepcopy(SPEC)
    for _ in range(data.draw(st.integers(1, 2))):
        put(spec, data.draw(st.sampled_from(sorted(places(spec), key=repr))), copy.deepcopy(data.draw(ODD)))
    form = data.draw(st.sampled_from(("json", "yaml")))
    (tree / "cdi").mkdir(exist_ok=True)
    for old in (tree / "cdi").iterdir():
        old.unlink()
    (tree / "cdi" / f"a.{form}").write_text(json.dumps(spec))
    registry = cdi.Registry([str(tree / "cdi")])
    assert len(registry.specs) + len(registry.errors) == 1
    outcome(tree, config(f"{V}=nvidia.com/gpu=0"), settings_of(tree, "auto", "env"))


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe", b"a: [", b"? [1, 2]\n: 3", b"a: 2001-99-99", b"a: !!int _", b"[" * 5000]
)
def test_any_text_may_stand_in_a_cdi_specification(tree: Path, text: bytes) -> None:
    folder = tree / "texts"
    folder.mkdir(exist_ok=True)
    (folder / "a.yaml").write_bytes(text)
    assert list(cdi.Registry([str(folder)]).errors) == [str(folder / "a.yaml")]
