"""Where other programs are: the low-level runtime, the hook, the container CLI, gpulet's own beside the caller."""

from __future__ import annotations

import os
import sys

from gpulet.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import NoReturn

# searched after PATH, since engines may start us with a short one
DEFAULT_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


def search_path(first: Sequence[str] = ()) -> tuple[str, ...]:
    """The folders to look for programs in: `first`, PATH, the usual ones; each once."""
    listed = [folder for folder in os.environ.get("PATH", "").split(":") if folder]
    return tuple(dict.fromkeys([*first, *listed, *DEFAULT_PATH]))


def is_program(path: str) -> bool:
    """Whether a path is a file that may be executed by somebody."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return mode & 0o170000 == 0o100000 and bool(mode & 0o111)


def find(name: str, first: Sequence[str] = ()) -> str | None:
    """A program's absolute path: as it stands where it has a slash, else the first in the search path."""
    if "/" in name:
        return os.path.abspath(name) if is_program(name) else None
    return next(_all(name, first), None)


def _all(name: str, first: Sequence[str] = ()) -> Iterator[str]:
    """Every program of a name without slashes in the search path, in order."""
    return (path for folder in search_path(first) if is_program(path := os.path.join(folder, name)))


def low_level_runtime(candidates: Sequence[str]) -> str:
    """The first of the configured runtimes that is there and isn't this very program. Raises EngineError."""
    ourselves = _identity(sys.argv[0])
    for name in candidates:
        for path in [find(name)] if "/" in name else _all(name):
            if path and (ourselves is None or _identity(path) != ourselves):
                return path
    tried = ", ".join(candidates) or "(none configured)"
    raise EngineError(
        "no low-level runtime",
        seen=f"tried {tried} in {':'.join(search_path())}",
        remedy="install runc or crun, or correct nvidia-container-runtime.runtimes in config.toml",
    )


def become(path: str, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by a program. Raises OSError.

    Python ignores SIGPIPE and SIGXFSZ from its start on, which would go on into every container's processes.
    """
    import _signal  # type: ignore[import-not-found]  # what `signal` is made of; that would load enum too

    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(number, _signal.SIG_DFL)
    restore_locale()
    os.execv(path, [path, *arguments])


def restore_locale() -> None:
    """Gives a variable back its value, or none, that Python itself sets where the caller has no locale (PEP 538)."""
    if os.environ.get("LC_CTYPE") not in ("C.UTF-8", "C.utf8", "UTF-8"):
        return
    try:
        with open("/proc/self/environ", "rb") as file:  # as it was when this process began
            given = [entry for entry in file.read().split(b"\0") if entry.startswith(b"LC_CTYPE=")]
    except OSError:
        return
    del os.environ["LC_CTYPE"]
    if given:
        os.environb[b"LC_CTYPE"] = given[0].partition(b"=")[2]


def hook(configured: str) -> str:
    """The prestart hook's path: as configured where absolute; else found; else ours; else the peer's usual place."""
    return _resolved(configured, "nvidia-container-runtime-hook", "gpulet-hook")


def own_hook(configured: str) -> str:
    """The same where it has to be ours, since the peer's believes the environment. Raises EngineError."""
    path = hook(configured)
    path = path if is_own_hook(path) else find("gpulet-hook", _beside()) or ""
    if not path:
        raise EngineError(
            "policy kubelet in mode legacy needs gpulet-hook: NVIDIA's hook believes the container's environment",
            seen=f"nvidia-container-runtime-hook.path = {configured}",
            wanted="gpulet-hook beside gpulet-runtime or in PATH",
            remedy="write the launchers with: gpulet install",
        )
    return path


def is_own_hook(path: str) -> bool:
    """Whether a path leads to our prestart hook, be it by a link under the peer's name."""
    return real_name(path) == "gpulet-hook"


def real_name(path: str) -> str:
    """The name of the program that a path leads to; its own where that can't be followed (a kernel thread's
    /proc/PID/exe is a link that can't be read, which os.path.realpath tells by an error)."""
    try:
        return os.path.basename(os.path.realpath(path))
    except OSError:
        return os.path.basename(path)


def cdi_hook() -> str:
    """The path of our program for CDI hooks, "" where it isn't installed."""
    return find("gpulet-cdi-hook", _beside()) or ""


def container_cli(configured: str, root: str) -> str:
    """The container CLI: as configured; else beside this program or in the search path, the driver root's first."""
    if configured:
        return configured
    inside = [os.path.join(root, folder.lstrip("/")) for folder in search_path()] if root not in ("", "/") else []
    path = find("gpulet-container-cli", _beside()) or find("nvidia-container-cli", inside)
    if path is None:
        raise EngineError(
            "couldn't find binary nvidia-container-cli in PATH",
            seen=":".join(search_path(inside)),
            wanted="gpulet-container-cli or nvidia-container-cli",
            remedy="install it, or set nvidia-container-cli.path in config.toml",
        )
    return path


def is_own_cli(path: str) -> bool:
    """Whether a path leads to our container CLI, of the same installation as the running program."""
    here = os.path.dirname(os.path.realpath(sys.argv[0]))
    return os.path.realpath(path) == os.path.join(here, "gpulet-container-cli")


def _resolved(configured: str, usual: str, ours: str) -> str:
    if configured.startswith("/"):
        return configured
    return find(configured or usual) or find(ours, _beside()) or f"/usr/bin/{usual}"


def _beside() -> tuple[str, ...]:
    """The folder of the running program, where it was called by its path, and the one that a link to it leads to."""
    program = sys.argv[0]
    return tuple(os.path.dirname(way(program)) for way in (os.path.abspath, os.path.realpath)) if "/" in program else ()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino
