"""The house's rules: who may import whom, what the launchers may load, how big a room may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "gpulet"

# room -> the rooms that it may import from; everything may import `ground`
GROUND = {"errors", "value", "codec", "goyaml", "linux", "mount_api", "version"}
LAYERS: dict[str, set[str]] = {
    "node": set(),
    "settings": {"node"},
    "request": {"node", "settings"},
    "injection": {"node", "settings", "request"},
    "plugin": {"node", "settings", "request", "injection"},
    "launch": {"node", "settings", "request", "injection"},
    "engines": {"node", "settings", "request", "injection", "launch"},
    "sim": {"node", "settings", "request", "injection", "plugin", "launch", "engines"},
    "commands": {"node", "settings", "request", "injection", "plugin", "launch", "engines", "sim"},
}

# The standard library's modules that a launcher may have loaded when its `main` is about to run. Each was weighed:
# what is not here costs milliseconds for every container. `python -IS` itself brings the first block; `os` brings the
# second, of which some Pythons have loaded a part by then.
INTERPRETER = set(
    subprocess.run(
        [sys.executable, "-IS", "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout.split()
)
OS = {
    "os",
    "os.path",
    "stat",
    "_stat",
    "posixpath",
    "genericpath",
    "_collections_abc",
    "abc",
    "_abc",
    "errno",
    "__future__",
}
ALLOWED = {
    "gpulet.launch.runtime": OS | {"_json", "time"},
    "gpulet.launch.hook": OS | {"_json", "time"},
    "gpulet.launch.container_cli": OS | {"_json", "time"},
    "gpulet.launch.cdi_hook": OS | {"_json", "time"},
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.stem.endswith(("_pb2", "_pb2_grpc")))


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The rooms that a module imports from, lazy imports too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gpulet":
            parts = node.module.split(".")[1:]
            yield from [parts[0]] if parts else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("gpulet."):
                    yield alias.name.split(".")[1]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(path)
    if here in GROUND:
        allowed = GROUND
    elif here == "__init__":
        allowed = set()
    else:
        allowed = GROUND | LAYERS[here] | {here}
    assert set(imported(path)) <= allowed


@pytest.mark.parametrize("module", ALLOWED)
def test_launchers_load_nothing_slow(module: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True).stdout
    foreign = {name for name in loaded.split() if not name.startswith("gpulet")} - INTERPRETER
    assert foreign <= ALLOWED[module]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_room_has_a_door_plate(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "a module says in its docstring what it is for"


def test_the_map_knows_every_module() -> None:
    """docs/architecture.md; the values that travel between rooms stand above its table."""
    text = (SOURCE.parent / "docs" / "architecture.md").read_text()
    known = re.findall(r"`(?:[a-z]+/)?([a-z0-9_*]+)(?:\.py)?`", text)
    missing = [path for path in modules() if not any(fnmatch(path.stem, name) for name in known)]
    assert [path for path in missing if path.stem not in ("__init__", "__main__")] == []


def test_the_checks_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from gpulet.commands import demo\nimport gpulet.plugin.main\nfrom gpulet import linux\n")
    assert set(imported(bad)) == {"commands", "plugin", "linux"}
