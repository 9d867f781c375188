"""Where a group runs: a folder with a simulated node, launchers and images. `Container` is one container's life by any
runtime.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from gpulet import mount_api
from gpulet.engines.launchers import write_launchers
from gpulet.errors import EngineError
from gpulet.sim import node as simulated
from gpulet.sim.cgroups import remove_tree
from gpulet.sim.images import ImageStore

LOW_LEVEL = "runc"
# as containerd gives them to a container that isn't privileged
NAMESPACES = ("pid", "ipc", "uts", "mount", "network")
CAPABILITIES = ("CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_MKNOD", "CAP_KILL", "CAP_SETGID", "CAP_SETUID")
MOUNTS = (
    ("/proc", "proc", "proc", ("nosuid", "noexec", "nodev")),
    ("/dev", "tmpfs", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5")),
    ("/dev/shm", "tmpfs", "shm", ("nosuid", "noexec", "nodev", "mode=1777", "size=65536k")),
    ("/dev/mqueue", "mqueue", "mqueue", ("nosuid", "noexec", "nodev")),
    ("/sys", "sysfs", "sysfs", ("nosuid", "noexec", "nodev", "ro")),
)


@dataclass(frozen=True)
class Runtime:
    """A contender: the program that an engine calls, its environment beside PATH, and what the image asks for."""

    name: str
    program: str = LOW_LEVEL
    environ: dict[str, str] = field(default_factory=dict)
    env: tuple[str, ...] = ()


BARE = Runtime("bare")


SETTLED = 2.5  # seconds: a node's configuration isn't new, and what is made of a new file isn't kept yet


def spec(arguments: list[str], env: tuple[str, ...], cgroup: str) -> dict[str, Any]:
    """A config.json, near to what containerd writes for a plain container."""
    sets = ("bounding", "effective", "permitted")
    return {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs"},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": arguments,
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", *env],
            "cwd": "/",
            "capabilities": {name: list(CAPABILITIES) for name in sets},
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": place, "type": kind, "source": source, "options": list(options)}
            for place, kind, source, options in MOUNTS
        ],
        "linux": {
            "cgroupsPath": cgroup,
            "namespaces": [{"type": name} for name in NAMESPACES],
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "maskedPaths": ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


class Site:
    """A folder for one group's work. Use it as a context: it leaves no container, control group or file behind."""

    def __init__(self, profile: str = "h100x8") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpb"))
        mount_api.mount(
            "gpulet-bench", str(self.folder), "tmpfs", mount_api.MS_NOSUID, "mode=755"
        )  # a disk's moods aren't ours
        self.cgroup = f"gpulet-bench-{os.getpid()}"
        self._images = ImageStore(self.folder / "images")
        self._number = 0
        self._living: dict[str, Container] = {}
        self._prefork: subprocess.Popen[bytes] | None = None
        try:
            self.node = simulated.create(self.folder / "node", profile)
            self.launchers = write_launchers(self.folder / "bin", self.folder / "nobody")
        except BaseException:
            self._clear()
            raise

    def __enter__(self) -> Site:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for container in list(self._living.values()):
            container.remove()
        remove_tree(self.cgroup)
        if self._prefork:
            self._prefork.terminate()
            self._prefork.wait()
        self._clear()

    def preforked(self) -> dict[str, Path]:
        """Launchers for which gpulet-prefork keeps workers; it starts with the first call."""
        workers = self.folder / "workers"
        launchers = {path.name: path for path in (self.folder / "prefork").glob("gpulet-*")}
        if not self._prefork:
            launchers = write_launchers(self.folder / "prefork", workers)
            self._prefork = subprocess.Popen([launchers["gpulet-prefork"]], stdin=subprocess.DEVNULL)
            while not list(workers.glob("*/*/answer")):
                if self._prefork.poll() is not None:
                    raise EngineError("gpulet-prefork", seen=f"ended with {self._prefork.returncode}")
                time.sleep(0.05)
        return launchers

    def _clear(self) -> None:
        mount_api.umount2(str(self.folder), mount_api.MNT_DETACH)
        self.folder.rmdir()

    def config(self, name: str, text: str) -> dict[str, str]:
        """Writes a config.toml and gives the environment in which every toolkit's program finds it."""
        folder = self.folder / "etc" / name
        (folder / "nvidia-container-runtime").mkdir(parents=True)
        path = folder / "nvidia-container-runtime/config.toml"
        path.write_text(text)
        return {"XDG_CONFIG_HOME": str(folder)}

    def container(self, runtime: Runtime, arguments: list[str] | None = None) -> Container:
        """A bundle of its own with a fresh root file system, ready for `create`."""
        self._number += 1
        name = f"gpb-{os.getpid()}-{self._number}"
        bundle = self.folder / "bundles" / name
        bundle.mkdir(parents=True)
        self._images.snapshot(bundle / "rootfs")
        made = spec(arguments or ["/bin/true"], runtime.env, f"/{self.cgroup}/{name}")
        (bundle / "config.json").write_text(json.dumps(made))
        container = Container(self, runtime, name, bundle)
        self._living[name] = container
        return container

    def forget(self, name: str) -> None:
        """A container is gone."""
        self._living.pop(name, None)


class Container:
    """One container. Every command goes to the contender's program, as an engine would call it."""

    def __init__(self, site: Site, runtime: Runtime, name: str, bundle: Path) -> None:
        self.site, self.runtime, self.name, self.bundle = site, runtime, name, bundle
        self._state = site.folder / "state"

    def run(self, *words: str, through: Runtime | None = None) -> str:
        """Runs one command and gives what it said. through: another than its own. Raises EngineError, its last line."""
        runtime = through or self.runtime
        log = self.bundle / "stderr"
        command = [runtime.program, "--root", str(self._state), *words]
        keep = subprocess.PIPE if words[0] == "state" else subprocess.DEVNULL
        with log.open("wb") as errors:  # a file: the container's own process holds its end of a pipe open
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=keep,
                stderr=errors,
                env={"PATH": os.environ["PATH"], **runtime.environ},
            )
        if done.returncode:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise EngineError(
                f"{runtime.name}: {words[0]} failed", seen=lines[-1] if lines else f"exit code {done.returncode}"
            )
        return done.stdout.decode() if done.stdout else ""

    def create(self) -> None:
        self.run("create", "--bundle", str(self.bundle), self.name)

    def start(self) -> None:
        self.run("start", self.name)

    def pid(self) -> int:
        """The container's first process."""
        return int(json.loads(self.run("state", self.name, through=BARE))["pid"])

    def delete(self) -> None:
        self.run("delete", "--force", self.name)

    def remove(self) -> None:
        """Ends it, whatever its state, and removes its folder."""
        self.run("delete", "--force", self.name, through=BARE)
        shutil.rmtree(self.bundle)
        self.site.forget(self.name)
