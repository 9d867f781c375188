"""A real containerd with nothing of its own outside one folder, spoken to as the kubelet does: by CRI.

Messages are dictionaries of field numbers, as k8s.io/cri-api's runtime/v1/api.proto has them: no stubs to generate.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from gpulet.sim.cgroups import remove_tree

IMAGE = "localhost/probe:1"
NODE = 2  # NamespaceMode: the host's
# What isn't needed and wants a program, a kernel module or a folder outside ours.
WITHOUT = (
    "internal.v1.opt", "internal.v1.tracing", "tracing.processor.v1.otlp", "nri.v1.nri", "snapshotter.v1.aufs",
    "snapshotter.v1.btrfs", "snapshotter.v1.devmapper", "snapshotter.v1.zfs", "snapshotter.v1.blockfile",
)  # fmt: skip
CONFIG = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
disabled_plugins = {without}
[grpc]
address = "{folder}/s"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{image}"
restrict_oom_score_adj = true
disable_apparmor = true
stream_server_address = "127.0.0.1"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{folder}/cni"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
"""
RUNTIME = """\
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
BinaryName = "{path}"
"""
# In namespaces of its own: what it mounts and starts goes with it, and /run holds nothing of it.
START = 'mount --make-rprivate / && mount -t tmpfs tmpfs /run && exec containerd -c "$0"'


def encode(message: dict[int, Any]) -> bytes:
    """A protobuf message: text and bytes, numbers, messages as dictionaries, several of one field as a list."""
    return b"".join(_field(number, one) for number, value in message.items() for one in _several(value))


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _field(number: int, value: Any) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = encode(value) if isinstance(value, dict) else value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def decode(data: bytes) -> dict[int, Any]:
    """The fields of a message, the last of each: bytes or numbers."""
    found: dict[int, Any] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        tag = number()
        size = number()
        if tag & 7 == 2:
            found[tag >> 3], at = data[at : at + size], at + size
        else:
            found[tag >> 3] = size
    return found


def pairs(values: dict[str, str]) -> list[dict[int, Any]]:
    """A map<string, string>, or a list of KeyValue."""
    return [{1: key, 2: value} for key, value in values.items()]


def image_file(folder: Path, root: Path, env: list[str], name: str = IMAGE) -> Path:
    """An image as `docker save` writes it, of one root file system."""
    path = folder / "image.tar"
    with tarfile.open(folder / "layer.tar", "w") as layer:
        layer.add(root, ".")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin", *env], "Cmd": ["sleep", "999"]},
    }
    digest = subprocess.run(
        ["sha256sum", folder / "layer.tar"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    config["architecture"] = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    config |= {"rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]}}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as image:
        for file, content in (("config.json", config), ("manifest.json", manifest)):
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(file)
            info.size = len(data)
            image.addfile(info, io.BytesIO(data))
        image.add(folder / "layer.tar", "layer.tar")
    return path


class Containerd:
    """The daemon, until the `with` block ends. runtimes: handler name -> program; env: what it has in addition."""

    def __init__(self, runtimes: dict[str, Path], env: dict[str, str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gp"))  # short: socket paths have 107 bytes at most
        self.group = f"gpulet-test-{secrets.token_hex(4)}"
        self._env = env
        without = json.dumps([f"io.containerd.{name}" for name in WITHOUT])
        text = CONFIG.format(folder=self.folder, without=without, image=IMAGE)
        text += "".join(RUNTIME.format(name=name, path=path) for name, path in runtimes.items())
        (self.folder / "config.toml").write_text(text)
        (self.folder / "cni").mkdir()

    def __enter__(self) -> Containerd:
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", START]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(self.folder / "config.toml")], stdout=log, stderr=log, env={**os.environ, **self._env}
            )
        try:
            self._channel = grpc.insecure_channel(f"unix:{self.folder}/s")
            grpc.channel_ready_future(self._channel).result(timeout=30)
        except grpc.FutureTimeoutError:
            self.__exit__()
            raise RuntimeError((self.folder / "log").read_text()[-2000:]) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.send_signal(signal.SIGKILL)  # --kill-child: everything that it started ends with it
        self._process.wait()
        deadline = time.monotonic() + 10
        while True:
            try:
                remove_tree(self.group)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        shutil.rmtree(self.folder)

    def load(self, image: Path) -> None:
        """Imports an image."""
        done = subprocess.run(
            ["ctr", "-a", f"{self.folder}/s", "-n", "k8s.io", "image", "import", str(image)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    def call(self, method: str, message: dict[int, Any]) -> dict[int, Any]:
        """One call of CRI's RuntimeService. Raises grpc.RpcError."""
        do = self._channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
        return decode(do(encode(message), timeout=60))

    def pod(self, name: str, uid: str, handler: str) -> Pod:
        """Runs a Pod's sandbox on the host's network: no CNI is needed."""
        return Pod(self, name, uid, handler)


class Pod:
    """A Pod's sandbox, as the kubelet asks for it."""

    def __init__(self, engine: Containerd, name: str, uid: str, handler: str) -> None:
        self._engine = engine
        linux = {1: f"/{engine.group}/kubepods/besteffort/pod{uid}", 2: {1: {1: NODE}}}
        self._config = {1: {1: name, 2: uid, 3: "default"}, 3: str(engine.folder / "logs"), 8: linux}
        self.id = engine.call("RunPodSandbox", {1: self._config, 2: handler})[1].decode()

    def create(
        self, name: str, command: list[str], env: dict[str, str], annotations: dict[str, str] | None = None
    ) -> str:
        """A container that isn't started yet; its id."""
        config = {
            1: {1: name},
            2: {1: IMAGE},
            3: command,
            6: pairs(env),
            10: pairs(annotations or {}),
            11: f"{name}.log",
        }
        config[15] = {2: {3: {1: NODE}}}
        return self._engine.call("CreateContainer", {1: self.id, 2: config, 3: self._config})[1].decode()

    def start(self, container: str) -> float:
        """Starts a container; the seconds that took."""
        began = time.perf_counter()
        self._engine.call("StartContainer", {1: container})
        return time.perf_counter() - began

    def run(self, container: str, *command: str) -> tuple[int, str]:
        """A command in a container: exit code and standard output."""
        answer = self._engine.call("ExecSync", {1: container, 2: list(command), 3: 30})
        return answer.get(3, 0), answer.get(1, b"").decode()

    def limit(self, container: str, *, shares: int) -> None:
        """Changes a container's share of the CPU."""
        self._engine.call("UpdateContainerResources", {1: container, 2: {3: shares}})

    def remove(self) -> None:
        """Stops and removes the Pod and its containers."""
        self._engine.call("StopPodSandbox", {1: self.id})
        self._engine.call("RemovePodSandbox", {1: self.id})
