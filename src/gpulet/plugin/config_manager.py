"""The program config-manager: a node's label chooses which of several configuration files is in force.

The label's value names a file of a folder (a ConfigMap's volume); a symbolic link, the plugin's --config-file, leads
to it; the programs that read it get a signal. Flags and variables are the peer's. A label that names no file changes
nothing: the last good choice stays.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpulet.errors import ConfigError, GpuletError
from gpulet.plugin.apiserver import ApiError, ApiServer, in_cluster
from gpulet.plugin.options import read_arguments, read_environ, row

log = logging.getLogger(__name__)

PROGRAM = "config-manager"
LOOK_EVERY = 5.0  # seconds between looks at the files themselves: a ConfigMap's content changes without an event
PATIENCE = 30.0  # seconds that the first label is waited for
RETRY = 2.0
MODULES = ("gpulet.plugin.entry", "gpulet.plugin.main")  # `python -m` of these is gpulet-device-plugin

OPTIONS = (
    row("oneshot", "bool", "oneshot", "ONESHOT", "", "choose once and end"),
    row("kubeconfig", "text", "kubeconfig", "KUBECONFIG", "", "not supported: only a Pod's own service account is"),
    row("node_name", "text", "node-name", "NODE_NAME", "", "the node whose label counts"),
    row("node_label", "text", "node-label", "NODE_LABEL", "", "the label's key"),
    row("srcdir", "text", "config-file-srcdir", "CONFIG_FILE_SRCDIR", "", "the folder with the files"),
    row("dst", "text", "config-file-dst", "CONFIG_FILE_DST", "", "the link to be made"),
    row("default", "text", "default-config", "DEFAULT_CONFIG", "", "the file for a node without a label"),
    row("fallbacks", "list", "fallback-strategies", "FALLBACK_STRATEGIES", "", "named, single, empty: tried in order"),
    row("send_signal", "bool", "send-signal", "SEND_SIGNAL", "", "whether to send a signal"),
    row("signal", "count", "signal", "SIGNAL", "", "its number"),
    row("process", "text", "process-to-signal", "PROCESS_TO_SIGNAL", "", "the program that gets it"),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags. Fields as in OPTIONS."""

    node_name: str = ""
    srcdir: str = ""
    dst: str = ""
    oneshot: bool = False
    kubeconfig: str = ""
    node_label: str = "nvidia.com/device-plugin.config"
    default: str = ""
    fallbacks: tuple[str, ...] = ()
    send_signal: bool = True
    signal: int = signal.SIGHUP
    process: str = "nvidia-device-plugin"


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """The settings. Raises UsageError or ConfigError."""
    values: dict[str, Any] = {**read_environ(environ, OPTIONS), **read_arguments(argv, OPTIONS)}
    settings = Settings(**values)
    names = {"node_name": "node-name", "srcdir": "config-file-srcdir", "dst": "config-file-dst"}
    for field, flag in names.items():
        if not getattr(settings, field):
            raise ConfigError(f"invalid <{flag}>: must not be empty string")
    if settings.kubeconfig:
        raise ConfigError("a kubeconfig can't be used", seen=settings.kubeconfig, remedy="run it as a Pod")
    return settings


def select(settings: Settings, label: str) -> str:
    """The file that a label's value ("" for none) chooses: its path, /dev/null for an empty configuration. Raises
    ConfigError."""
    try:
        entries = sorted(os.listdir(settings.srcdir))
    except OSError as error:
        raise ConfigError(f"no configuration files in {settings.srcdir}", seen=error.strerror) from error
    paths = {name: os.path.join(settings.srcdir, name) for name in entries if not name.startswith("..")}
    paths = {name: path for name, path in paths.items() if not os.path.isdir(path)}
    here = f"a file of {settings.srcdir}, here {', '.join(paths) or 'none'}"
    if label:
        if label not in paths:
            raise ConfigError(f"specified config {label} does not exist", seen=f"{settings.node_label}={label}",
                              wanted=here)  # fmt: skip
        return paths[label]
    if settings.default:
        if settings.default not in paths:
            raise ConfigError(f"default config {settings.default} does not exist", wanted=here)
        return paths[settings.default]
    for way in settings.fallbacks:
        if way == "named" and "default" in paths:
            return paths["default"]
        if way == "single" and len(paths) == 1:
            return next(iter(paths.values()))
        if way == "empty":
            return os.devnull
        if way not in ("named", "single"):
            raise ConfigError("unknown fallback strategy", seen=way, wanted="named, single or empty")
    raise ConfigError("no config was set, no default was provided, and all fallbacks failed", wanted=here)


class Link:
    """The link to the chosen file, and which version of it the programs were told of."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._told: object = None
        self._began = False

    def lead_to(self, target: str) -> bool:
        """Point it there. True where the programs have something to be told: another file, or another content."""
        first, self._began = not self._began, True
        changed = not os.path.exists(self.path) or os.path.realpath(self.path) != os.path.realpath(target)
        if changed:
            aside = f"{self.path}.new"
            _unlink(aside)
            os.symlink(target, aside)
            os.replace(aside, self.path)
        info = os.stat(target)
        version = (os.path.realpath(target), info.st_ino, info.st_mtime_ns)
        if first and not changed:
            self._told = version  # an earlier run of ours made it
        return version != self._told

    def told(self) -> None:
        """The programs know of this version."""
        info = os.stat(self.path)
        self._told = (os.path.realpath(self.path), info.st_ino, info.st_mtime_ns)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def processes(name: str, proc: str = "/proc") -> list[int]:
    """The processes of a program, ours run by an interpreter among them; a process that ends meanwhile is none."""
    wanted = {os.path.basename(name)}
    if wanted == {"nvidia-device-plugin"}:
        wanted.add("gpulet-device-plugin")
    found = []
    for entry in sorted((entry for entry in os.listdir(proc) if entry.isdigit()), key=int):
        try:
            with open(f"{proc}/{entry}/cmdline", "rb") as stream:
                words = stream.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        if _program(words) in wanted and PROGRAM not in words and int(entry) != os.getpid():
            found.append(int(entry))
    return found


def _program(words: Sequence[str]) -> str:
    """The name of the program that a command line runs, with an interpreter's options before it or without one."""
    if not os.path.basename(words[0]).startswith("python"):
        return os.path.basename(words[0])
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            return os.path.basename(word)
        last = word[-1] if not word.startswith("--") else ""
        if last == "m":
            return "gpulet-device-plugin" if next(rest, "") in MODULES else ""
        if last == "c":
            return ""
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(rest, "")
    return ""


def heeds(pid: int, number: int, proc: str = "/proc") -> bool:
    """Whether a signal doesn't simply end the process: SigCgt and SigIgn of proc(5), a bit for each signal."""
    try:
        with open(f"{proc}/{pid}/status", encoding="ascii", errors="replace") as stream:
            masks = [int(line.split()[1], 16) for line in stream if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError, IndexError):
        return True  # nothing known: as it was asked for
    return any(mask >> number - 1 & 1 for mask in masks)


def send(settings: Settings) -> None:
    """Signal every process of the program. Raises ConfigError where there is none."""
    found = processes(settings.process)
    if settings.signal == signal.SIGHUP:
        # one that is just being started would end, and reads its configuration only later
        found = [pid for pid in found if heeds(pid, settings.signal)]
    for pid in found:
        try:
            os.kill(pid, settings.signal)
        except ProcessLookupError:
            pass
    if not found:
        raise ConfigError(f"no process {settings.process} to signal", remedy="share the Pod's process namespace")
    log.info("sent signal %d to %s", settings.signal, ", ".join(map(str, found)))


def labels(api: ApiServer, settings: Settings) -> Iterator[str]:
    """The label's value now and after each change, "" without one, until the watch ends. Raises ApiError."""
    path = f"/api/v1/nodes?fieldSelector=metadata.name%3D{settings.node_name}"
    found = api.get(path)
    items = found.get("items") or [{}]
    yield _label(items[0], settings)
    for change in api.watch(f"{path}&resourceVersion={found['metadata']['resourceVersion']}"):
        if change["type"] == "ERROR":  # our version is too old: begin anew
            return
        yield "" if change["type"] == "DELETED" else _label(change["object"], settings)


def _label(node: Mapping[str, Any], settings: Settings) -> str:
    return str(((node.get("metadata") or {}).get("labels") or {}).get(settings.node_label) or "")


def _follow(api: ApiServer, settings: Settings, news: queue.SimpleQueue[str | None], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            for label in labels(api, settings):
                news.put(label)
        except ApiError as error:
            log.warning("%s; trying again", error)
        except (KeyError, TypeError, AttributeError) as error:
            log.warning("the API server's answer isn't understood: %s %s; trying again", type(error).__name__, error)
        stop.wait(RETRY)  # also after a watch's end: a server that ends each at once must not be asked without pause


def run(argv: Sequence[str], environ: Mapping[str, str], api: ApiServer | None = None) -> int:
    """Until a signal, or one choice with --oneshot: 0. Raises GpuletError where it can't start, or choose once."""
    settings = read(argv, environ)
    api = api or in_cluster(environ)
    if api is None:
        raise ConfigError("no API server", seen="no KUBERNETES_SERVICE_HOST or no service account's token",
                          remedy="run it as a Pod whose service account may get, list and watch nodes")  # fmt: skip
    news: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    stop = threading.Event()
    if not settings.oneshot:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, lambda *_: news.put(None))
    threading.Thread(target=_follow, args=(api, settings, news, stop), name="labels", daemon=True).start()
    link = Link(settings.dst)
    try:
        label = _first(news)
        while label is not None:
            try:
                _apply(settings, link, label)
            except (GpuletError, OSError) as error:
                if settings.oneshot:
                    raise
                log.error("%s; the last choice stays", error)
            if settings.oneshot:
                return 0
            label = _latest(news, label)
    finally:
        stop.set()
    return 0


def _apply(settings: Settings, link: Link, label: str) -> None:
    target = select(settings, label)
    if link.lead_to(target):
        log.info("%s leads to %s now (%s=%s)", settings.dst, target, settings.node_label, label)
        if settings.send_signal:
            send(settings)
        link.told()


def _first(news: queue.SimpleQueue[str | None]) -> str | None:
    try:
        return news.get(timeout=PATIENCE)
    except queue.Empty:
        log.warning("the API server told no label within %g s: going on as without one", PATIENCE)
        return ""


def _latest(news: queue.SimpleQueue[str | None], label: str) -> str | None:
    """The newest label, or this one again when it is time to look at the files."""
    try:
        latest: str | None = news.get(timeout=LOOK_EVERY)
        while latest is not None and not news.empty():
            latest = news.get()
        return latest
    except queue.Empty:
        return label


if __name__ == "__main__":
    from gpulet.plugin.main import main

    sys.exit(main([PROGRAM, *sys.argv[1:]]))
