"""gpulet-container-cli: info, list and configure, for the prestart hook and for people.

Arguments, text, exit codes and error categories are those of nvidia-container-cli. The program's parts are loaded by
the command that needs them.
"""

from __future__ import annotations

import os
import sys

from gpulet.errors import GpuletError
from gpulet.launch import argp
from gpulet.launch.argp import OPTIONAL, REQUIRED, Option

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

GLOBAL = (
    Option("debug", "d", REQUIRED, "Log debug information", "FILE"),
    Option("load-kmods", "k", help="Load kernel modules"),
    Option("no-pivot", "n", help="Don't use pivot_root for an ldconfig that is run"),
    Option("user", "u", OPTIONAL, "User and group that NVML runs as", "UID[:GID]"),
    Option("root", "r", REQUIRED, "Path to the driver root directory", "PATH"),
    Option("ldcache", "l", REQUIRED, "Path to the system's DSO cache", "FILE"),
    Option("no-create-imex-channels", help="Don't create IMEX channel devices"),
)
DROPS = (
    Option("no-persistenced", help="Don't include the nvidia-persistenced socket"),
    Option("no-fabricmanager", help="Don't include the nvidia-fabricmanager socket"),
    Option("no-gsp-firmware", help="Don't include GSP firmware"),
)
MIG = (
    Option("mig-config", "", REQUIRED, "MIG devices to be configured, only 'all'", "ID"),
    Option("mig-monitor", "", REQUIRED, "MIG devices to be monitored, only 'all'", "ID"),
    Option("imex-channel", "", REQUIRED, "IMEX channel numbers, separated by commas", "CHANNEL"),
)
INFO = (Option("csv", help="Output in CSV format"),)
LIST = (
    Option("device", "d", REQUIRED, "Device UUID, index or PCI address to list, or 'all'", "ID"),
    Option("libraries", "l", help="List driver libraries"),
    Option("binaries", "b", help="List driver binaries"),
    Option("ipcs", "i", help="List driver ipcs"),
    Option("firmwares", "f", help="List driver firmwares"),
    Option("compat32", help="List 32-bit libraries too"),
    *MIG,
    *DROPS,
)
CAPABILITIES = ("compute", "utility", "video", "graphics", "display", "ngx", "compat32")
CONFIGURE = (
    Option("pid", "p", REQUIRED, "Container PID", "PID"),
    Option("device", "d", REQUIRED, "Device UUID, index or PCI address to isolate, or 'all'", "ID"),
    Option("require", "r", REQUIRED, "Check container requirements", "EXPR"),
    Option("ldconfig", "l", REQUIRED, "The program for --loader-cache=ldconfig, @PATH for the host's", "PATH"),
    Option("loader-cache", "", REQUIRED, "native (merged directly, the default) or ldconfig (run it)", "WAY"),
    *(
        Option(name, letter, help=f"Enable {name} capability")
        for name, letter in zip(CAPABILITIES, "cuvgDn", strict=False)
    ),
    Option("compat32", help="Enable 32-bit compatibility"),
    *MIG,
    Option("no-cgroups", help="Don't use cgroup enforcement"),
    Option("no-devbind", help="Don't bind mount devices"),
    *DROPS,
    Option("no-cntlibs", help="Don't use the container's forward-compatibility libraries"),
    Option("cuda-compat-mode", "", REQUIRED, "mount, ldconfig or disabled", "MODE"),
    Option("dry-run", "", OPTIONAL, "Print what would be done, as text or json, and do nothing", "FORMAT"),
)
COMMANDS = {
    "info": (INFO, "", "Report information about the driver and devices."),
    "list": (LIST, "", "List driver components."),
    "configure": (CONFIGURE, "ROOTFS", "Configure a container with GPU support."),
}
ABOUT = "Give a container the driver's files and GPUs. Commands: configure, info, list."


class Failure(GpuletError):
    """A failure with the category that the peer's messages begin with."""

    def __init__(self, category: str, message: object) -> None:
        super().__init__(f"{category}: {message}")


class Call:
    """A command line that was read."""

    def __init__(self, program: str, arguments: Sequence[str], own_process: bool = False) -> None:
        self.program = program
        self.own_process = own_process  # whether the process ends with this call
        self.told: list[str] = []  # for the log
        self.tell = self.told.append
        self.globals, words = argp.parse(program, arguments, GLOBAL, in_order=True)
        self.command = ""
        self.options: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.tokens = words[1:]
        if words and words[0] in COMMANDS:
            self.command = words[0]
            self.options, self.words = argp.parse(f"{program} {self.command}", words[1:], COMMANDS[self.command][0])

    def last(self, name: str, default: str = "") -> str:
        """The value that counts of an option, global or the command's."""
        values = [value for option, value in (*self.globals, *self.options) if option == name]
        return (values[-1] or "") if values else default

    def joined(self, name: str) -> list[str]:
        """The items of a repeatable, comma separated option."""
        text = ",".join(value or "" for option, value in self.options if option == name)
        return [item for item in text.split(",") if item]

    def given(self, name: str) -> bool:
        """Whether an option stands on the command line."""
        return any(option == name for option, _ in (*self.globals, *self.options))

    def user(self) -> tuple[int, int] | None:
        """User and group of --user, None where it isn't given. Raises Failure."""
        if not self.given("user"):
            return None
        from gpulet.launch.nvml_child import parse_user

        try:
            return parse_user(self.last("user"))
        except KeyError:
            raise Failure("input error", "parse user/group failed: no such file or directory") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. argv: without the program's name."""
    name = os.path.basename(sys.argv[0])
    program = name if name.endswith("container-cli") else "gpulet-container-cli"
    try:
        call = Call(program, list(sys.argv[1:] if argv is None else argv), argv is None)
        if _asked_for_words(call):
            return 0
        _check_words(call)
        return run(call)
    except argp.Wrong as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except GpuletError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1


def run(call: Call) -> int:
    """Runs a command that was read."""
    for name in ("root", "ldcache"):
        if call.given(name) and not call.last(name):
            raise Failure("initialization error", "invalid argument")
    call.user()
    if call.command == "configure":
        from gpulet.launch import cli_configure

        return cli_configure.run(call)
    from gpulet.launch import cli_report

    return cli_report.info(call) if call.command == "info" else cli_report.show(call)


def _asked_for_words(call: Call) -> bool:
    """Prints help, usage or the version where asked for."""
    program, tail, about = call.program, "COMMAND [ARG...]", ABOUT
    options: tuple[Option, ...] = GLOBAL
    if call.command:
        options, tail, about = COMMANDS[call.command]
        program = f"{call.program} {call.command}"
    for name, _ in call.options if call.command else call.globals:
        if name == "help":
            print(argp.help_text(program, tail, about, options), end="")
        elif name == "usage":
            print(argp.usage(program, tail))
        elif name == "version":
            _print_version()
        else:
            continue
        return True
    return False


def _check_words(call: Call) -> None:
    if not call.command:
        raise argp.Wrong(call.program, argp.usage(call.program, "COMMAND [ARG...]"))
    program = f"{call.program} {call.command}"
    if call.command == "configure":
        if len(call.words) != 1:
            raise argp.Wrong(program, argp.usage(program, "ROOTFS"))
    elif call.words:
        raise argp.Wrong(program, "Too many arguments")


def _print_version() -> None:
    from gpulet.version import __version__

    machine = os.uname().machine
    print(f"cli-version: {__version__}\nlib-version: {__version__}")
    print(f"build date: \nbuild revision: \nbuild compiler: Python {sys.version.split()[0]}")
    print(f"build platform: {machine}\nbuild flags: ")


if __name__ == "__main__":
    sys.exit(main())
