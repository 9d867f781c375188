"""Build the C sources of this folder with the machine's compiler, once.

What was built is kept in the user's cache folder under a name made of the sources, the options and the compiler, and
put there by rename, so that processes that build at the same time don't meet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpulet.errors import NodeError

SOURCES = Path(__file__).parent
STYLE = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE", "-fno-stack-protector")


def cache_folder() -> Path:
    """Where built files are kept: $XDG_CACHE_HOME/gpulet/sim, ~/.cache/gpulet/sim by default."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpulet" / "sim"


def compiler() -> str:
    """The C compiler: $CC, else cc, else gcc or clang."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NodeError(
        "no C compiler on PATH", wanted="cc, gcc or clang", remedy="install one, for example `apt install gcc`"
    )


def build(sources: Sequence[Path], options: Sequence[str] = (), *, cc: str | None = None) -> Path:
    """The file built from `sources` (headers beside them included), from the cache where it is there already.

    NodeError with the compiler's first complaint where it fails.
    """
    cc = cc or compiler()
    digest = hashlib.sha256(repr((cc, os.stat(cc).st_mtime_ns, STYLE, tuple(options))).encode())
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    for path in (*headers, *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    target = cache_folder() / f"{sources[0].stem}-{digest.hexdigest()[:24]}"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, aside = tempfile.mkstemp(dir=target.parent)
    except OSError as error:  # as for a user without a home
        remedy = "set XDG_CACHE_HOME to a folder of yours"
        raise NodeError(f"no folder for built files: {target.parent}", seen=error.strerror, remedy=remedy) from error
    os.close(descriptor)
    try:
        command = [cc, *STYLE, "-o", aside, *map(str, sources), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            raise NodeError(f"{cc} can't build {sources[0].name}", seen=complaint[:300])
        Path(aside).chmod(0o755)
        Path(aside).rename(target)
    finally:
        Path(aside).unlink(missing_ok=True)
    return target


def nvml() -> Path:
    """The stand-in libnvidia-ml.so.1, still without a node's description behind it."""
    sources = sorted((SOURCES / "nvml").glob("*.c"))
    # -Bsymbolic: where a process has several such libraries, each calls its own functions, not the first one's.
    options = ("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-Bsymbolic", "-Wl,-soname,libnvidia-ml.so.1")
    return build(sources, options)


def dxcore(adapters: int, store: str) -> Path:
    """The stand-in libdxcore.so of a WSL node with so many display adapters and its driver store in that folder."""
    options = ("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libdxcore.so")
    return build([SOURCES / "dxcore.c"], (*options, f"-DADAPTERS={adapters}", f'-DSTORE="{store}"'))
