"""The logs of the programs in launch/: the configured file and, for errors, the engine's `--log`, in its format. A
container that is denied its GPUs is no error, and the configured file is none by default: the system's log is told.

Docker and containerd show what stands in the `--log` file when a container can't be created. Nothing is opened before
there is something to write. Text as logrus writes it: time="..." level=error msg="..."; JSON: one object a line.
"""

from __future__ import annotations

import os
import sys

from gpulet import codec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpulet.request.bundle import Container
    from gpulet.request.decide import Decision

LEVELS = ("panic", "fatal", "error", "warning", "info", "debug", "trace")
SYSTEM_LOG = "/dev/log"  # where syslog(3) sends to; systemd's journal reads it too
_DAEMON_WARNING = 3 << 3 | 4  # RFC 3164, section 4.1.1: facility and severity
_MOST = 2048  # bytes of a record there
# a pipe that nobody reads, or that is full, makes no container wait, and a terminal isn't made ours
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._/@^+")


class Log:
    """Writes to each sink; a sink that can't be written is skipped, since a log must not stop a container."""

    def __init__(self, sinks: Iterable[str], level: str = "info", form: str = "text") -> None:
        self.sinks = tuple(dict.fromkeys(sink for sink in sinks if sink and sink != "/dev/null"))
        level = level.lower()
        level = "warning" if level == "warn" else level if level in LEVELS else "info"
        self._highest = LEVELS.index(level)
        self._json = form == "json"

    def error(self, message: str) -> None:
        """To the sinks and to standard error: engines differ in which of them they show."""
        self.write("error", message)
        print(text_line("error", message), file=sys.stderr)

    def write(self, level: str, message: str, **fields: object) -> None:
        """One record. fields: more keys, for readers that parse."""
        if not self.sinks or LEVELS.index(level) > self._highest:
            return
        line = self._line(level, message, fields).encode(errors="backslashreplace") + b"\n"
        for sink in self.sinks:
            try:
                os.makedirs(os.path.dirname(sink) or ".", exist_ok=True)
                descriptor = os.open(sink, _APPEND, 0o644)
                try:
                    os.write(descriptor, line)
                finally:
                    os.close(descriptor)
            except OSError:
                pass

    def _line(self, level: str, message: str, fields: dict[str, object]) -> str:
        if self._json:
            return codec.dumps({"level": level, "msg": message, "time": now(), **fields}).decode()
        return text_line(level, message, fields)


def text_line(level: str, message: str, fields: dict[str, object] | None = None) -> str:
    """A record in logrus's text form."""
    line = f'time="{now()}" level={level} msg={_quoted(message)}'
    return line + "".join(f" {key}={_quoted(str(value))}" for key, value in (fields or {}).items())


def _quoted(text: str) -> str:
    if text and _BARE.issuperset(text):
        return text
    return codec.dumps(text).decode()


def tell_denied(program: str, container: Container, decision: Decision) -> None:
    """Tells the system's log of a container that starts without the GPUs that it asks for. Waits for nobody: where no
    log takes it at once, it is lost."""
    import time
    from _socket import AF_UNIX, SOCK_DGRAM, socket  # the module around it takes 8 ms

    pod = f"{container.pod_namespace}/{container.pod_name}" if container.pod_name else "unknown"
    fields = f"pod={_quoted(pod)} container={_quoted(container.name)} reason={_quoted(decision.request.reason)}"
    tag = f"<{_DAEMON_WARNING}>{time.strftime('%b %e %H:%M:%S')} {program}[{os.getpid()}]: "
    record = f"{tag}no GPU for a container {fields}".encode(errors="backslashreplace")[:_MOST]
    try:
        one = socket(AF_UNIX, SOCK_DGRAM)
        try:
            one.setblocking(False)
            one.sendto(record, SYSTEM_LOG)
        finally:
            one.close()
    except OSError:
        pass


def now() -> str:
    """The time as RFC 3339 has it, in UTC."""
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
