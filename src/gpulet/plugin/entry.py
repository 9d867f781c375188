"""Where gpulet-device-plugin begins: from here on a SIGHUP is remembered, before the imports that take their time.

A SIGHUP ends a process that doesn't heed it, and a config-manager may send one as soon as the program's name is to be
seen. What came while the daemon was being started is a reload asked for, and is done once it runs.
"""

from __future__ import annotations

import os
import signal
import sys

_came = False


def _remember(number: int, frame: object) -> None:
    global _came
    _came = True


def _end(number: int, frame: object) -> None:
    os._exit(0)  # nothing has been begun yet that would have to be tidied up


def heed() -> None:
    """Remember SIGHUPs from now on; only the main thread may say so."""
    signal.signal(signal.SIGHUP, _remember)


def came() -> bool:
    """Whether one came that nobody has asked about yet."""
    global _came
    before, _came = _came, False
    return before


def main() -> int:
    """The program, see main.py."""
    heed()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):  # until the program takes them over
        signal.signal(number, _end)
    from gpulet.plugin.main import main as run

    return run()


if __name__ == "__main__":
    from gpulet.plugin import entry  # this module under its own name: it is to be there once

    sys.exit(entry.main())
