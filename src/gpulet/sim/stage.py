"""One machine as a cluster's node: GPUs (simulated or its own), the device plugin as its own process, an embedded
kubelet, and an engine with a real low-level runtime. The demo plays on it, and so do the end-to-end tests.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import tomlkit

from gpulet.engines.launchers import write_launchers
from gpulet.errors import NodeError
from gpulet.sim import node as simulated
from gpulet.sim.engine import Engine, Handler
from gpulet.sim.images import ImageStore
from gpulet.sim.kubelet import Kubelet
from gpulet.sim.plugin_process import PluginProcess

STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class Options:
    """How the stage is set. path: "runtime" (the spec is edited) or "hook" (the prestart hook mounts); policy: whom
    the default runtime handler believes, "env" or "kubelet"; low_level: "runc", "crun" or a path.
    """

    profile: str = "h100x8"
    gpus: int | None = None
    host: bool = False
    strategies: tuple[str, ...] = ("envvar",)
    identification: str = "uuid"
    variable: str = "NVIDIA_VISIBLE_DEVICES"
    path: str = "runtime"
    policy: str = "env"
    low_level: str = "runc"
    driver: str | None = None


class Stage:
    """Sets everything up below `folder`, which must be new and on a path short enough for sockets; `close` ends it."""

    def __init__(self, folder: Path, options: Options) -> None:
        check_folder(folder)
        self.folder = folder
        self.options = options
        self.simulated = (
            None
            if options.host
            else simulated.create(folder, options.profile, gpus=options.gpus, driver=options.driver)
        )
        if self.simulated and self.simulated.description.platform != "discrete":
            raise NodeError(
                f"profile {options.profile}",
                seen=f"a machine of kind {self.simulated.description.platform}",
                wanted="one whose GPUs have device nodes of their own",
                remedy="choose another --profile: see gpulet sim profiles",
            )
        self.root = Path("/") if self.simulated is None else self.simulated.root
        (folder / "cdi").mkdir(exist_ok=True)
        try:
            self.launchers = write_launchers(folder / "bin")
        except OSError as error:  # of a write that fails the system doesn't say whose it was
            raise NodeError(f"{folder}/bin can't be filled", seen=error.strerror, remedy="see TMPDIR") from error
        self.kubelet = Kubelet(folder / "kubelet")
        self.plugin: PluginProcess | None = None
        self.discovery_ms = 0.0
        handlers = {
            name: Handler(name, self.launchers["gpulet-runtime"], self._write_config(name, policy))
            for name, policy in (("nvidia", options.policy), ("nvidia-guarded", "kubelet"))
        }
        self.engine = Engine(
            folder,
            ImageStore(folder / "images"),
            handlers,
            cdi_folders=[folder / "cdi"],
            device_root=self.root,
            cgroup_parent=folder.name,
        )

    def discover(self, timeout: float = 20.0) -> None:
        """Starts kubelet and plugin and waits until the node's GPUs are allocatable."""
        self.kubelet.start()
        started = time.perf_counter()
        self.plugin = PluginProcess(self._plugin_command(), self.folder / "device-plugin.log")
        deadline = time.monotonic() + timeout
        while not self.allocatable():
            ended = self.plugin.failed()
            # killed by somebody it is started again; what refuses to run stays refused
            if (ended and self.plugin.refused()) or time.monotonic() > deadline:
                raise NodeError(
                    "the device plugin registered no GPU",
                    seen=ended or f"nothing within {timeout:.0f} s",
                    remedy="run it with --keep and read device-plugin.log in its folder",
                )
            time.sleep(0.002)
        self.discovery_ms = (time.perf_counter() - started) * 1e3

    def allocatable(self) -> int:
        """How many GPUs the kubelet holds healthy."""
        status = self.kubelet.resources().get(RESOURCE)
        return status.allocatable if status else 0

    def close(self, *, keep: bool = False) -> None:
        """Ends containers, plugin and kubelet, each whatever becomes of the others. The folder is the caller's to
        remove; keep leaves the bundles in it."""
        with ExitStack() as ends:
            ends.callback(self.kubelet.stop)
            if self.plugin:
                ends.callback(self.plugin.stop)
            ends.callback(self.engine.close, keep=keep)

    def _plugin_command(self) -> list[str]:
        options = self.options
        command = [sys.executable, "-m", "gpulet.plugin.entry"]
        command += ["--kubelet-socket-dir", str(self.folder / "kubelet")]
        command += ["--driver-root", str(self.root), "--cdi-spec-dir", str(self.folder / "cdi")]
        command += ["--device-list-strategy", ",".join(options.strategies)]
        command += ["--device-id-strategy", options.identification, "--device-list-envvar", options.variable]
        return [*command, "--nvidia-cdi-hook-path", str(self.launchers["gpulet-cdi-hook"])]

    def _write_config(self, name: str, policy: str) -> Path:
        """One runtime handler's config.toml."""
        options, launchers = self.options, self.launchers
        config = {
            "accept-nvidia-visible-devices-as-volume-mounts": "volume-mounts" in options.strategies,
            "nvidia-container-cli": {
                "root": "" if options.host else str(self.root),
                "path": str(launchers["gpulet-container-cli"]),
                "visible-devices-envvars": [options.variable],
            },
            "nvidia-container-runtime": {
                "debug": str(self.folder / "runtime.log"),
                "mode": "legacy" if options.path == "hook" else "auto",
                "runtimes": [options.low_level],
                "modes": {"cdi": {"spec-dirs": [str(self.folder / "cdi")]}},
            },
            "nvidia-container-runtime-hook": {"path": str(launchers["gpulet-hook"]), "skip-mode-detection": True},
            "gpulet": {
                "state-dir": str(self.folder / "run"),
                "policy": {"grants": policy, "checkpoint": str(self.kubelet.checkpoint)},
            },
        }
        path = self.folder / f"{name}.toml"
        path.write_text(tomlkit.dumps(config))
        return path


def check_folder(folder: Path) -> None:
    """NodeError where programs or device nodes below a folder could not be used, or its path can't be written down."""
    flags = os.statvfs(folder).f_flag
    for flag, name in ((os.ST_NOEXEC, "noexec"), (os.ST_NODEV if os.geteuid() == 0 else 0, "nodev")):
        if flags & flag:
            raise NodeError(
                f"{folder} lies on a file system mounted {name}",
                wanted="one on which programs run and device nodes open",
                remedy="set TMPDIR to a folder elsewhere",
            )
    if not all(c.isascii() and (c.isalnum() or c in "/._-+@") for c in str(folder)):
        raise NodeError(
            "the demo's folder",
            seen=repr(str(folder)),
            wanted="a path of letters, digits and . _ - + @",
            remedy="set TMPDIR to another folder",
        )
