"""The answers on the wire beside those of the plugin that we stand in for; PEER_DEVICE_PLUGIN names its binary."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.sim import node as simulated
from gpulet.sim.inject import inject
from support.plugin_process import short_folder, until

PEER = os.environ.get("PEER_DEVICE_PLUGIN", "")
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not PEER, reason="PEER_DEVICE_PLUGIN names no binary"),
    pytest.mark.skipif(os.geteuid() != 0, reason="device nodes and mount namespaces need root"),
]
FIXED = "/var/lib/kubelet/device-plugins"
PLACED = (  # in a mount namespace: our folders and the node's where the peer has fixed places
    'mount -t tmpfs none /var/lib && mkdir -p "$1" && mount --bind "$0" "$1" && mount -t tmpfs none /run && '
    'mkdir -p /run/cdi && mount --bind "$2" /run/cdi && mount --bind "$3/sys" /sys && '
    'mount --bind "$3/proc/driver" /proc/driver && mount --bind "$3/dev" /dev && shift 3 && exec "$@"'
)


class Ears(rpc.RegistrationServicer):
    """Takes down what plugins register, and asks each for its list and two answers."""

    def __init__(self, folder):
        self.folder, self.seen, self.lock = folder, {}, threading.Lock()
        self.pool = ThreadPoolExecutor(8)
        self.server = grpc.server(self.pool)
        rpc.add_RegistrationServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix:{folder}/kubelet.sock")
        self.server.start()

    def Register(self, request, context):
        with self.lock:
            self.seen[request.resource_name] = request
        return pb.Empty()

    def close(self):
        self.server.stop(None).wait()
        self.pool.shutdown()

    def told(self, name, root):
        """Everything one resource says, in plain data; `root` in paths as ROOT, random parts of keys as TOKEN."""
        request = self.seen[name]
        with grpc.insecure_channel(f"unix:{self.folder}/{request.endpoint}") as channel:
            stub = rpc.DevicePluginStub(channel)
            stream = stub.ListAndWatch(pb.Empty(), wait_for_ready=True)
            devices = sorted(
                (item.ID, item.health, tuple(node.ID for node in item.topology.nodes), item.HasField("topology"))
                for item in next(iter(stream)).devices
            )
            stream.cancel()
            ids = [item[0] for item in devices]
            said = {
                "register": (request.version, request.endpoint, str(request.options)),
                "options": str(stub.GetDevicePluginOptions(pb.Empty())),
                "devices": devices,
                "one": _answer(stub, ids[:1], root),
                "two": _answer(stub, [ids[0], ids[-1]], root),
                "unknown": _answer(stub, ["nobody"], root),
                "none": _answer(stub, [], root),
            }
            for size in {1, min(2, len(ids)), len(ids)}:
                wanted = pb.ContainerPreferredAllocationRequest(available_deviceIDs=ids, allocation_size=size)
                reply = stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[wanted]))
                said[f"prefer {size}"] = len(reply.container_responses[0].deviceIDs)
        return said


def _answer(stub, ids, root):
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)])
    try:
        (answer,) = stub.Allocate(request).container_responses
    except grpc.RpcError as error:
        return re.sub("^(Unknown|UNKNOWN).*desc = ", "", error.details())
    return {
        "envs": {name: ",".join(sorted(value.split(","))) for name, value in answer.envs.items()},
        "mounts": sorted((one.container_path, one.host_path, one.read_only) for one in answer.mounts),
        "devices": sorted(
            {(one.container_path, one.host_path.replace(root, "ROOT"), one.permissions) for one in answer.devices}
        ),
        "annotations": {
            re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "TOKEN", key): sorted(value.split(","))
            for key, value in answer.annotations.items()
        },
        "cdi": sorted(one.name for one in answer.cdi_devices),
    }


def answers(node, command, environ, resources):
    """What the plugin that `command` starts says of each resource, and the CDI classes that it wrote."""
    with short_folder() as folder:
        sockets, cdi = folder / "s", folder / "cdi"
        sockets.mkdir(), cdi.mkdir()
        ears = Ears(sockets)
        words = [part.replace("SOCKETS", str(sockets)).replace("CDI", str(cdi)) for part in command]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env={"PATH": os.environ["PATH"], **environ})  # fmt: skip
        try:
            until(lambda: len(ears.seen) >= resources or process.poll() is not None)
            count = 0
            while count != len(ears.seen):  # each resource registers by itself
                count = len(ears.seen)
                time.sleep(0.4)
            if process.poll() is not None:
                pytest.fail((folder / "log").read_text()[-2000:])
            told = {name: ears.told(name, str(node.root)) for name in sorted(ears.seen)}
            return told, sorted(os.listdir(cdi))
        finally:
            process.terminate()
            process.wait(10)
            ears.close()


@pytest.fixture(scope="module")
def nodes():
    made = {}
    with short_folder() as folder:

        def node(profile):
            if profile not in made:
                name, *changes = profile.split()
                made[profile] = simulated.create(folder / profile.replace(" ", "-"), name)
                for index in range(8 if "all" in changes else 2 if changes else 0):
                    inject(made[profile].folder, f"mig gpu{index} 1g.5gb x7" if index != 1 or "all" in changes
                           else "mig gpu1 3g.20gb x2")  # fmt: skip
                for library in made[profile].library_folder.glob("libnvidia-sandboxutils.so*"):
                    library.unlink()  # the peer calls it while it writes CDI specs, and a stand-in has no such symbols
            return made[profile]

        yield node


SLICED = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}"
RENAMED = "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 3}]}}"
STRICT = "sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}"
CASES = {
    "envvar": ("h100x8", "", []),
    "index": ("h100x8", "", ["--device-id-strategy=index"]),
    "volume-mounts": ("h100x8", "", ["--device-list-strategy=volume-mounts"]),
    "volume-mounts index": ("h100x8", "", ["--device-list-strategy=volume-mounts", "--device-id-strategy=index"]),
    "both": ("h100x8", "", ["--device-list-strategy=envvar,volume-mounts"]),
    "cdi-cri": ("h100x8", "", ["--device-list-strategy=cdi-cri"]),
    "cdi-annotations": ("h100x8", "", ["--device-list-strategy=cdi-annotations"]),
    "cdi index": ("h100x8", "", ["--device-list-strategy=cdi-annotations,cdi-cri", "--device-id-strategy=index"]),
    "cdi prefix": ("h100x8", "", ["--device-list-strategy=cdi-annotations", "--cdi-annotation-prefix=x.cdi.k8s.io/"]),
    "cdi and envvar": ("h100x8", "", ["--device-list-strategy=cdi-cri,envvar"]),
    "gates": ("h100x8", "", ["--gdrcopy-enabled", "--gds-enabled", "--mofed-enabled"]),
    "gates cdi": ("h100x8", "", ["--device-list-strategy=cdi-cri", "--gdrcopy-enabled", "--gds-enabled"]),
    "replicas": ("h100x8", SLICED, []),
    "replicas renamed": ("h100x8", RENAMED, []),
    "replicas strict": ("h100x8", STRICT, []),
    "replicas index": ("h100x8", SLICED, ["--device-id-strategy=index"]),
    "packed": ("h100x8", SLICED, ["--shared-devices-allocation-policy=packed"]),
    "sixteen": ("h100x16", "", []),
    "several models": ("mixed", "", []),
    "several models, mixed": ("mixed", "", ["--mig-strategy=mixed"]),
    "holes": ("sparse", "", []),
    "tegra": ("tegra", "", ["--device-discovery-strategy=tegra"]),
    "tegra index": ("tegra", "", ["--device-discovery-strategy=tegra", "--device-id-strategy=index"]),
    "tegra replicas": ("tegra", SLICED, ["--device-discovery-strategy=tegra"]),
    "patterns": ("mixed", "resources: {gpus: [{pattern: '*H100*', name: h100}, {pattern: '*', name: gpu}]}", []),
    "device nodes": ("h100x8", "", ["--pass-device-specs"]),
    "device nodes of replicas": ("h100x8", SLICED, ["--pass-device-specs"]),
    "device nodes and cdi": ("h100x8", "", ["--pass-device-specs", "--device-list-strategy=cdi-cri"]),
    "device nodes, cdi and envvar": (
        "h100x8",
        "",
        ["--pass-device-specs", "--device-list-strategy=cdi-cri,volume-mounts"],
    ),
    "imex": ("h100x8", "", ["--imex-channel-ids=0"]),
    "imex cdi": ("h100x8", "", ["--imex-channel-ids=0", "--device-list-strategy=cdi-cri"]),
    "imex volume-mounts": ("gb200x4", "", ["--imex-channel-ids=0", "--device-list-strategy=volume-mounts"]),
    "slices none": ("a100x8 mig", "", []),
    "slices single": ("a100x8 mig all", "", ["--mig-strategy=single"]),
    "slices mixed": ("a100x8 mig", "", ["--mig-strategy=mixed"]),
    "slices mixed index": ("a100x8 mig", "", ["--mig-strategy=mixed", "--device-id-strategy=index"]),
    "slices mixed cdi": ("a100x8 mig", "", ["--mig-strategy=mixed", "--device-list-strategy=cdi-annotations"]),
    "slices mixed nodes": ("a100x8 mig", "", ["--mig-strategy=mixed", "--pass-device-specs"]),
}


@pytest.mark.parametrize("case", CASES)
def test_same_answers(nodes, case, tmp_path):
    profile, text, words = CASES[case]
    node = nodes(profile)
    config = tmp_path / "c.yaml"
    config.write_text(f"version: v1\n{text}\n")
    ours, our_classes = answers(
        node,
        [sys.executable, "-m", "gpulet.plugin.main", f"--driver-root={node.root}", "--kubelet-socket-dir=SOCKETS",
         "--cdi-spec-dir=CDI", f"--config-file={config}", "--state-dir=", *words],
        {}, 1,
    )  # fmt: skip
    theirs, their_classes = answers(
        node,
        ["unshare", "-m", "sh", "-c", PLACED, "SOCKETS", FIXED, "CDI", str(node.root), PEER,
          f"--nvidia-driver-root={node.root}",
         f"--driver-root-ctr-path={node.root}", f"--config-file={config}", *words],
        {"LD_LIBRARY_PATH": str(node.library_folder)}, len(ours),
    )  # fmt: skip
    differences = {
        f"{name} {about}": (said[about], theirs.get(name, {}).get(about))
        for name, said in ours.items()
        for about in said
        if said[about] != theirs.get(name, {}).get(about)
    }
    lines = [f"{name}: {one!r} != {other!r}" for name, (one, other) in differences.items()]
    assert not lines, "\n".join(lines)
    assert sorted(ours) == sorted(theirs)
    assert our_classes == their_classes
