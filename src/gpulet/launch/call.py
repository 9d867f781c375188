"""What an engine asks of the low-level runtime: the sub-command, the bundle, where it wants errors.

The arguments go on untouched; this only looks. Flags as runc and crun have them, with one or two dashes.
"""

from __future__ import annotations

import os

from gpulet.errors import UsageError
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Flags of runc and crun that take the next argument where no "=" follows. A flag that isn't here is taken as a switch;
# what follows an unknown one is then no sub-command's name, so it is passed over.
TAKE_VALUE = {
    "root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager",
    "bundle", "b", "pid-file", "console-socket", "preserve-fds", "config", "f", "status-fd",
}  # fmt: skip
COMMANDS = {
    "checkpoint", "create", "delete", "events", "exec", "features", "init", "kill", "list", "mounts", "pause", "ps",
    "restore", "resume", "run", "spec", "start", "state", "update",
}  # fmt: skip


class Call(Value):
    """command: "" where none was found; bundle: None where no flag gives one, which means the current folder."""

    command: str = ""
    bundle: str | None = None
    log: str = ""
    log_format: str = "text"
    debug: bool = False
    version: bool = False

    def config_path(self) -> str:
        """The path of the bundle's config.json."""
        return os.path.join(self.bundle or "", "config.json")


def read(arguments: Sequence[str]) -> Call:
    """Reads an engine's arguments (without the program's name). Raises UsageError for a bundle flag without a value."""
    command = ""
    flags: dict[str, str] = {}
    for name, value in _scan(arguments):
        if name:
            flags["bundle" if name == "b" else name] = value
        elif not command and value in COMMANDS:
            command = value
    if flags.get("bundle") == "" and command == "create":
        raise UsageError("bundle option requires an argument", seen=" ".join(arguments))
    return Call(
        command,
        flags.get("bundle"),
        log=flags.get("log", ""),
        log_format=flags.get("log-format") or "text",
        debug="debug" in flags,
        version=not command and "version" in flags,
    )


def _scan(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(flag, value) pairs, and ("", word) for what is no flag."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return
        if not argument.startswith("-") or argument.strip("-") == "":
            yield "", argument
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals and name in TAKE_VALUE:
            value = next(rest, "")
        yield name, value
