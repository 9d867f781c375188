"""Which low-level runtime the commands other than `create` go to, kept beside config.toml for the launcher's shell.

An engine runs gpulet-runtime five times and more in a container's life, and for all but `create` it only becomes the
low-level runtime: for that Python needs 6 ms to start. So on machines whose /bin/sh starts in less than one, the
launcher is a shell script (engines/launchers.py) that reads what is kept here and becomes that runtime itself, where
what is kept still counts: written by the same user, for this very PATH, and of the same time of modification as
config.toml. Everything else, and every doubt, comes to Python, which answers as ever and keeps the answer anew; so
does each `create`, since a runtime that is preferred may have been installed.
"""

from __future__ import annotations

import os

from gpulet import codec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulet.settings import Settings

SUFFIX = ".low-level"  # config.toml -> .config.toml.low-level
FRESH = 2.0  # seconds: a younger config.toml may change once more within one tick of its clock


def keep(settings: Settings, low_level: str, began: float) -> None:
    """Keeps the answer for the next call. began: when settings were read, seconds since the epoch. Says nothing where
    it can't, or where the answer may be another the next time: a config.toml that has just changed, a runtime or a
    folder of PATH that is relative to the caller's own."""
    path, search = settings.source, os.environ.get("PATH", "")
    places = [name for name in settings.runtimes if "/" in name] + [folder for folder in search.split(":") if folder]
    if not path or "\n" in low_level + search or any(place[0] != "/" for place in places):
        return
    try:
        state = os.stat(path)
        answer, at = os.fsencode(f"{low_level}\n{search}\n"), beside(path)
        kept = _kept(at)
        if kept == (answer, state.st_mtime_ns):
            return
        if state.st_ctime <= began - FRESH and not _is_launcher(low_level):
            codec.put(at, answer, state.st_mtime_ns)
        elif kept[0]:  # of a config.toml that another of the same time has replaced, as images' files may be
            os.unlink(at)
    except OSError:
        pass


def _is_launcher(program: str) -> bool:
    """Whether a program is a launcher of ours, of another installation: its shell would read what is kept here, and
    start itself for ever."""
    with open(program, "rb") as file:
        return b"gpulet" in file.read(4096)


def _kept(at: str) -> tuple[bytes, int]:
    try:
        return codec.read_file(at), os.stat(at).st_mtime_ns
    except OSError:
        return b"", 0


def beside(path: str) -> str:
    """Where the answer for a config.toml is kept."""
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}{SUFFIX}")
