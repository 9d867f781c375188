"""A device plugin as a process on a simulated node, with a kubelet that takes notes of when it hears what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from bench.peers import Peers
from gpulet.errors import NodeError
from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.sim.node import SimNode

PATIENCE = 30.0  # seconds
KUBELETS_FOLDER = "/var/lib/kubelet/device-plugins"  # where the peer's own sockets always are
# In a mount namespace of its own: the folder of this run is where the peer looks for the kubelet's.
AT_ITS_PLACE = 'mount -t tmpfs none /var/lib && mkdir -p "$1" && mount --bind "$0" "$1" && shift && exec "$@"'


class Ear(rpc.RegistrationServicer):  # type: ignore[misc]
    """The kubelet's side for one plugin with one resource. Moments are those of time.perf_counter()."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        folder.mkdir(parents=True)
        self.folder = folder
        self.registered = 0.0
        self.asked = 0.0
        self.listed = 0.0
        self.devices: dict[str, str] = {}  # id -> health
        self.changed = threading.Condition()
        self.stub: Any = None
        self._stream: Any = None
        self._channel: Any = None
        self._reader: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{folder}/kubelet.sock")
        self._server.start()

    def Register(self, request: Any, context: Any) -> Any:
        """A plugin is there: its list is read from now on, in a thread."""
        with self.changed:
            if not self.registered:
                self.registered = time.perf_counter()
                self._reader = threading.Thread(target=self._read, args=(request.endpoint,), daemon=True)
                self._reader.start()
        return pb.Empty()

    def _read(self, endpoint: str) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))
        self._channel = grpc.insecure_channel(f"unix:{self.folder}/{endpoint}", options=options)
        self.stub = rpc.DevicePluginStub(self._channel)
        self.asked = time.perf_counter()
        self._stream = self.stub.ListAndWatch(pb.Empty())
        try:
            for message in self._stream:
                heard = time.perf_counter()
                with self.changed:
                    self.listed = self.listed or heard
                    self.devices = {device.ID: device.health for device in message.devices}
                    self.changed.notify_all()
        except grpc.RpcError:
            pass  # the plugin has ended, or we have

    def wait(self, condition: Callable[[], bool], what: str, patience: float = PATIENCE) -> float:
        """Waits for a condition on what was heard; the moment when it held. patience: seconds. Raises NodeError."""
        with self.changed:
            if not self.changed.wait_for(condition, patience):
                raise NodeError(f"the device plugin did not {what}", seen=f"nothing within {patience:g} s")
        return time.perf_counter()

    def close(self) -> None:
        """Ends the stream and the service."""
        if self._stream:
            self._stream.cancel()
        if self._reader:
            self._reader.join(5)
        if self._channel:
            self._channel.close()
        self._server.stop(None).wait()
        self._pool.shutdown()


class Plugin:
    """A plugin's process, registered and heard. Use it as a context."""

    def __init__(self, name: str, command: list[str], environ: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.ear = Ear(folder / "kubelet")
        self._folder = folder
        self.began = time.perf_counter()
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": os.environ["PATH"], **environ}
            )
        try:
            self.ear.wait(lambda: bool(self.ear.devices), "list its devices")
        except NodeError as error:
            self.close()
            lines = (folder / "log").read_text(errors="replace").strip().splitlines()
            raise NodeError(f"{name}: {error.what}", seen=lines[-1] if lines else "no word in its log") from error

    def resident(self) -> float:
        """The process's resident memory, MiB (VmRSS of proc_pid_status(5))."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        raise NodeError(f"{self.name}: no resident memory", remedy="it has ended")

    def close(self) -> None:
        """Ends process and kubelet."""
        self.ear.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Plugin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        shutil.rmtree(self._folder)


def makers(peers: Peers, node: SimNode, place: Path) -> dict[str, Callable[[int], Plugin]]:
    """Who can be started on a node: name -> (replicas of each GPU) -> Plugin. place: a folder with a short path."""
    numbers = iter(range(1_000_000))

    def folder(replicas: int) -> Path:
        made = place / f"p{next(numbers)}"
        made.mkdir()
        config = (
            f"version: v1\nsharing: {{timeSlicing: {{resources: [{{name: nvidia.com/gpu, replicas: {replicas}}}]}}}}\n"
        )
        (made / "config.yaml").write_text(config if replicas > 1 else "version: v1\n")
        return made

    def ours(replicas: int) -> Plugin:
        at = folder(replicas)
        command = [sys.executable, "-m", "gpulet.plugin.entry", f"--driver-root={node.root}"]
        command += [f"--kubelet-socket-dir={at}/kubelet", f"--config-file={at}/config.yaml", f"--state-dir={at}/state"]
        return Plugin("gpulet", command, {}, at)

    def theirs(replicas: int) -> Plugin:
        at = folder(replicas)
        command = ["unshare", "-m", "sh", "-c", AT_ITS_PLACE, f"{at}/kubelet", KUBELETS_FOLDER, peers.device_plugin]
        command += [f"--config-file={at}/config.yaml", f"--nvidia-driver-root={node.root}"]
        return Plugin("peer", command, {"LD_LIBRARY_PATH": str(node.library_folder)}, at)

    return {"gpulet": ours, **({"peer": theirs} if peers.device_plugin else {})}
