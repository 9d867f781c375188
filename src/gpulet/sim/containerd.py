"""A real containerd with nothing of its own outside one folder, spoken to as the kubelet does: by CRI.

Messages are dictionaries of field numbers, as k8s.io/cri-api's runtime/v1/api.proto has them: no stubs to generate.
For tests and benchmarks; root's, and containerd, ctr and runc must be in PATH.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from gpulet.errors import EngineError
from gpulet.sim.cgroups import remove_tree

Message = Mapping[int, Any]

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


def encode(message: Message) -> bytes:
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


def pairs(values: Mapping[str, str]) -> list[Message]:
    """A map<string, string>, or a list of KeyValue."""
    return [{1: key, 2: value} for key, value in values.items()]


def image_file(folder: Path, root: Path, env: Sequence[str] = ()) -> Path:
    """IMAGE as `docker save` writes it, made of a root file system. env: entries beside PATH."""
    layer = folder / "layer.tar"
    with tarfile.open(layer, "w") as archive:
        archive.add(root, ".")
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin", *env], "Cmd": ["sleep", "1000"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": [layer.name]}]
    path = folder / "image.tar"
    with tarfile.open(path, "w") as image:
        for name, content in (("config.json", config), ("manifest.json", manifest)):
            data = json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            image.addfile(info, io.BytesIO(data))
        image.add(layer, layer.name)
    return path


class Containerd:
    """The daemon, until the `with` block ends. runtimes: handler's name -> program; "runc" is always there."""

    def __init__(self, runtimes: Mapping[str, Path]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gp"))  # short: a socket's path has 107 bytes at most
        self.group = f"gpulet-test-{secrets.token_hex(4)}"
        without = json.dumps([f"io.containerd.{name}" for name in WITHOUT])
        text = CONFIG.format(folder=self.folder, without=without, image=IMAGE)
        handlers = {"runc": Path("runc"), **runtimes}
        text += "".join(RUNTIME.format(name=name, path=path) for name, path in handlers.items())
        (self.folder / "config.toml").write_text(text)
        (self.folder / "cni").mkdir()

    def __enter__(self) -> Containerd:
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", START]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen([*command, str(self.folder / "config.toml")], stdout=log, stderr=log)
        self._channel = grpc.insecure_channel(f"unix:{self.folder}/s")
        try:
            grpc.channel_ready_future(self._channel).result(timeout=30)
        except grpc.FutureTimeoutError:
            said = (self.folder / "log").read_text(errors="replace").splitlines()[-1:]
            self.__exit__()
            raise EngineError("containerd doesn't answer", seen=said) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()  # --kill-child: everything that it started ends with it
        self._process.wait()
        self._remove_groups()
        shutil.rmtree(self.folder)

    def _remove_groups(self) -> None:
        """The control groups can go as soon as the last process in them has ended."""
        deadline = time.monotonic() + 10
        while True:
            try:
                return remove_tree(self.group)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def load(self, image: Path) -> None:
        """Imports an image."""
        command = ["ctr", "-a", f"{self.folder}/s", "-n", "k8s.io", "image", "import", str(image)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise EngineError("ctr imports no image", seen=done.stderr.strip())

    def call(self, method: str, message: Message) -> dict[int, Any]:
        """One call of CRI's RuntimeService. Raises grpc.RpcError."""
        do = self._channel.unary_unary(f"/runtime.v1.RuntimeService/{method}")
        return decode(do(encode(message), timeout=60))

    def pod(self, name: str, uid: str, handler: str) -> Pod:
        """Runs a Pod's sandbox, on the host's network: no CNI is needed."""
        return Pod(self, name, uid, handler)


class Pod:
    """A Pod's sandbox, as the kubelet asks for it."""

    def __init__(self, engine: Containerd, name: str, uid: str, handler: str) -> None:
        self._engine = engine
        linux = {1: f"/{engine.group}/kubepods/besteffort/pod{uid}", 2: {1: {1: NODE}}}
        self._config = {1: {1: name, 2: uid, 3: "default"}, 3: str(engine.folder / "logs"), 8: linux}
        self.id = engine.call("RunPodSandbox", {1: self._config, 2: handler})[1].decode()

    def create(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> str:
        """A container that isn't started yet; its id."""
        config = {
            1: {1: name},
            2: {1: IMAGE},
            3: list(command),
            6: pairs(env),
            11: f"{name}.log",
            15: {2: {3: {1: NODE}}},
        }
        made = self._engine.call("CreateContainer", {1: self.id, 2: config, 3: self._config})
        return str(made[1].decode())

    def start(self, container: str) -> None:
        """Starts a container."""
        self._engine.call("StartContainer", {1: container})

    def run(self, container: str, *command: str) -> tuple[int, str]:
        """A command in a container: exit code and standard output."""
        answer = self._engine.call("ExecSync", {1: container, 2: list(command), 3: 30})
        return answer.get(3, 0), answer.get(1, b"").decode()

    def limit(self, container: str, *, shares: int) -> None:
        """Changes a container's share of the CPU."""
        self._engine.call("UpdateContainerResources", {1: container, 2: {3: shares}})

    def end(self, container: str) -> None:
        """Kills and removes a container."""
        self._engine.call("StopContainer", {1: container})
        self._engine.call("RemoveContainer", {1: container})

    def remove(self) -> None:
        """Stops and removes the Pod and its containers."""
        self._engine.call("StopPodSandbox", {1: self.id})
        self._engine.call("RemovePodSandbox", {1: self.id})
