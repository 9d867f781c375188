"""What was worked out for a request, remembered for the next container that asks the same of an unchanged node.

Looking a node over and building an Injection costs a starting container several milliseconds and comes to the same
until something on the node changes. So it is kept as JSON in the state folder, with everything that was asked and
configured, and the evidence: what the driver says in /proc, and the state of every device node and of every folder
that was looked into or that holds what goes in. It counts as long as the evidence is the same. `gpulet explain` reads
it too, and never writes. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet import codec
from gpulet.injection.model import DeviceNode, Hook, Injection, Mount, RootfsWork, SymLink
from gpulet.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from gpulet.request.model import Request
    from gpulet.settings import Settings

DRIVER = "/proc/driver/nvidia"
MOST = 512  # answers; a node has few kinds of requests, so more are somebody's play
FRESH = 2_000_000_000  # ns: what changed just now may change once more within one tick of its clock
TICK = 50_000_000  # ns: a file system's clock may be behind by as much
_NAMES = (1 << 89) - 1  # a prime: what was asked gives the file's name as its remainder


class Memory:
    """The answer to one request. found: the Injection, None where none is remembered that counts; sonames: of its
    libraries, path in the container -> (soname, flags in the loader's cache); assumed, lacking, unready: see
    sources.Found."""

    def __init__(self, request: Request, mode: str, settings: Settings) -> None:
        self.found: Injection | None = None
        self.sonames: dict[str, tuple[str, int]] = {}
        self.assumed: tuple[str, ...] = ()
        self.lacking: tuple[str, ...] = ()
        self.unready: tuple[str, ...] = ()
        self._began = 0
        self._said: list[Any] = []
        self._states: dict[str, list[int] | None] = {}
        self._root = settings.driver_root()
        asked = [getattr(request, name) for name in request._fields if name not in ("reason", "variable", "source")]
        set_up = [getattr(settings, name) for name in settings._fields if name not in ("lines", "unknown")]
        key = codec.dumps([__version__, mode, asked, set_up])
        self._key = key.decode()
        self._path = f"{settings.state_dir}/requests/{int.from_bytes(key, 'big') % _NAMES:x}.json"

    def recall(self) -> Memory:
        """Looks the answer up. Where there is none, what is found out from now on may be kept: see `watch`."""
        try:
            content = codec.read_own(self._path)
            if content["key"] == self._key and self._unchanged(content):
                self.sonames = {path: (name, flags) for path, (name, flags) in content["sonames"].items()}
                self.assumed = tuple(content["assumed"])
                self.lacking = tuple(content["lacking"])
                self.unready = tuple(content["unready"])
                self.found = _revived(content["injection"])
                return self
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            pass  # none, or of a form that isn't ours
        import time

        self._began, self._said = time.time_ns(), _said(self._root)
        return self

    def _unchanged(self, content: dict[str, Any]) -> bool:
        if any(_state(path) != seen for path, seen in content["looked"].items()):
            return False
        return bool(content["said"] == _said(self._root))

    def watch(self, injection: Injection, looked: Sequence[str]) -> None:
        """Takes down the evidence for an answer that was just worked out, before anything else is waited for.

        looked: the folders and files that it was made from, none where that isn't known. Where one of them, or the
        driver, has changed since `recall`, the answer may be of before or after, so it won't be kept."""
        if not looked:
            return
        nodes = [node.host_path for node in injection.devices]  # one that is yet to be made on the host is none there
        nodes += _beside(nodes)
        bound = [_evidence(mount.source) for mount in injection.mounts if mount.type in ("", "bind")]
        states = {path: _state(path) for path in (*map(_witness, looked), *nodes, *bound)}
        young = any(seen[1] > self._began - FRESH if seen else self._gone(path) for path, seen in states.items())
        if not young and _said(self._root) == self._said:
            self._states = states

    def _gone(self, path: str) -> bool:
        """Whether a name that is missing may have been there a moment ago: its folder has changed. /tmp and /run do
        all the time, so no more than this moment counts."""
        folder = _state(os.path.dirname(_witness(path)))
        return folder is not None and folder[1] > self._began - min(FRESH, TICK)

    def keep(self, injection: Injection, sonames: dict[str, tuple[str, int]]) -> None:
        """Remembers the answer that is watched. Says nothing where it can't, or there is none."""
        if not self._states:
            return
        content = {
            "key": self._key,
            "looked": self._states,
            "said": self._said,
            "injection": injection.to_data(),
            "assumed": list(self.assumed),
            "lacking": list(self.lacking),
            "unready": list(self.unready),
            "sonames": {path: list(pair) for path, pair in sonames.items()},
        }
        _make_room(os.path.dirname(self._path))
        codec.write_own(self._path, content)


def _make_room(folder: str) -> None:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names if len(names) >= MOST else ():
        try:
            os.unlink(f"{folder}/{name}")
        except OSError:  # another was first, or it is nothing of ours
            pass


def _witness(path: str) -> str:
    """What changes when a path appears or does: itself, or the first of its names that is missing. Of the hundred
    places where a driver's files may lie most are missing, for the want of few names."""
    missing = ""
    while path not in ("", "/") and not os.path.lexists(path):
        missing, path = path, os.path.dirname(path)
    return missing or path


def _beside(nodes: Sequence[str]) -> list[str]:
    """The other nodes of the driver: which are there says which GPUs count, and a node that is mounted over a file, as
    in a container, comes and goes without a word in its folder's time."""
    folders = dict.fromkeys(path.rpartition("/")[0] for path in nodes)
    return [f"{folder}/{name}" for folder in folders for name in _names(folder) if name.startswith("nvidia")]


def _evidence(source: str) -> str:
    """What changes when a file is replaced or removed: its folder, which many share; not /tmp or /run, which change all
    the time."""
    folder = os.path.dirname(source)
    return folder if folder.count("/") > 1 else source


def _state(path: str) -> list[int] | None:
    """What tells one state of a folder or file from another: a folder's time changes as names come and go, a node's as
    its mode or owner does."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return [info.st_ino, info.st_ctime_ns, info.st_size]


def _said(root: str) -> list[Any]:
    """What the driver says of itself, its GPUs, MIG instances and majors in /proc, whose files have no times."""
    proc = root.rstrip("/")
    if not os.path.isdir(proc + DRIVER):
        proc = ""
    base = proc + DRIVER
    gpus = [[name, _text(f"{base}/gpus/{name}/information")] for name in _names(f"{base}/gpus")]
    mig = [[name, _names(f"{base}/capabilities/{name}/mig")] for name in _names(f"{base}/capabilities")]
    return [_text(f"{base}/version"), _text(f"{proc}/proc/devices"), gpus, mig]


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return codec.read_all(descriptor).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _revived(data: dict[str, Any]) -> Injection:
    """The Injection of `to_data()`. Without the values' own checks, which would take longer than making it anew."""
    work = data["rootfs"]
    for name in ("links", "device_links"):
        work[name] = tuple(_value(SymLink, one) for one in work[name])
    work["folders"], work["profile_minors"] = tuple(work["folders"]), tuple(work["profile_minors"])
    data["rootfs"] = _value(RootfsWork, work)
    data["devices"] = tuple(_value(DeviceNode, one) for one in data["devices"])
    data["mounts"] = tuple(_value(Mount, _with_tuples(one, "options")) for one in data["mounts"])
    data["hooks"] = tuple(_value(Hook, _with_tuples(one, "args", "env")) for one in data["hooks"])
    for name in ("gids", "proc_gpus", "proc_mig"):
        data[name] = tuple(data[name])
    for name in ("env", "net_devices", "intel_rdt"):
        data[name] = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in data[name])
    injection: Injection = _value(Injection, data)
    return injection


def _with_tuples(data: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        data[name] = tuple(data[name])
    return data


def _value(kind: type[Any], data: dict[str, Any]) -> Any:
    one = object.__new__(kind)
    one.__dict__.update(data)
    return one
