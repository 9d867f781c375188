"""The program gpulet-device-plugin: settings, log, signals, exit codes; the work is in daemon.py."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from gpulet.errors import GpuletError
from gpulet.node.gpu import Gpu, NodeFacts
from gpulet.plugin.config import Config, load
from gpulet.plugin.daemon import Daemon
from gpulet.plugin.monitor import Session
from gpulet.plugin.options import usage

PROGRAM = "gpulet-device-plugin"
log = logging.getLogger("gpulet.plugin")


def main(argv: Sequence[str] | None = None, *, look: Callable[[Config], NodeFacts] | None = None) -> int:
    """Run the daemon until a signal ends it. Returns 0 after SIGTERM, SIGINT or SIGQUIT, 1 where it can't start,
    2 for a wrong command line. look: asks the node for its GPUs; NVML unless given."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters of gRPC's own messages reaches us as errors
    words = list(sys.argv[1:] if argv is None else argv)
    if any(word in ("-h", "-help", "--help") for word in words):
        print(usage(PROGRAM))
        return 0
    if any(word in ("-v", "-version", "--version") for word in words):
        from gpulet.version import __version__

        print(__version__)
        return 0
    try:
        config = load(words, os.environ)
        _start_log(config)
        for warning in config.warnings:
            log.warning("%s", warning)
        log.info("Running with config: %s", json.dumps(_effective(config)))
        asyncio.run(_run(words, config, look or ask_nvml))
    except GpuletError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


async def _run(words: Sequence[str], config: Config, look: Callable[[Config], NodeFacts]) -> None:
    metrics = None
    if config.metrics_address:
        from gpulet.plugin.metrics import Endpoint, Metrics

        metrics = Metrics()
    session = open_nvml if look is ask_nvml else None
    daemon = Daemon(lambda: load(words, os.environ), look, publish_specs, session=session, metrics=metrics)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, daemon.stop.set)
    loop.add_signal_handler(signal.SIGHUP, daemon.reload)
    if metrics is None:
        await daemon.run(config)
        return
    endpoint = Endpoint(config.metrics_address, daemon, metrics)
    await endpoint.start()
    try:
        await daemon.run(config)
    finally:
        await endpoint.stop()


def ask_nvml(config: Config) -> NodeFacts:
    """The node's GPUs beneath the driver root: through NVML, or for a Tegra, which has none, by its signs.

    `source` of the facts is "wsl" or "tegra" on such a node, whose GPUs are offered as one device. Raises NodeError.
    """
    from gpulet.node import nvml, platform

    kind = platform.detect(config.lookup_root).kind if config.discovery == "auto" else config.discovery
    if kind == "tegra":
        return NodeFacts((Gpu(0, 0, "tegra", "", name="tegra"),), "tegra")
    facts = nvml.facts(config.lookup_root)
    return facts.replace(gpus=facts.gpus[:1], source="wsl") if kind == "wsl" else facts


def open_nvml(config: Config) -> Session:
    """NVML for health events. Raises NodeError."""
    from gpulet.node import nvml

    return nvml.Session(config.lookup_root)


def publish_specs(config: Config, facts: NodeFacts, imex: tuple[int, ...]) -> tuple[str, ...]:
    """specs.publish, loaded only where a strategy needs it."""
    from gpulet.plugin.specs import publish

    return publish(config, facts, imex)


def _effective(config: Config) -> dict[str, object]:
    return {name: value for name, value in asdict(config).items() if name != "warnings"}


class _JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _start_log(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_JsonLines() if config.log_format == "json" else text)
    logger = logging.getLogger("gpulet")
    logger.handlers[:] = [handler]
    logger.setLevel(config.log_level.upper())
    logger.propagate = False


if __name__ == "__main__":
    sys.exit(main())
