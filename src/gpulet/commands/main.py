"""The program `gpulet`: what a person types. Each command's module is loaded only when it is asked for."""

from __future__ import annotations

import importlib
import io
import os
import shlex
import sys
from collections.abc import Sequence

import typer

from gpulet.errors import GpuletError, UsageError, visible
from gpulet.version import __version__

# command -> (module, one line of help). A module has either `command`, a function, or `app`, a group of commands.
COMMANDS = {
    "demo": ("gpulet.commands.demo", "From Pods to GPUs inside containers, on this machine, step by step."),
    "node": ("gpulet.commands.node", "What this node has: GPUs, driver, platform, and the evidence."),
    "cdi": ("gpulet.commands.cdi", "Write, check and explain CDI specifications."),
    "explain": ("gpulet.commands.explain", "Why a container gets what it gets."),
    "sim": ("gpulet.commands.sim", "Simulated nodes: create, break, capture."),
    "system": ("gpulet.commands.system", "Links in /dev/char and device nodes that a node may lack."),
    "install": ("gpulet.commands.install", "Write the launchers that container engines call."),
}

LONGEST = 2000  # characters of an error's line; what came in may be of any length


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpulet {__version__}")
        raise typer.Exit


def _gpulet(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """From a Kubernetes Pod to a GPU inside its container: discovery, allocation, injection, explained."""


def build(argv: Sequence[str]) -> typer.Typer:
    """The command line for these arguments: the command that they name is loaded, the others are names and help."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_gpulet)
    wanted = next((word for word in argv if not word.startswith("-")), "")
    for name, (module_name, help_line) in COMMANDS.items():
        if name != wanted:
            app.command(name, help=help_line)(lambda: None)
            continue
        module = importlib.import_module(module_name)
        if hasattr(module, "command"):
            app.command(name, help=help_line)(module.command)
        else:
            app.add_typer(module.app, name=name, help=help_line)
    return app


def main(argv: list[str] | None = None) -> int:
    """Runs one command. A failure becomes one line on stderr and exit code 1 (2 for wrong usage)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where the descriptor was closed; and not every terminal has "×"
            stream.reconfigure(errors="replace")
    words = sys.argv[1:] if argv is None else argv
    try:
        _refuse_empty(words)
        result = build(words)(args=words, prog_name="gpulet", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as error:
        return int(error.exit_code)
    except GpuletError as error:
        return _fail(str(error), error.exit_code)
    except typer.TyperException as error:  # wrong usage
        text = getattr(error, "format_message", error.__str__)()
        if not text:  # nothing named at all: the help was shown
            return 2
        return _fail(f"{text.rstrip('.')}; see: gpulet {words[0] if words else ''} --help", 2)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("stopped", 130)
    except BrokenPipeError:
        sys.stdout = None  # the reader has gone: nothing more to flush at the end
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}; nothing more was done", 1)
    except Exception as error:
        if "GPULET_DEBUG" in os.environ:
            raise
        return _fail(f"internal error: {type(error).__name__}: {error}; please report it, with GPULET_DEBUG=1 set", 1)


def _refuse_empty(words: Sequence[str]) -> None:
    """An empty argument is a variable that somebody's script lacks; as a folder it would be the current one. After an
    option it may be the option's value, which then counts as not given."""
    for before, word in zip(("", *words), words, strict=False):
        if not word.strip() and not before.startswith("-"):
            raise UsageError("an empty argument", seen=shlex.join(("gpulet", *words)), wanted="a name, path or text")


def _fail(line: str, code: int) -> int:
    print("gpulet:", visible(" ".join(line.split())[:LONGEST]), file=sys.stderr)
    return code
