"""Hooks in CDI specifications: one for our program, NVIDIA's single ones for theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulet.injection import cdi, cdi_calls
from gpulet.injection.cdi_hooks import HOOKS, less
from gpulet.injection.model import RootfsWork, SymLink
from gpulet.launch import cdi_hook
from gpulet.node import driver, procfs
from gpulet.sim import node

LIB = "/usr/lib/x86_64-linux-gnu"
LINKS = (SymLink("libcuda.so.1", f"{LIB}/libcuda.so"), SymLink("libcuda.so.570.86.15", f"{LIB}/libcuda.so.1"))
WORK = RootfsWork(LINKS, (LIB, f"{LIB}/vdpau"), "570.86.15", freeze_device_nodes=True)
SINGLE = [
    ["create-symlinks", "--link", f"libcuda.so.1::{LIB}/libcuda.so", "--link",
     f"libcuda.so.570.86.15::{LIB}/libcuda.so.1"],
    ["enable-cuda-compat", "--host-driver-version=570.86.15"],
    ["update-ldcache", "--folder", LIB, "--folder", f"{LIB}/vdpau"],
    ["disable-device-node-modification"],
    ["update-application-profile"],
]  # fmt: skip


def arguments(calls: cdi.HookCalls, work: RootfsWork = WORK, *, profile: bool = True) -> list[list[str]]:
    found = calls.records(work, profile=profile)
    assert all(hook["hookName"] == "createContainer" and hook["path"] == calls.path and hook["env"] for hook in found)
    return [hook["args"] for hook in found]


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("/usr/bin/nvidia-ctk", ["nvidia-ctk", "hook"]),
        ("/usr/local/nvidia/toolkit/nvidia-ctk.real", ["nvidia-ctk.real", "hook"]),
        ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", ["nvidia-cdi-hook"]),
        ("/usr/local/nvidia/toolkit/nvidia-cdi-hook.real", ["nvidia-cdi-hook.real"]),
        ("/opt/their-hook", ["their-hook"]),  # whoever it is: these names are known more widely than ours
    ],
)
def test_nvidias_programs_get_the_hooks_that_they_know(path: str, first: list[str]) -> None:
    assert arguments(cdi.HookCalls(path)) == [[*first, *words] for words in SINGLE]


@pytest.mark.parametrize("name", ["gpulet-cdi-hook", "gpulet-cdi-hook.real"])
def test_ours_does_all_in_one(name: str) -> None:
    (words,) = arguments(cdi.HookCalls(f"/opt/{name}"))
    assert words[:2] == [name, "prepare"]
    assert arguments(cdi.HookCalls(f"/opt/{name}"), RootfsWork(), profile=False) == []


def test_a_tegras_versions_and_another_ldconfig() -> None:
    tegra = RootfsWork((), (LIB,), host_cuda="12.6", compat_folder="/usr/local/cuda/compat_orin")
    calls = cdi.HookCalls("/usr/bin/nvidia-cdi-hook", ldconfig="/opt/ldconfig")
    assert arguments(calls, tegra, profile=False) == [
        ["nvidia-cdi-hook", "enable-cuda-compat", "--host-cuda-version=12.6",
         "--cuda-compat-container-root=/usr/local/cuda/compat_orin"],
        ["nvidia-cdi-hook", "update-ldcache", "--ldconfig-path", "/opt/ldconfig", "--folder", LIB],
    ]  # fmt: skip


WORKS = st.builds(
    RootfsWork,
    st.lists(st.sampled_from(LINKS), unique=True).map(tuple),
    st.lists(st.sampled_from([LIB, "/usr/lib64"]), unique=True).map(tuple),
    st.sampled_from(["", "570.86.15"]),
    st.sampled_from(["", "12.8"]),
    freeze_device_nodes=st.booleans(),
)


@given(
    WORKS,
    st.booleans(),
    st.sets(st.sampled_from([*HOOKS, "all"])),
    st.sampled_from(["/usr/bin/nvidia-ctk", "/usr/bin/nvidia-cdi-hook", "/usr/bin/gpulet-cdi-hook"]),
)
def test_our_runtime_takes_over_the_same_from_each_and_our_program_knows_it(
    work: RootfsWork, profile: bool, without: set[str], path: str
) -> None:
    hooks = cdi.HookCalls(path, tuple(without)).records(work, profile=profile)
    taken, remaining = cdi.take_over({"createContainer": hooks}, minors=(3,))
    kept = profile and not {"all", "update-application-profile"} & without
    assert remaining == {}
    assert taken == less(work, without).replace(profile_minors=(3,) if kept else ())
    for hook in hooks:
        words = [word for word in hook["args"][1:] if word != "hook"]
        cdi_hook.work_of(cdi_hook.parse(words[0], words[1:]))


@pytest.mark.root
def test_links_beside_nodes_go_with_their_device_in_single_hooks(tmp_path: Path) -> None:
    """NVIDIA's program would make those of GPUs that the container doesn't have, from a common hook."""
    root = str(node.create(tmp_path / "n", "rtxpro6000x8", gpus=2).root)
    spec = cdi.make_spec(
        procfs.facts(root), driver.find(root), names=["index"], calls=cdi.HookCalls("/usr/bin/nvidia-ctk")
    )
    common = [hook["args"][2] for hook in spec["containerEdits"]["hooks"]]
    assert common == [words[0] for words in SINGLE]
    assert "by-path" not in str(spec["containerEdits"])
    of = {device["name"]: device["containerEdits"]["hooks"] for device in spec["devices"]}
    for name, count in (("0", 2), ("1", 2), ("all", 4)):
        (hook,) = of[name]
        assert hook["args"][:3] == ["nvidia-ctk", "hook", "create-symlinks"]
        assert sum("::/dev/dri/by-path/" in word for word in hook["args"]) == count
    assert of["0"] != of["1"]


def test_a_link_to_ours_is_named_as_ours(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store/program").touch()
    ours, link, far = (tmp_path / "bin" / name for name in ("gpulet-cdi-hook", "nvidia-cdi-hook", "nvidia-ctk"))
    ours.symlink_to("../store/program")  # a link itself: its name is what counts
    link.symlink_to("gpulet-cdi-hook")
    far.symlink_to(tmp_path / "bin/nvidia-cdi-hook")
    (tmp_path / "by").symlink_to("bin")
    for path in (ours, link, far, tmp_path / "by/nvidia-cdi-hook"):
        assert cdi_calls.as_ours(str(path)) == str(ours)
    other, loop = tmp_path / "other", tmp_path / "loop"
    other.symlink_to("store/program")
    loop.symlink_to("loop")
    for path in (str(other), str(loop), str(tmp_path / "absent/nvidia-ctk"), "nvidia-ctk", ""):
        assert cdi_calls.as_ours(path) == path
