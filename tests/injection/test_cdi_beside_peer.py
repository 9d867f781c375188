"""Our CDI specs beside those of the program that we stand in for, on simulated nodes; PEER_CTK names its binary.

Each difference that is left here stands in docs/compatibility.md with its reason.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpulet.commands.cdi_generate import Options, generate_spec
from gpulet.sim import description, node

PEER = os.environ.get("PEER_CTK", "")
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not PEER, reason="PEER_CTK names no binary"),
]
# In a mount namespace: the tree's /sys and /proc/driver, where that program always looks at the machine's.
PLACED = (
    'mount --make-rprivate / && mount --bind "$0/sys" /sys && mount --bind "$0/proc/driver" /proc/driver && exec "$@"'
)
LAYOUTS = {"a100x8": ["gpu0: 1g.5gb x7", "gpu3: 3g.20gb x2"], "rtxpro6000x8": ["gpu1: 1g.24gb+gfx x2"]}
DISCRETE = [name for name in description.profiles() if name not in ("wsl", "tegra")]


def peers_spec(root: Path, *words: str) -> dict[str, Any]:
    flags = "--feature-flags=disable-nvsandboxutils"  # its library has no stand-in
    command = [PEER, "cdi", "generate", "--driver-root", str(root), flags, *words]
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", PLACED, str(root), *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    spec: dict[str, Any] = yaml.safe_load(done.stdout)
    return spec


def hook_items(hook: dict[str, Any], root: str) -> set[tuple[str, ...]]:
    """Links, folders and versions in a hook's arguments, the root before paths taken away."""
    words = [part for word in hook["args"][2:] for part in ([word] if "=" not in word else word.split("=", 1))]
    known = {"--link": "link", "--device-link": "link", "--folder": "folder", "--host-driver-version": "version"}
    pairs = itertools.pairwise(words)
    return {(known[one], two.replace(root, "")) for one, two in pairs if one in known}


def meaning(edits: dict[str, Any], root: str) -> set[tuple[Any, ...]]:
    found: set[tuple[Any, ...]] = {("env", item) for item in edits.get("env", ())}
    for item in edits.get("deviceNodes", ()):
        found.add(("node", item["path"], item.get("hostPath", item["path"]), item.get("permissions", "rwm"),
                   item.get("gid", 0)))  # fmt: skip
    for item in edits.get("mounts", ()):
        source = os.path.realpath(item["hostPath"])
        found.add(("mount", item["containerPath"], source, frozenset(item["options"])))
    found |= {("gid", item) for item in edits.get("additionalGids", ())}
    for hook in edits.get("hooks", ()):
        found |= hook_items(hook, root)
    return found


def compare(ours: dict[str, Any], theirs: dict[str, Any], root: str) -> tuple[set[Any], set[Any]]:
    """(what ours has alone, what theirs has alone), by device. Links beside device nodes count as everybody's: our one
    hook makes those whose node a container has.
    """

    def items(spec: dict[str, Any]) -> set[Any]:
        parts = {"": meaning(spec["containerEdits"], root)}
        parts |= {device["name"]: meaning(device["containerEdits"], root) for device in spec["devices"]}
        beside = {item for part in parts.values() for item in part if item[0] == "link" and "/by-path/" in item[1]}
        return {(name, *item) for name, part in parts.items() for item in part - beside} | {("", *i) for i in beside}

    return items(ours) - items(theirs), items(theirs) - items(ours)


def explained(item: tuple[Any, ...]) -> bool:
    own_version = item[1] == "link" and item[2].startswith("libnvidia-egl-")
    return own_version or item[1:3] == ("mount", "/usr/bin/nv-fabricmanager")


@pytest.mark.parametrize("profile", DISCRETE)
def test_the_same_meaning_on_each_profile(tmp_path: Path, profile: str) -> None:
    made = node.create(tmp_path / "n", profile, mig=LAYOUTS.get(profile, ()))
    ours, _facts = generate_spec(Options(root=str(made.root)))
    theirs = peers_spec(made.root)
    assert (ours["cdiVersion"], ours["kind"]) == (theirs["cdiVersion"], theirs["kind"])
    more, less = compare(ours, theirs, str(made.root))
    assert less == set()
    assert [item for item in more if not explained(item)] == []


def calls_of(spec: dict[str, Any], root: str) -> tuple[dict[str, list[list[str]]], set[tuple[str, ...]]]:
    """(a spec's hooks by device in their order, links apart; the links by device, the root before paths taken away)."""
    hooks, links = {}, set()
    parts = {"": spec, **{device["name"]: device for device in spec["devices"]}}
    for name, part in parts.items():
        found: list[list[str]] = []
        for hook in part["containerEdits"].get("hooks", ()):
            words = [word.replace(root, "") for word in hook["args"] if "::" not in word and word != "--link"]
            links |= {(name, "link", *word.replace(root, "").split("::")) for word in hook["args"] if "::" in word}
            if [hook["path"], *words] not in found:  # it writes several with links
                found.append([hook["path"], *words])
        hooks[name] = found
    return hooks, links


@pytest.mark.parametrize("program", ["nvidia-ctk", "nvidia-cdi-hook"])
@pytest.mark.parametrize("profile", ["h100x8", "rtxpro6000x8", "t4x1"])
def test_the_same_hooks_in_the_same_order(tmp_path: Path, profile: str, program: str) -> None:
    made = node.create(tmp_path / "n", profile, mig=LAYOUTS.get(profile, ()))
    (tmp_path / program).write_text("#!/bin/sh\n")  # a file there, or that program names its own choice
    (tmp_path / program).chmod(0o755)
    path, words = str(tmp_path / program), ["--ldconfig-path", "/opt/ldconfig"]
    spec, _facts = generate_spec(Options(root=str(made.root), hook_path=path, ldconfig="/opt/ldconfig"))
    ours, links = calls_of(spec, str(made.root))
    theirs, wanted = calls_of(peers_spec(made.root, "--nvidia-cdi-hook-path", path, *words), str(made.root))
    assert ours == theirs
    assert wanted - links == set()
    assert [item for item in links - wanted if not explained((item[0], *item[1:]))] == []


@pytest.mark.parametrize("mode", ["management", "imex"])
def test_the_same_meaning_in_other_modes(tmp_path: Path, mode: str) -> None:
    made = node.create(tmp_path / "n", "gb200x4")
    ours, _facts = generate_spec(Options(root=str(made.root), mode=mode))
    more, less = compare(ours, peers_spec(made.root, "--mode", mode), str(made.root))
    assert less == set()
    assert {item[2].rpartition("/")[2] for item in more} <= {"nvidia-drm_gbm.so", "libnvidia-vulkan-producer.so"}


def test_the_same_classes_of_coherent_gpus(tmp_path: Path) -> None:
    from gpulet.commands.cdi_generate import COHERENT, coherence_specs

    made = node.create(tmp_path / "n", "gb200x4")
    options = Options(root=str(made.root), flags=(COHERENT,))
    _spec, facts = generate_spec(options)
    (ours,) = coherence_specs(options, facts).values()
    output = tmp_path / "nvidia.yaml"
    subprocess.run(
        ["unshare", "-m", "bash", "-c", PLACED, str(made.root), PEER, "cdi", "generate", "--driver-root",
         str(made.root), f"--feature-flags=disable-nvsandboxutils,{COHERENT}", "--output", str(output)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    theirs = yaml.safe_load((tmp_path / "nvidia.coherent.yaml").read_text())
    assert (ours["kind"], [one["name"] for one in ours["devices"]]) == (
        theirs["kind"],
        [one["name"] for one in theirs["devices"]],
    )
    assert compare(ours, theirs, str(made.root))[1] == set()
