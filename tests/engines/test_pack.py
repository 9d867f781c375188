"""The pack speeds a launcher up; whatever is wrong with it, the program runs from its sources."""

from __future__ import annotations

import ast
import marshal
import subprocess
from pathlib import Path

import pytest

from gpulet.engines import interpreters, pack, packed
from gpulet.engines.launchers import launcher_text, write_launchers

WHERE = "import gpulet.launch.argp as m\nprint(type(m.__spec__.loader).__name__)\n"


def said_within(tmp_path: Path, modules: tuple[Path, int], code: str) -> str:
    """What code says in a process that starts as a launcher does."""
    interpreter, _ = interpreters.best()
    text = launcher_text("gpulet.launch.runtime", interpreter, modules)
    program = tmp_path / "program"
    program.write_text(text[: text.index("try: from gpulet.launch.start")] + code)
    program.chmod(0o755)
    result = subprocess.run([program], capture_output=True, text=True, check=True)
    assert not result.stderr
    return result.stdout.strip()


def written(folder: Path) -> tuple[Path, int]:
    return pack.write(folder, interpreters.best()[1])


def loader_of(tmp_path: Path, modules: tuple[Path, int]) -> str:
    """What loaded a module of ours."""
    return said_within(tmp_path, modules, WHERE)


def test_modules_come_out_of_the_pack(tmp_path: Path) -> None:
    assert loader_of(tmp_path, written(tmp_path)) == "Pack"


def test_every_module_of_the_pack_is_what_its_source_makes(tmp_path: Path) -> None:
    """Beside each other: the names that each module has when it is loaded from the pack, and from its source."""
    names = sorted(name for name in pack._ours() if not name.endswith("nvml_child"))
    only_in_one = {"annotations", "__annotations__", "__cached__", "__builtins__", "__doc__"}
    code = (
        f"import importlib\nfor name in {names}:\n"
        f"    print(name, sorted(set(vars(importlib.import_module(name))) - {only_in_one}))\n"
    )
    modules = written(tmp_path)
    lean = said_within(tmp_path, modules, code)
    modules[0].unlink()
    assert lean == said_within(tmp_path, modules, code)
    assert "gpulet.launch.runtime" in lean


def test_a_changed_module_among_the_needed_is_loaded_from_its_source(tmp_path: Path) -> None:
    """As after an upgrade in place: the pack is older than one of the modules that another needs."""
    modules = written(tmp_path)
    data = modules[0].read_bytes()
    finder, index = marshal.loads(data[4 : modules[1]])
    entry = index["gpulet.request.devices"]
    index["gpulet.request.devices"] = (*entry[:3], entry[3] + 1, *entry[4:])
    head = data[:4] + marshal.dumps((finder, index))
    modules[0].write_bytes(head + data[modules[1] :])
    code = (
        "import gpulet.launch.plan, gpulet.request.devices as d, gpulet.request.policy as p, gpulet.request as r\n"
        "print(type(d.__spec__.loader).__name__, p.__spec__, r.devices is d)\n"
    )
    assert said_within(tmp_path, (modules[0], len(head)), code) == "SourceFileLoader None True"


def test_what_only_readers_need_is_left_out() -> None:
    source = """
'''Text.'''
from __future__ import annotations
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any
else:
    Any = 1
class Thing(Base):
    '''Text.'''
    name: str = ""
    def act(self, a: int, *b: str, c: Any = None, **d: bytes) -> Any:
        '''Text.'''
"""
    lean = ast.unparse(pack.lean(ast.parse(source)))
    assert lean == (
        "TYPE_CHECKING = False\nAny = 1\n\nclass Thing(Base):\n    name: str = ''\n\n"
        "    def act(self, a, *b, c=None, **d):\n        pass"
    )


def test_environ_behaves_as_ever(tmp_path: Path) -> None:
    """`os` is imported without the abstract classes: what programs do with os.environ goes on as it does with them."""
    code = (
        "import os, sys\nprint('_collections_abc' in sys.modules)\n"
        "os.environ.clear()\nos.environ['A'] = '1'\nos.environ.update(B='2')\n"
        "print('A' in os.environ, 'C' in os.environ, os.environ.get('C', 3), os.environ.pop('B'), len(os.environ))\n"
        "print(list(os.environ.items()), dict(os.environ), os.environ == {'A': '1'}, os.environ.copy())\n"
        "print(os.environ.setdefault('D', '4'), sorted(os.environ), sorted(os.environ.keys()), os.getenv('A'))\n"
        "from pathlib import Path\nimport json, subprocess, tempfile\n"
        "print(isinstance(Path('/'), os.PathLike), isinstance('', os.PathLike), os.fspath(Path('/x')))\n"
        "print(subprocess.run(['/bin/sh', '-c', 'echo $A'], capture_output=True, text=True).stdout)\n"
    )
    modules = written(tmp_path)
    with_pack = said_within(tmp_path, modules, code).splitlines()
    modules[0].unlink()
    without = said_within(tmp_path, modules, code).splitlines()
    assert (with_pack[0], without[0]) == ("False", "True")
    assert with_pack[1:] == without[1:] and len(without) == 6


def bent(path: Path, length: int) -> None:
    data = path.read_bytes()
    path.write_bytes(b"\x00\x00\x00\x00" + data[4:])


def torn(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[: length // 2])


def empty(path: Path, length: int) -> None:
    path.write_bytes(b"")


def gone(path: Path, length: int) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [bent, torn, empty, gone])
def test_without_a_whole_pack_the_sources_are_loaded(tmp_path: Path, harm: object) -> None:
    path, length = written(tmp_path)
    harm(path, length)  # type: ignore[operator]
    assert loader_of(tmp_path, (path, length)) == "SourceFileLoader"


def zeroed(path: Path, length: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:length] + bytes(len(data) - length))


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def foreign(path: Path, length: int) -> None:
    """Every body a whole object, and none of them code."""
    data = path.read_bytes()
    path.write_bytes(data[:length] + b"N" * (len(data) - length))


@pytest.mark.parametrize("harm", [zeroed, cut, foreign])
def test_a_pack_whose_modules_are_damaged_harms_nobody(tmp_path: Path, harm: object) -> None:
    path, length = written(tmp_path)
    harm(path, length)  # type: ignore[operator]
    code = "from gpulet.launch import plan, runtime, carry\nprint(plan.make.__doc__ is not None, carry.__name__)\n"
    assert said_within(tmp_path, (path, length), code) == "True gpulet.launch.carry"


def test_a_launcher_has_the_pack_that_it_was_written_with(tmp_path: Path) -> None:
    """Whatever is installed over it, and even if that was killed half-way."""
    first = write_launchers(tmp_path)["gpulet-container-cli"].read_text()
    (old,) = tmp_path.glob(f"{pack.NAME}*")
    kept = old.read_bytes()
    newer = old.with_name(f"{pack.NAME}0123")
    newer.write_bytes(b"of another version")
    assert str(old) in first and newer.name not in first
    write_launchers(tmp_path)
    assert list(tmp_path.glob(f"{pack.NAME}*")) == [old] and old.read_bytes() == kept
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == [old.name]


@pytest.mark.parametrize("entry", [(0, 1), (1, 0)])
def test_a_source_that_changed_since_is_loaded_itself(tmp_path: Path, entry: tuple[int, int]) -> None:
    """Size and time of change both count, as for Python's own compiled files."""
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    found = source.stat()
    finder = packed.Pack(-1, 0, {"m": (0, 0, str(source), found.st_size, found.st_mtime_ns, False, ())})
    assert finder.find_spec("m") is not None and finder.find_spec("other") is None
    stale = (0, 0, str(source), found.st_size + entry[0], found.st_mtime_ns + entry[1], False, ())
    assert packed.Pack(-1, 0, {"m": stale}).find_spec("m") is None
    source.unlink()
    assert finder.find_spec("m") is None


def test_programs_say_the_same_with_and_without(tmp_path: Path) -> None:
    with_pack = write_launchers(tmp_path / "with")
    without = write_launchers(tmp_path / "without")
    next((tmp_path / "without").glob(f"{pack.NAME}*")).unlink()
    for arguments in (["--version"], ["list", "--nonsense"], ["--root=/nonexistent", "info"]):
        said = [
            subprocess.run([launchers["gpulet-container-cli"], *arguments], capture_output=True, text=True, check=False)
            for launchers in (with_pack, without)
        ]
        assert (said[0].returncode, said[0].stdout, said[0].stderr) == (
            said[1].returncode,
            said[1].stdout,
            said[1].stderr,
        )
