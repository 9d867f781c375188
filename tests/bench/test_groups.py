"""Every group really runs, once and small, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpulet.sim.cgroups import hierarchies

pytestmark = [
    pytest.mark.root,
    pytest.mark.e2e,
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes and containers need root"),
    pytest.mark.skipif(shutil.which("runc") is None, reason="runc is not installed"),
]
TOP = Path(__file__).parents[2]
SMALL = """
import sys
from bench import __main__, create, engine, prefer, rpc, throughput
from bench.contenders import BARE, OURS
throughput.contenders = lambda peers: [BARE, OURS[0]]
create.contenders = lambda peers: [BARE, OURS[0], next(one for one in OURS if one.mode == "cdi")]
engine.contenders = lambda peers: [BARE, engine.GOAL]
prefer.NUMBERS, rpc.STARTS, rpc.REPLICAS, throughput.BATCH = (4,), 1, (1,), 2
sys.exit(__main__.main([*sys.argv[1:], "--rounds", "1", "--json"]))
"""


def ran(folder: Path, *groups: str) -> dict[str, list[dict[str, object]]]:
    """The rows of each group, run in a process of its own with its temporary files in `folder`."""
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SMALL, *groups], cwd=TOP, env=environ, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    return {table["group"]: table["rows"] for table in json.loads(done.stdout)}


def leftovers(folder: Path) -> list[str]:
    groups = [str(path) for mount, _ in hierarchies() for path in mount.glob("gpulet-bench-*")]
    alive = {path.name for path in Path("/proc").iterdir() if path.name.isdigit()}
    return [*map(str, folder.iterdir()), *(name for name in groups if name.rpartition("-")[2] not in alive)]


@pytest.mark.skipif(shutil.which("containerd") is None, reason="containerd is not installed")
def test_a_real_engine(short: Path) -> None:
    rows = ran(short, "engine")["engine"]
    assert [(row["runtime"], row["capabilities"]) for row in rows] == [
        ("bare", ""), ("gpulet", "compute,utility"), ("gpulet", "no GPU"),
    ]  # fmt: skip
    assert leftovers(short) == []


def test_containers(short: Path) -> None:
    rows = ran(short, "create", "throughput", "passthrough", "cli")
    assert [row["mode"] for row in rows["create"]] == ["", "jit-cdi", "cdi"]
    assert {(row["runtime"], row["at a time"]) for row in rows["throughput"]} == {
        (name, width) for name in ("bare", "gpulet") for width in (1, 8)
    }
    assert {(row["runtime"], row["command"]) for row in rows["passthrough"]} == {
        (name, command) for name in ("bare", "gpulet") for command in ("state", "kill", "delete")
    }
    assert [row["what"] for row in rows["cli"]] == ["info", "list", "configure"] * 2 + ["hook, no GPU"]
    assert leftovers(short) == []


def test_the_plugin(short: Path) -> None:
    rows = ran(short, "prefer", "rpc", "health")
    assert [(row["GPUs"], row["size"]) for row in rows["prefer"]] == [(4, size) for size in (1, 2, 3, 4)]
    assert all(row["agree"] == f"{row['machines']} of {row['machines']}" for row in rows["prefer"])
    assert {"Allocate 2", "GetPreferredAllocation 2", "start to registration"} <= {row["what"] for row in rows["rpc"]}
    assert [(row["devices"], row["told of"]) for row in rows["health"]] == [(8, "1 of 1"), (8000, "1000 of 1000")]
    assert leftovers(short) == []


def test_a_wrong_word_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "speed"], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown group: speed" in done.stderr
