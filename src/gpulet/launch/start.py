"""How a launcher runs a program: no garbage is collected, and the process ends without being taken apart.

A program that lives for milliseconds gains 3 of them by that.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def put(text: str) -> None:
    """Writes to standard output at once, so that what is told on another stream, or by the program that this process
    becomes, comes after it. Raises GpuletError where it takes no more; what is still written there then goes nowhere.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        from gpulet.errors import GpuletError

        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise GpuletError("can't write to standard output", seen=error.strerror) from error


def run(module: str, *arguments: str) -> NoReturn:
    """Calls a module's `main` and ends the process with what it answers. module: its full name."""
    gc.disable()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller: what is written there goes nowhere, not elsewhere
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    __import__(module)
    code: int = sys.modules[module].main(*arguments)
    failed = flush()
    os._exit(code or failed)


def flush() -> int:
    """Brings what was printed out; the exit status that a failure of it means, else 0."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        os.write(2, f"{sys.argv[0]}: can't write: {error.strerror}\n".encode(errors="replace"))
        return 1
    return 0
