"""`gpulet install`: writes the launchers that container engines call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpulet.engines import pack
from gpulet.engines.launchers import COMPANIONS, LASTING, OWN, PROGRAMS, SHELL, fast_shell, write_launchers
from gpulet.errors import ConfigError, UsageError

UNIT = """\
[Unit]
Description=gpulet: workers that are ready to start GPU containers
Before=containerd.service crio.service docker.service

[Service]
ExecStart="{program}"
KillMode=mixed
Restart=always
RestartSec=10

[Install]
WantedBy=multi-user.target
"""
# where systemd looks for units by itself, systemd.unit(5)
KNOWN = ("/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def command(
    prefix: Annotated[Path, typer.Option(help="Folder that gets bin/ with the launchers.")] = Path("/usr/local"),
    yes: Annotated[bool, typer.Option("--yes", help="Write without asking.")] = False,
    peer_names: Annotated[
        bool, typer.Option("--peer-names", help="Also link each under the name of the NVIDIA program it stands in for.")
    ] = False,
    prefork: Annotated[
        bool, typer.Option("--prefork", help="Also write a systemd unit for gpulet-prefork: faster starts, see README.")
    ] = False,
) -> None:
    """Write PREFIX/bin/gpulet-runtime, gpulet-hook, gpulet-container-cli, gpulet-cdi-hook, gpulet-prefork and
    gpulet-device-plugin."""
    programs = {program: peer for program, (_module, peer) in (PROGRAMS | LASTING).items()}
    if prefix == Path():
        raise UsageError("--prefix", seen="nothing", wanted="a folder, such as /usr/local")
    folder = prefix.absolute() / "bin"
    names = {peer: program for program, peer in programs.items()} | COMPANIONS
    links = {folder / name: program for name, program in names.items()} if peer_names else {}
    for link in links:  # looked at before anything is written
        if link.exists() and not link.is_symlink():
            raise ConfigError(
                "file in the way", seen=link, wanted="no file of that name", remedy="move NVIDIA's away first"
            )
    if prefork and not fast_shell():
        raise ConfigError(
            "gpulet-prefork serves launchers that are shell scripts",
            seen=f"{SHELL} is {SHELL.resolve()}",
            wanted="dash or busybox",
            remedy="leave --prefork out",
        )
    if not yes and not _agreed(f"Write {', '.join([*programs, *OWN])} to {folder}?"):
        raise UsageError("nothing written", remedy="say --yes to write without being asked")
    try:
        for path in write_launchers(folder).values():
            typer.echo(str(path))
        for link, program in links.items():
            link.unlink(missing_ok=True)
            link.symlink_to(program)
            typer.echo(f"{link} -> {program}")
        if prefork:
            _write_unit(prefix.absolute(), folder / "gpulet-prefork")
    except OSError as error:
        raise ConfigError(
            f"can't write to {folder}", seen=error.strerror, remedy="choose another --prefix or become root"
        ) from error


def _write_unit(prefix: Path, program: Path) -> None:
    path = prefix / "lib/systemd/system/gpulet-prefork.service"
    path.parent.mkdir(parents=True, exist_ok=True)
    quoted = str(program).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    pack.put(path, UNIT.format(program=quoted).encode(errors="surrogateescape"), 0o644)
    typer.echo(f"{path}\nstart it with: systemctl enable --now {path.name if str(path.parent) in KNOWN else path}")


def _agreed(question: str) -> bool:
    """Asks. Where nobody can answer, as in a script, that is no."""
    typer.echo(f"{question} [y/N]: ", nl=False)
    answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer.endswith("\n"):
        typer.echo()
    return answer.strip().lower() in ("y", "yes")
