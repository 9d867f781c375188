"""Our CDI text, applied by a small reference engine, gives the container that applying the injection straight gives."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest

from gpulet.injection import build, cdi, oci
from gpulet.node import driver, nvml
from gpulet.request.model import Request
from gpulet.sim import node

CONFIG: dict[str, Any] = {
    "process": {"env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=1"], "user": {"uid": 1000, "gid": 1000}},
    "mounts": [{"destination": "/proc", "source": "proc"}, {"destination": "/usr/bin/nvidia-smi", "source": "/old"}],
    "linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}},
}


def engine(config: dict[str, Any], specs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What the CDI specification asks of an engine, in few lines and with the host looked at for what a node lacks."""
    out = copy.deepcopy(config)
    edits: list[dict[str, Any]] = []
    for spec in specs:
        for device in spec["devices"]:
            if f"{spec['kind']}={device['name']}" == name:
                edits += [spec["containerEdits"], device["containerEdits"]]
    assert edits
    linux = out.setdefault("linux", {})
    for edit in edits:
        for item in edit.get("env", ()):
            key = item.partition("=")[0]
            rest = [old for old in out["process"]["env"] if old.partition("=")[0] != key]
            out["process"]["env"] = [*rest, item]
        for item in edit.get("deviceNodes", ()):
            info = os.lstat(item.get("hostPath", item["path"]))
            major = item.get("major") or os.major(info.st_rdev)
            minor = item["minor"] if "major" in item else os.minor(info.st_rdev)
            made = {"path": item["path"], "type": item.get("type", "c"), "major": major, "minor": minor}
            made["fileMode"] = item.get("fileMode", info.st_mode & 0o777)
            made |= {"uid": item.get("uid", 1000), "gid": item.get("gid", 1000)}  # else the process's
            linux["devices"] = [old for old in linux.get("devices", ()) if old["path"] != item["path"]] + [made]
            rule = {"allow": True, "type": "c", "major": major, "minor": minor, "access": item["permissions"]}
            linux["resources"]["devices"].append(rule)
        for item in edit.get("mounts", ()):
            made = {"destination": item["containerPath"], "source": item["hostPath"], "options": item["options"]}
            out["mounts"] = [old for old in out["mounts"] if old["destination"] != item["containerPath"]] + [made]
        for item in edit.get("hooks", ()):
            out.setdefault("hooks", {}).setdefault(item["hookName"], []).append(item)
        out["process"]["user"].setdefault("additionalGids", []).extend(edit.get("additionalGids", ()))
    return out


def meaning(config: dict[str, Any]) -> dict[str, Any]:
    """The parts that count, without order."""

    def rows(items: list[dict[str, Any]]) -> set[str]:
        return {str(sorted((key, value) for key, value in item.items() if value != "")) for item in items}

    return {
        "env": set(config["process"]["env"]),
        "gids": set(config["process"]["user"].get("additionalGids", ())),
        "nodes": rows(config["linux"]["devices"]),
        "rules": rows(config["linux"]["resources"]["devices"]),
        "mounts": rows(config["mounts"]),
    }


@pytest.mark.root
@pytest.mark.parametrize("program", ["gpulet-cdi-hook", "nvidia-ctk"])
@pytest.mark.parametrize("name", ["2", "all", "1:0"])
def test_the_same_container_both_ways(tmp_path: Path, name: str, program: str) -> None:
    root = str(node.create(tmp_path / "n", "h100x8", gpus=3, mig=["gpu1: 3g.40gb x2"]).root)
    facts, files = nvml.facts(root), driver.find(root)
    spec = cdi.make_spec(facts, files, compat32=True, calls=cdi.HookCalls(f"/usr/bin/{program}"))
    by_engine = engine(CONFIG, [spec], f"nvidia.com/gpu={name}")
    request = Request("environment", (name,), capabilities=("all",))
    built = build.build(facts, files, request, mps=False)
    straight = oci.apply(CONFIG, built)
    assert meaning(by_engine) == meaning(straight)
    nodes = [device["path"] for device in by_engine["linux"]["devices"]]
    work, remaining = cdi.take_over(by_engine["hooks"], minors=built.rootfs.profile_minors, nodes=nodes)
    assert remaining == {}

    def links(part: build.RootfsWork) -> set[tuple[str, str]]:
        return {(link.target, link.path) for link in part.links}

    assert links(work) == links(built.rootfs)
    assert work.replace(links=()) == built.rootfs.replace(links=())
