"""The CDI spec of each simulated profile, against a file a person can read: one line an item.

GPULET_UPDATE_GOLDEN=1 writes the files anew; read the difference before committing it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulet.commands.cdi_generate import Options, generate_spec
from gpulet.sim import description, node

GOLDEN = Path(__file__).parent / "golden"
LAYOUTS = {"a100x8": ["gpu0: 1g.5gb x7", "gpu1: 3g.20gb x2"]}  # one profile shows MIG


def lines_of(edits: dict[str, Any], root: str) -> Iterator[str]:
    """containerEdits, one line an item, the root as {root}."""

    def short(text: str) -> str:
        return text.replace(root, "{root}")

    yield from (f"env {item}" for item in edits.get("env", ()))
    for item in edits.get("deviceNodes", ()):
        number = f" {item['major']}:{item['minor']}" if "major" in item else ""
        yield short(f"node {item['path']} from {item.get('hostPath', item['path'])}{number}")
    for item in edits.get("hooks", ()):
        words = iter(item["args"][2:])
        for word in words:
            valued = word in ("--link", "--device-link", "--folder", "--host-driver-version")
            yield short(f"hook {word} {next(words)}" if valued else f"hook {word}")
    for item in edits.get("mounts", ()):
        kind = "ro" if "ro" in item["options"] else "rw"
        yield short(f"mount {kind} {item['containerPath']} from {item['hostPath']}")
    yield from (f"gid {item}" for item in edits.get("additionalGids", ()))


def text_of(spec: dict[str, Any], root: str) -> str:
    lines = [f"{spec['kind']} {spec['cdiVersion']}", *(f"  {line}" for line in lines_of(spec["containerEdits"], root))]
    for device in spec["devices"]:
        lines += [f"device {device['name']}", *(f"  {line}" for line in lines_of(device["containerEdits"], root))]
    return "\n".join(lines) + "\n"


@pytest.mark.root
@pytest.mark.parametrize("profile", description.profiles())
def test_the_spec_of_each_profile(tmp_path: Path, profile: str) -> None:
    made = node.create(tmp_path / "n", profile, mig=LAYOUTS.get(profile, ()))
    spec, _facts = generate_spec(Options(root=str(made.root)))
    golden = GOLDEN / f"{profile}.txt"
    if os.environ.get("GPULET_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(text_of(spec, str(made.root)))
    assert text_of(spec, str(made.root)) == golden.read_text()
