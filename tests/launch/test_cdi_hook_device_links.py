"""Links beside device nodes: our CDI hook makes those whose node the container has, and no other."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpulet.injection.cdi_hooks import hook_args, take_over
from gpulet.injection.model import RootfsWork, SymLink
from gpulet.launch import cdi_hook

LINKS = (
    SymLink("../card1", "/dev/dri/by-path/pci-0000:19:00.0-card"),
    SymLink("../card2", "/dev/dri/by-path/pci-0000:1a:00.0-card"),
    SymLink("/dev/dri/card1", "/dev/dri/by-path/absolute"),
)
ARGS = hook_args("gpulet-cdi-hook", RootfsWork(device_links=LINKS), profile=False)


@pytest.mark.root
def test_the_hook_looks_into_the_containers_dev(tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs"
    (rootfs / "dev/dri").mkdir(parents=True)
    (rootfs / "dev/dri/card1").touch()
    (tmp_path / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
    (tmp_path / "state.json").write_text(json.dumps({"bundle": str(tmp_path)}))
    assert cdi_hook.main([*ARGS[1:], "--container-spec", str(tmp_path / "state.json")]) == 0
    folder = rootfs / "dev/dri/by-path"
    assert {name: os.readlink(folder / name) for name in os.listdir(folder)} == {
        "pci-0000:19:00.0-card": "../card1",
        "absolute": "/dev/dri/card1",
    }


def test_a_runtime_that_takes_the_hook_over_goes_by_the_spec() -> None:
    hooks = {"createContainer": [{"path": "/usr/bin/gpulet-cdi-hook", "args": ARGS}]}
    work, remaining = take_over(hooks, nodes=["/dev/nvidia0", "/dev/dri/card1"])
    assert (work.links, remaining) == ((LINKS[0], LINKS[2]), {})
    assert take_over(hooks)[0].links == ()
