"""A `create` that is killed at any moment: the next one on the same bundle does the same, and leaves nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from support.containers import config
from support.machine import Machine

V = "NVIDIA_VISIBLE_DEVICES"


def leftovers(machine: Machine) -> list[str]:
    names = [path.name for path in (machine.bundle / "rootfs").rglob("*")] + os.listdir(machine.bundle)
    return [name for name in names if ".gpulet" in name]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.configure(rest=f"[gpulet]\nstate-dir = '{tmp_path}/run'\n")
    wanted = machine.create(config(f"{V}=1"))
    began = time.perf_counter()
    machine.create({}, again=True)
    whole = time.perf_counter() - began
    for step in range(16):
        path = machine.make(config(f"{V}=1"))
        before = path.read_bytes()
        (machine.bundle / "rootfs/etc/ld.so.cache").write_bytes(b"another")  # so that it has to be written again
        one = subprocess.Popen(
            [f"{tmp_path}/bin/gpulet-runtime", "create", "--bundle", str(machine.bundle), "x"],
            env={"PATH": os.environ["PATH"], "GPULET_CONFIG": str(machine.config_file)},
        )
        time.sleep(whole * step / 12)
        one.kill()
        one.wait()
        assert path.read_bytes() == before or json.loads(path.read_text()) == wanted, "never by half"
        assert machine.create({}, again=True) == wanted
        assert leftovers(machine) == []


@pytest.mark.parametrize("name", ["write", "rename"])
def test_killed_between_two_system_calls(tmp_path: Path, name: str) -> None:
    """What is there when it ended just before something took its place."""
    machine = Machine(tmp_path)
    wanted = machine.create(config(f"{V}=1"))
    machine.make(config(f"{V}=1"))
    cache = machine.bundle / "rootfs/etc/ld.so.cache"
    cache.write_bytes(b"another")
    gone = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True).stdout.strip()
    (machine.bundle / f"config.json.gpulet.{gone}").write_text("{" if name == "write" else "{}")
    (cache.parent / ".gpulet-new").write_bytes(b"" if name == "write" else cache.read_bytes())
    assert len(leftovers(machine)) == 2
    assert machine.create({}, again=True) == wanted
    assert leftovers(machine) == []
