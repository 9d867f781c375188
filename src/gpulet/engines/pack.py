"""The pack: the modules of the programs in `launch/`, compiled, in one file that `engines/packed.py` imports from.

Layout: the magic number of the interpreter's bytecode (4 bytes); a marshalled pair, the code of engines/packed.py and
the index; then the modules' marshalled code, one after another. Offsets in the index count from the head's end.

What a running program has no use for is left out of the code: docstrings, annotations of functions, what only type
checkers read. So less is read, unmarshalled and run in every start.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib.util
import marshal
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType

import gpulet
from gpulet.engines import packed

NAME = ".gpulet-modules-"  # and what its content comes to: a launcher and its pack belong together
ROOMS = ("node", "request", "injection", "launch")  # and the modules that stand beside them
STANDARD = ("struct", "_struct", "_json", "_ctypes")  # the interpreter's own that the programs load


def write(folder: Path, standard: Mapping[str, str]) -> tuple[Path, int]:
    """Writes the pack into a folder, aside and renamed; gives its path and the head's length in bytes.

    standard: where the interpreter that will read the pack has its own modules, see `interpreters.standard`.
    """
    sources = {name: Path(path) for name, path in standard.items() if path.endswith(".py")} | _ours()
    trees, states = {}, {}
    for name, path in sources.items():
        states[name] = path.stat()  # before it is read: what changes meanwhile is noticed later
        trees[name] = lean(ast.parse(path.read_bytes(), str(path)))
    bodies: list[bytes] = []
    index: packed.Index = {}
    for name, path in sources.items():
        body = marshal.dumps(_compiled(trees[name], str(path)))
        found, offset = states[name], sum(map(len, bodies))
        package, needed = path.name == "__init__.py", tuple(_needed(name, trees[name], trees))
        index[name] = (offset, len(body), str(path), found.st_size, found.st_mtime_ns, package, needed)
        bodies.append(body)
    in_c = {name: path for name, path in standard.items() if path.endswith(".so")}
    index |= {name: (-1, 0, path, 0, 0, False, ()) for name, path in in_c.items()}
    finder = _compiled(lean(ast.parse(Path(packed.__file__).read_bytes())), packed.__file__)
    head = importlib.util.MAGIC_NUMBER + marshal.dumps((finder, index))
    data = head + b"".join(bodies)
    path = folder / f"{NAME}{hashlib.sha256(data).hexdigest()[:16]}"
    put(path, data, 0o644)
    return path, len(head)


def put(path: Path, data: bytes, mode: int) -> None:
    """Writes a file aside and renames it; a failure leaves nothing. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(data)
        aside.chmod(mode)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sweep(folder: Path, current: Path) -> None:
    """Takes earlier packs away. A launcher that reads one at this moment loads its modules from their sources."""
    for path in folder.glob(f"{NAME}*"):
        if path != current:
            path.unlink(missing_ok=True)


def _ours() -> dict[str, Path]:
    """Our modules by name."""
    package = Path(gpulet.__file__).resolve().parent
    found = {}
    for path in sorted([*package.glob("*.py"), *(path for room in ROOMS for path in (package / room).glob("*.py"))]):
        names = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def _compiled(tree: ast.Module, path: str) -> CodeType:
    flags = __future__.annotations.compiler_flag  # in place of the import that `lean` takes away
    code: CodeType = compile(tree, path, "exec", flags=flags, dont_inherit=True)
    return code


class _Lean(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        return None if node.module == "__future__" else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        for_checkers = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return (node.orelse or [ast.Pass()]) if for_checkers else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.returns = None
        extra = [one for one in (node.args.vararg, node.args.kwarg) if one]
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, *extra):
            argument.annotation = None
        node.body = _without_text(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)  # a class keeps its annotations: they are the fields of a Value
        node.body = _without_text(node)
        return node


def _without_text(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> list[ast.stmt]:
    if ast.get_docstring(node, clean=False) is None:
        return node.body
    return node.body[1:] or [ast.Pass()]


def lean(tree: ast.Module) -> ast.Module:
    """A module without what only readers and type checkers need."""
    tree.body = _without_text(tree)
    made: ast.Module = _Lean().visit(tree)
    return ast.fix_missing_locations(made)


def _needed(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> list[str]:
    """The packed modules that a module imports as it is loaded, in order, each after the packages it lies in."""
    found = [name.rpartition(".")[0]]
    for node in _at_once(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [one for one in dict.fromkeys(found) if one in known and one != name]


def _at_once(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run when a module is loaded, those within `try` and `if` too."""
    todo = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.If | ast.Try):
            todo += reversed(node.body)
