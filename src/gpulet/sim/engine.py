"""The container engine's part: a Pod's container and the plugin's answer become an OCI bundle, and a real low-level
runtime starts it through gpulet-runtime, called the way containerd calls it.

What containerd 2 really does was taken from a real cluster: its config.json (`cri_spec.py`) and the arguments of
`create`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulet.errors import EngineError
from gpulet.sim import cdi_engine
from gpulet.sim.allocation import Allocation
from gpulet.sim.cgroups import remove_tree
from gpulet.sim.cri_spec import oci_config
from gpulet.sim.images import ImageStore
from gpulet.sim.pods import ContainerSpec, Pod

CDI_PREFIX = "cdi.k8s.io/"


@dataclass(frozen=True)
class Handler:
    """A runtime handler, as in containerd's `runtimes.<name>`: the program, and its configuration's file."""

    name: str
    program: Path
    config: Path


@dataclass
class RunningContainer:
    """A container that was created. `before` and `after` are its config.json around the runtime's `create`."""

    id: str
    name: str
    bundle: Path
    handler: Handler
    pid: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    create_ms: float = 0.0

    @property
    def stdout(self) -> Path:
        return self.bundle / "stdout"


class Engine:
    """Creates, starts and removes containers below one folder.

    cdi_folders: where a CDI-capable engine looks for specs; cdi=False makes an engine that only hands the CDI
    annotations on, as with containerd's `container_annotations`. device_root: below it lies the dev/ whose nodes a
    privileged container gets.
    """

    def __init__(
        self,
        folder: Path,
        images: ImageStore,
        handlers: Mapping[str, Handler],
        *,
        cdi_folders: Sequence[Path] = (),
        cdi: bool = True,
        device_root: Path = Path("/"),
        cgroup_parent: str,
    ) -> None:
        self._folder = folder
        self._images = images
        self._handlers = handlers
        self._cdi_folders = cdi_folders
        self._cdi = cdi
        self._device_root = device_root
        self._cgroup_parent = cgroup_parent
        self._state = folder / "state"
        self._containers: dict[str, RunningContainer] = {}
        self._sandboxes: dict[str, RunningContainer] = {}

    def handler(self, pod: Pod) -> Handler:
        """The handler of a Pod's runtimeClassName."""
        name = pod.runtime_class or "nvidia"
        if name not in self._handlers:
            raise EngineError(
                f'Pod {pod.name}: RuntimeHandler "{name}" not supported',
                wanted=f"one of {', '.join(self._handlers)}",
                remedy="correct spec.runtimeClassName",
            )
        return self._handlers[name]

    def run_sandbox(self, pod: Pod) -> RunningContainer:
        """The Pod's "pause" container: it holds the namespaces, and passes through the runtime's handler too."""
        if pod.uid not in self._sandboxes:
            sandbox = self.prepare(pod, None, None, args=["/bin/busybox", "sleep", "2147483647"])
            self._sandboxes[pod.uid] = sandbox
            self.create(sandbox)
            self.start(sandbox)
        return self._sandboxes[pod.uid]

    def prepare(
        self,
        pod: Pod,
        spec: ContainerSpec | None,
        allocation: Allocation | None,
        *,
        args: Sequence[str],
        cdi: bool = True,
    ) -> RunningContainer:
        """Writes a container's bundle; needs no privilege but for CDI edits, which look at device nodes (cdi=False
        leaves them out). No spec: the sandbox."""
        sandbox = self._sandboxes.get(pod.uid)
        name = container_id(pod, spec)
        bundle = self._folder / "bundles" / name
        bundle.mkdir(parents=True)
        self._images.snapshot(bundle / "rootfs")
        config = oci_config(
            pod,
            spec,
            allocation,
            args=args,
            sandbox_pid=sandbox.pid if sandbox else 0,
            cgroups_path=f"/{self._cgroup_parent}/kubepods/besteffort/pod{pod.uid}/{name}",
            cdi_annotations=not self._cdi,
        )
        if spec and spec.privileged:
            cdi_engine.apply(config, [{"deviceNodes": self._all_nodes()}])
        if cdi and self._cdi and allocation:
            names = cdi_names(allocation)
            if names:
                cdi_engine.apply(config, cdi_engine.find(names, self._cdi_folders))
        (bundle / "config.json").write_text(json.dumps(config))
        container = RunningContainer(name, spec.name if spec else "", bundle, self.handler(pod), before=config)
        self._containers[name] = container
        return container

    def _all_nodes(self) -> list[dict[str, str]]:
        """The machine's GPU nodes, which a privileged container gets whatever it asked for."""
        found = sorted(self._device_root.glob("dev/nvidia*"))
        nodes = [path for path in found if path.is_char_device()]
        return [{"path": f"/dev/{path.name}", "hostPath": str(path), "permissions": "rwm"} for path in nodes]

    def create(self, container: RunningContainer) -> None:
        """Calls the runtime's `create`, as containerd does; its own words on failure."""
        bundle = container.bundle
        arguments = ["create", "--bundle", str(bundle), "--pid-file", str(bundle / "init.pid"), container.id]
        started = time.perf_counter()
        with container.stdout.open("wb") as out, (bundle / "stderr").open("wb") as errors:
            result = self._call(container, arguments, stdout=out, stderr=errors)
        container.create_ms = (time.perf_counter() - started) * 1e3
        if result.returncode:
            raise EngineError(f"container {container.name} was not created", seen=self._complaint(container))
        try:
            container.pid = int((bundle / "init.pid").read_text())
        except (OSError, ValueError) as error:
            raise EngineError(
                f"container {container.name}",
                seen="created, but the runtime wrote no pid file",
                wanted="an OCI runtime",
            ) from error
        container.after = json.loads((bundle / "config.json").read_text())

    def start(self, container: RunningContainer) -> None:
        """Calls the runtime's `start`."""
        with (container.bundle / "stderr").open("ab") as errors:
            if self._call(container, ["start", container.id], stderr=errors).returncode:
                raise EngineError(f"container {container.name} was not started", seen=self._complaint(container))

    def first_line(self, container: RunningContainer, timeout: float = 20.0) -> str:
        """The first whole line that the container writes to its output."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            head, newline, _rest = container.stdout.read_text(errors="replace").partition("\n")
            if newline:
                return head
            if not self.alive(container):
                raise EngineError(f"container {container.name} ended early", seen=self._complaint(container))
            time.sleep(0.002)
        raise EngineError(f"container {container.name} is silent", seen=f"nothing within {timeout:.0f} s")

    @staticmethod
    def alive(container: RunningContainer) -> bool:
        """Whether the container's first process still runs."""
        try:
            state = Path(f"/proc/{container.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def remove(self, container: RunningContainer, *, keep: bool = False) -> None:
        """Ends and deletes a container with its bundle; nothing of it stays, but the bundle where it is to be kept."""
        if container.pid and self.alive(container):
            self._call(container, ["kill", container.id, "KILL"], stderr=subprocess.DEVNULL)
        self._call(container, ["delete", "--force", container.id], stderr=subprocess.DEVNULL)
        if not keep:
            shutil.rmtree(container.bundle, ignore_errors=True)
        self._containers.pop(container.id, None)

    def close(self, *, keep: bool = False) -> None:
        """Removes every container, sandboxes last, and the control groups that their paths made."""
        sandboxes = {sandbox.id for sandbox in self._sandboxes.values()}
        for container in sorted(self._containers.values(), key=lambda one: one.id in sandboxes):
            self.remove(container, keep=keep)
        self._sandboxes.clear()
        remove_tree(self._cgroup_parent)

    def running(self) -> list[RunningContainer]:
        """The containers that were started, without the sandboxes, in order."""
        sandboxes = {sandbox.id for sandbox in self._sandboxes.values()}
        return [one for one in self._containers.values() if one.pid and one.id not in sandboxes]

    def command(self, container: RunningContainer, arguments: Sequence[str]) -> list[str]:
        """The whole command line for one call of the runtime."""
        log = ["--log", str(container.bundle / "log.json"), "--log-format", "json"]
        return [str(container.handler.program), "--root", str(self._state), *log, *arguments]

    def _call(
        self, container: RunningContainer, arguments: Sequence[str], *, stdout: Any = subprocess.DEVNULL, stderr: Any
    ) -> subprocess.CompletedProcess[bytes]:
        # the container's first process inherits these descriptors, so they are files and never pipes
        environment = {"PATH": os.environ.get("PATH", os.defpath), "GPULET_CONFIG": str(container.handler.config)}
        return subprocess.run(
            self.command(container, arguments),
            cwd=container.bundle,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            check=False,
        )

    @staticmethod
    def _complaint(container: RunningContainer) -> str:
        """What the runtime said last: its log, which is what an engine shows to people, else its stderr."""
        for name in ("log.json", "stderr"):
            path = container.bundle / name
            lines = [line for line in path.read_text(errors="replace").splitlines() if line] if path.exists() else []
            for line in reversed(lines):
                try:
                    record = json.loads(line)
                except ValueError:
                    return line
                if record.get("level") in ("error", "fatal"):
                    return str(record.get("msg", line))
        return "no message"


def cdi_names(allocation: Allocation) -> list[str]:
    """The CDI devices of an answer: those of the CRI field, then those of the annotations; each once."""
    names = list(allocation.cdi_devices)
    for key in sorted(allocation.annotations):
        if key.startswith(CDI_PREFIX):
            names += allocation.annotations[key].split(",")
    return list(dict.fromkeys(names))


def container_id(pod: Pod, spec: ContainerSpec | None) -> str:
    """A name for a container's bundle and state: readable, and unique whatever names the Pod carries (a Pod's name
    may have 253 characters, a file's 255). Only letters, digits, ".", "_" and "-", which runc takes."""
    whole = "/".join((pod.namespace, pod.name, pod.uid, spec.name if spec else ""))
    readable = f"{pod.name[:40]}-{spec.name[:20] if spec else 'sandbox'}"
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in readable)
    return f"{safe}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"
