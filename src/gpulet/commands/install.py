"""`gpulet install`: writes the launchers that container engines call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpulet.engines.launchers import PROGRAMS, write_launchers
from gpulet.errors import ConfigError, UsageError


def command(
    prefix: Annotated[Path, typer.Option(help="Folder that gets bin/ with the launchers.")] = Path("/usr/local"),
    yes: Annotated[bool, typer.Option("--yes", help="Write without asking.")] = False,
    peer_names: Annotated[
        bool, typer.Option("--peer-names", help="Also link each under the name of the NVIDIA program it stands in for.")
    ] = False,
) -> None:
    """Write PREFIX/bin/gpulet-runtime, gpulet-hook, gpulet-container-cli and gpulet-cdi-hook."""
    folder = prefix.absolute() / "bin"
    if not yes and not typer.confirm(f"Write {', '.join(PROGRAMS)} to {folder}?"):
        raise UsageError("nothing written", remedy="say --yes to write without being asked")
    try:
        written = write_launchers(folder)
        for program, path in written.items():
            typer.echo(str(path))
            if peer_names:
                link = folder / PROGRAMS[program][1]
                if link.exists() and not link.is_symlink():
                    raise ConfigError(
                        "file in the way", seen=link, wanted="no file of that name", remedy="move NVIDIA's away first"
                    )
                link.unlink(missing_ok=True)
                link.symlink_to(program)
                typer.echo(f"{link} -> {program}")
    except OSError as error:
        raise ConfigError(
            "can't write", seen=f"{error.filename}: {error.strerror}", remedy="choose another --prefix or become root"
        ) from error
