"""A simulated driver tree, a configuration and bundles for the programs in launch/."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from gpulet.engines.launchers import launcher_text
from support import driver_tree

LOW = """#!/bin/sh
printf '%s\\n' "$@" > "$0.argv"
/usr/bin/env > "$0.env"
"""


class Machine:
    """A folder with a driver tree of two GPUs, a low-level runtime and a container CLI that write down their call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = driver_tree.create(folder / "root", with_nodes=os.geteuid() == 0)
        self.config_file = folder / "config.toml"
        self.bundle = folder / "bundle"
        for name, module in (("gpulet-runtime", "runtime"), ("gpulet-hook", "hook"), ("gpulet-cdi-hook", "cdi_hook")):
            self._program(name, launcher_text(f"gpulet.launch.{module}"))
        self.low = self._program("low", LOW)
        self.cli = self._program("cli", LOW)
        self.configure()

    def _program(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def configure(self, top: str = "", *, runtime: str = "", cli: str = "", rest: str = "") -> None:
        """Writes config.toml: lines for the top and for the tables that every one of ours has, and further tables."""
        self.config_file.write_text(
            f"{top}\n[nvidia-container-cli]\nroot = '{self.root}'\npath = '{self.cli}'\n{cli}\n"
            f"[nvidia-container-runtime]\nruntimes = ['{self.low}']\ndebug = '{self.folder}/log'\n{runtime}\n"
            f"[nvidia-container-runtime-hook]\npath = '{self.folder}/bin/gpulet-hook'\n{rest}\n"
        )

    def make(self, config: dict[str, Any]) -> Path:
        """A bundle with a root file system that has what a small glibc image has."""
        for folder in ("etc", "usr/lib", "dev", "proc"):
            (self.bundle / "rootfs" / folder).mkdir(parents=True, exist_ok=True)
        path = self.bundle / "config.json"
        path.write_text(json.dumps(config))
        return path

    def run(self, program: str, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Runs one of our programs as an engine does: by its path, isolated, with a small environment."""
        for name in ("low", "cli"):
            for kind in ("argv", "env"):
                (self.folder / "bin" / f"{name}.{kind}").unlink(missing_ok=True)
        return subprocess.run(
            [str(self.folder / "bin" / program), *arguments],
            input=stdin, capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": os.environ["PATH"], "GPULET_CONFIG": str(self.config_file), **env},
        )  # fmt: skip

    def create(self, config: dict[str, Any], *, again: bool = False) -> dict[str, Any]:
        """`create` through the runtime, and the config.json afterwards. again: the bundle as the last call left it."""
        path = self.bundle / "config.json" if again else self.make(config)
        done = self.run("gpulet-runtime", "create", "--bundle", str(self.bundle), "x")
        assert done.returncode == 0, done.stderr
        assert self.called("low") == ["create", "--bundle", str(self.bundle), "x"]
        return json.loads(path.read_text())

    def called(self, name: str) -> list[str] | None:
        """The arguments with which a program was called; None where it wasn't."""
        path = self.folder / "bin" / f"{name}.argv"
        return path.read_text().splitlines() if path.exists() else None

    def environment(self, name: str) -> dict[str, str]:
        """The environment that a program had."""
        lines = (self.folder / "bin" / f"{name}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
