"""How a launcher runs a program: no garbage is collected, and the process ends without being taken apart.

A program that lives for milliseconds gains 3 of them by that.
"""

from __future__ import annotations

import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def run(module: str) -> NoReturn:
    """Calls a module's `main` and ends the process with what it answers. module: its full name."""
    gc.disable()
    __import__(module)
    code: int = sys.modules[module].main()
    sys.stdout.flush()
    sys.stderr.flush()
    import os

    os._exit(code)
