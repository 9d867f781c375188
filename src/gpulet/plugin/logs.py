"""The program's log: whatever speaks in this process - we, asyncio, warnings, an exception that nobody caught - does so
in the one format that was asked for."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import TracebackType

OURS = "gpulet"
OTHERS = ("asyncio", "py.warnings")  # loggers that aren't ours and speak in this process
QUIET = 60.0  # seconds in which one of them says the same thing once
REMEMBERED = 64
log = logging.getLogger(OURS)


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {"time": moment, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Once(logging.Filter):
    """Lets the same first line through once in QUIET seconds: asyncio tells of each connection that it has no
    descriptor for, thousands in a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}  # message -> when

    def filter(self, record: logging.LogRecord) -> bool:
        # asyncio's further lines tell the objects concerned, by their addresses
        text, now = record.getMessage().partition("\n")[0], time.monotonic()
        if now - self._said.get(text, -QUIET) < QUIET:
            return False
        self._said.pop(text, None)
        self._said[text] = now
        while len(self._said) > REMEMBERED:
            del self._said[next(iter(self._said))]
        return True


def start(log_format: str, level: str) -> None:
    """Log to standard error from now on. log_format: "json" or "text"; level: of our own messages."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    for name in (OURS, *OTHERS):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        if name in OTHERS:
            logger.filters[:] = [Once()]
    log.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def in_json() -> bool:
    """Whether who reads the log expects JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in log.handlers)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("ended by a bug: %s", error or kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and failed.exc_type is not SystemExit:
        name = failed.thread.name if failed.thread else "?"
        where = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        log.critical("the thread %s ended by a bug: %s", name, failed.exc_value, exc_info=where)
