"""The program gpulet-device-plugin: settings, log, signals, exit codes; the work is in daemon.py.

Started under the name mps-control-daemon or config-manager, or with that as its first word, it is that program.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from gpulet.plugin.lean import one_arena, without_tls

with without_tls():
    import asyncio

from gpulet.errors import GpuletError
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.plugin import entry, logs
from gpulet.plugin.config import Config, load
from gpulet.plugin.daemon import Daemon
from gpulet.plugin.monitor import Session
from gpulet.plugin.options import usage

if TYPE_CHECKING:
    from gpulet.plugin.events import Events
    from gpulet.plugin.metrics import Metrics

PROGRAM = "gpulet-device-plugin"
COMPANIONS = ("mps-control-daemon", "config-manager")
log = logging.getLogger("gpulet.plugin")


def main(argv: Sequence[str] | None = None, *, look: Callable[[Config], NodeFacts] | None = None) -> int:
    """Run the daemon until a signal ends it. Returns 0 after SIGTERM, SIGINT or SIGQUIT, 1 where it can't start,
    2 for a wrong command line. look: asks the node for its GPUs; NVML unless given."""
    if threading.current_thread() is threading.main_thread():
        entry.heed()
    words = list(sys.argv[1:] if argv is None else argv)
    name = os.path.basename(sys.argv[0]) if argv is None else PROGRAM
    if words and words[0] in COMPANIONS:
        name = words.pop(0)
    name = name if name in COMPANIONS else PROGRAM
    if any(word in ("-h", "-help", "--help") for word in words):
        print(_usage(name))
        return 0
    if any(word in ("-v", "-version", "--version") for word in words):
        from gpulet.version import __version__

        print(__version__)
        return 0
    logs.start(_log_format(words, os.environ), "info")  # until the settings are read: what is wrong there is told too
    try:
        if name == "config-manager":
            from gpulet.plugin import config_manager

            return config_manager.run(words, os.environ)
        if name == "mps-control-daemon":
            return _mps(words, look or ask_nvml)
        config = load(words, os.environ)
        logs.start(config.log_format, config.log_level)
        for warning in config.warnings:
            log.warning("%s", warning)
        log.info("Running with config: %s", json.dumps(_effective(config)))
        asyncio.run(_run(words, config, look or ask_nvml))
    except GpuletError as error:
        _last_word(name, error)
        return error.exit_code
    except OSError as error:
        _last_word(name, error)
        return 1
    return 0


def _log_format(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """The log's format as --log-format or LOG_FORMAT has it, whatever else is wrong there."""
    found = environ.get("LOG_FORMAT", "")
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == "log-format":
            found = value if equals else following
    return found


def _last_word(name: str, error: Exception) -> None:
    """Why it ends; as a line of the log where who reads that expects JSON."""
    if logs.in_json():
        log.critical("%s: %s", name, error)
    else:
        print(f"{name}: {error}", file=sys.stderr)


def _usage(name: str) -> str:
    if name == "config-manager":
        from gpulet.plugin.config_manager import OPTIONS

        return usage(name, OPTIONS)
    return usage(name)


def _mps(words: list[str], look: Callable[[Config], NodeFacts]) -> int:
    from gpulet.plugin import mps, mps_daemon

    first = words[:1] if words[:1] == ["mount-shm"] else []
    flags = words[len(first) :]
    environ = dict(os.environ)
    if os.path.isdir(mps.MOUNTED):  # then the host's path of the folder doesn't matter
        environ.setdefault("MPS_ROOT", mps.MOUNTED)
    config = load([] if first else flags, environ)
    logs.start(config.log_format, config.log_level)
    return mps_daemon.run(words if first else flags, lambda: load([] if first else flags, environ), look)


async def _run(words: Sequence[str], config: Config, look: Callable[[Config], NodeFacts]) -> None:
    one_arena()
    metrics, events = None, _events(config)
    if config.metrics_address:
        from gpulet.plugin.endpoint import Endpoint
        from gpulet.plugin.metrics import Metrics

        metrics = Metrics()
    session = open_nvml if look is ask_nvml else None
    if metrics:
        look = partial(metrics.counted, "facts", look)
        session = partial(_counting, metrics, session) if session else None
    daemon = Daemon(
        lambda: load(words, os.environ),
        look,
        publish_specs,
        session=session,
        metrics=metrics,
        report=events.tell if events else None,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, daemon.stop.set)
    loop.add_signal_handler(signal.SIGHUP, daemon.reload)
    if entry.came():
        daemon.reload()
    endpoint = Endpoint(config.metrics_address, daemon, metrics) if metrics else None
    try:
        if endpoint:
            await endpoint.start()
        await daemon.run(config)
    finally:
        if endpoint:
            await endpoint.stop()
        if events:
            events.stop()


def _events(config: Config) -> Events | None:
    """Events of this node, where we are told its name and of an API server."""
    if not config.node_name or "KUBERNETES_SERVICE_HOST" not in os.environ:
        return None
    from gpulet.plugin.apiserver import ApiError, in_cluster
    from gpulet.plugin.events import Events

    try:
        api = in_cluster(os.environ)
    except ApiError as error:
        log.error("%s: health changes become no Events", error)
        return None
    if api is None:
        log.info("no service account's token: health changes become no Events")
        return None
    events = Events(api, config.node_name)
    events.start()
    return events


def ask_nvml(config: Config) -> NodeFacts:
    """The node's GPUs beneath the driver root: through NVML, or for a Tegra by its signs.

    `source` of the facts is "wsl" or "tegra" on such a node, whose GPUs are offered as one device. Raises NodeError.
    """
    from gpulet.node import nvml, platform

    kind = platform.detect(config.lookup_root).kind if config.discovery == "auto" else config.discovery
    tegra = NodeFacts((Gpu(0, 0, "tegra", "", name="tegra"),), "tegra")
    if kind == "tegra":
        return tegra
    facts = nvml.facts(config.lookup_root)
    if config.discovery == "auto" and any(platform.is_integrated(gpu.name) for gpu in facts.gpus):
        return tegra  # a newer one, with NVML
    return facts.replace(gpus=facts.gpus[:1], source="wsl") if kind == "wsl" else facts


def open_nvml(config: Config) -> Session:
    """NVML for health events. Raises NodeError."""
    from gpulet.node import nvml

    return nvml.Session(config.lookup_root)


def _counting(metrics: Metrics, open: Callable[[Config], Session], config: Config) -> Session:
    """A session whose calls are counted."""
    from gpulet.plugin.monitor import CountedSession

    session = metrics.counted("init", open, config)
    return CountedSession(session, metrics.counted)


def publish_specs(config: Config, facts: NodeFacts, imex: tuple[int, ...]) -> tuple[str, ...]:
    """specs.publish, loaded only where a strategy needs it."""
    from gpulet.plugin.specs import publish

    return publish(config, facts, imex)


def _effective(config: Config) -> dict[str, object]:
    return {name: value for name, value in asdict(config).items() if name != "warnings"}


if __name__ == "__main__":
    sys.exit(main())
