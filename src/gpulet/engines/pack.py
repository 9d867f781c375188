"""The pack: the modules of the programs in `launch/`, compiled, in one file that `engines/packed.py` imports from.

Layout: the magic number of the interpreter's bytecode (4 bytes); a marshalled pair, the code of engines/packed.py and
the index; then the modules' marshalled code, one after another. Offsets in the index count from the head's end.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

import gpulet
from gpulet.engines import packed

NAME = ".gpulet-modules"
ROOMS = ("node", "request", "injection", "launch")  # and the modules that stand beside them


def write(folder: Path) -> tuple[Path, int]:
    """Writes the pack into a folder, aside and renamed; gives its path and the head's length in bytes."""
    package = Path(gpulet.__file__).resolve().parent
    sources = sorted([*package.glob("*.py"), *(path for room in ROOMS for path in (package / room).glob("*.py"))])
    bodies, entries = [], {}
    for source in sources:
        names = source.relative_to(package.parent).with_suffix("").parts
        is_package = names[-1] == "__init__"
        name = ".".join(names[:-1] if is_package else names)
        found = source.stat()  # before it is read: what changes meanwhile is noticed later
        body = marshal.dumps(SourceFileLoader(name, str(source)).get_code(name))  # as Python keeps it beside the source
        bodies.append(body)
        entries[name] = (len(body), str(source), found.st_size, found.st_mtime_ns, is_package)
    index, offset = {}, 0
    for name, (length, *rest) in entries.items():
        index[name] = (offset, length, *rest)
        offset += length
    finder = compile(Path(packed.__file__).read_bytes(), packed.__file__, "exec", dont_inherit=True)
    head = importlib.util.MAGIC_NUMBER + marshal.dumps((finder, index))
    path = folder / NAME
    aside = folder / f"{NAME}.{os.getpid()}"
    aside.write_bytes(head + b"".join(bodies))
    aside.chmod(0o644)
    aside.rename(path)
    return path, len(head)
