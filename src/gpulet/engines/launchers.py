"""The launchers: small executables that start the programs in `launch/` in milliseconds.

A console script loads `site` and, through it, whatever the environment's .pth files name. A launcher starts the
interpreter isolated (`-I`: no PYTHON* variables, no folder of the caller's on the path) and without `site` (`-S`), so
a container's environment can't change what runs, and start-up costs what the program itself imports. A program that
lives for milliseconds gains 3 of them by neither collecting garbage nor taking itself apart at the end.
"""

from __future__ import annotations

import compileall
import os
import sys
import sysconfig
from pathlib import Path

import gpulet
from gpulet.errors import ConfigError

# program -> (module, the peer's program that it stands in for)
PROGRAMS = {
    "gpulet-runtime": ("gpulet.launch.runtime", "nvidia-container-runtime"),
    "gpulet-hook": ("gpulet.launch.hook", "nvidia-container-runtime-hook"),
    "gpulet-container-cli": ("gpulet.launch.container_cli", "nvidia-container-cli"),
    "gpulet-cdi-hook": ("gpulet.launch.cdi_hook", "nvidia-cdi-hook"),
}

# Linux reads at most 256 bytes of a "#!" line, the newline included (BINPRM_BUF_SIZE, linux/binfmts.h)
SHEBANG_LIMIT = 255


def launcher_text(module: str, interpreter: str = sys.executable) -> str:
    """The text of one launcher: isolated interpreter, gpulet's folder first, its libraries' folder last."""
    shebang = f"#!{interpreter} -IS"
    if len(shebang.encode()) > SHEBANG_LIMIT or " " in interpreter:
        raise ConfigError(
            "interpreter",
            seen=interpreter,
            wanted=f"a path without blanks that fits a #! line of {SHEBANG_LIMIT} bytes",
            remedy="install gpulet in a folder with a shorter path",
        )
    source = str(Path(gpulet.__file__).resolve().parent.parent)
    libraries = sysconfig.get_paths()["purelib"]
    return (
        f"{shebang}\n"
        "import gc, os, sys\n"
        "gc.disable()\n"
        f"sys.path.insert(0, {source!r})\n"
        f"sys.path.append({libraries!r})\n"
        f"from {module} import main\n"
        "code = main()\n"
        "sys.stdout.flush()\n"
        "sys.stderr.flush()\n"
        "os._exit(code)\n"
    )


def write_launchers(folder: Path) -> dict[str, Path]:
    """Writes every launcher into a folder, each aside and renamed, mode 0755; gives program -> path."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for program, (module, _peer) in PROGRAMS.items():
        path = folder / program
        aside = folder / f".{program}.{os.getpid()}"
        aside.write_text(launcher_text(module))
        aside.chmod(0o755)
        aside.rename(path)
        written[program] = path
    # a launcher runs once per container: compiled modules must be there before the first one
    compileall.compile_dir(str(Path(gpulet.__file__).parent), quiet=2, maxlevels=3)
    return written
