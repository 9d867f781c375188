"""The embedded kubelet against a plugin of three lines, for what the real plugin doesn't do."""

from __future__ import annotations

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from gpulet.plugin.api import deviceplugin_pb2 as pb
from gpulet.plugin.api import deviceplugin_pb2_grpc as rpc
from gpulet.sim.allocation import DeviceSpec, Mount, merge
from gpulet.sim.kubelet import AdmissionError, Kubelet
from gpulet.sim.pods import ContainerSpec, Pod
from support.plugin_process import short_folder, until


class TinyPlugin(rpc.DevicePluginServicer):
    """Answers with whatever the test puts into it."""

    def __init__(self, folder, resource="example.com/gpu", devices=("a", "b", "c"), prefer=None):
        self.resource, self.prefer = resource, prefer
        self.health = dict.fromkeys(devices, "Healthy")
        self.numa = {}
        self.order = []
        self.fail = None
        self._changed, self._stopping = threading.Condition(), False
        self.socket = folder / f"{resource.partition('/')[2]}.sock"
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool)
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def register(self, folder, version="v1beta1", resource=None):
        with grpc.insecure_channel(f"unix:{folder}/kubelet.sock") as channel:
            request = pb.RegisterRequest(
                version=version, endpoint=self.socket.name, resource_name=resource or self.resource
            )
            rpc.RegistrationStub(channel).Register(request, timeout=10)
        self.order.append("registered")

    def set(self, **health):
        with self._changed:
            self.health |= health
            self._changed.notify_all()

    def stop(self):
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._server.stop(None).wait()
        self._pool.shutdown()

    def GetDevicePluginOptions(self, request, context):
        self.order.append("options")
        return pb.DevicePluginOptions(get_preferred_allocation_available=self.prefer is not None)

    def ListAndWatch(self, request, context):
        self.order.append("list")
        while not self._stopping:
            with self._changed:
                devices = [
                    pb.Device(ID=one, health=health, topology=self.numa.get(one)) for one, health in self.health.items()
                ]
            yield pb.ListAndWatchResponse(devices=devices)
            with self._changed:
                self._changed.wait(5)

    def GetPreferredAllocation(self, request, context):
        if self.fail:
            context.abort(grpc.StatusCode.UNKNOWN, self.fail)
        (one,) = request.container_requests
        chosen = self.prefer(list(one.available_deviceIDs), list(one.must_include_deviceIDs), one.allocation_size)
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=chosen)]
        )

    def Allocate(self, request, context):
        if self.fail:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.fail)
        (one,) = request.container_requests
        answer = pb.ContainerAllocateResponse(envs={"IDS": ",".join(one.devices_ids)})
        return pb.AllocateResponse(container_responses=[answer])


@pytest.fixture
def folder():
    with short_folder() as folder:
        yield folder


@pytest.fixture
def kubelet(folder):
    with Kubelet(folder) as kubelet:
        yield kubelet


@pytest.fixture
def plugin(folder, kubelet):
    plugin = TinyPlugin(folder)
    plugin.register(folder)
    kubelet.wait_for("example.com/gpu", 3)
    yield plugin
    plugin.stop()


GPU = "example.com/gpu"


def container(name, gpu) -> ContainerSpec:
    return ContainerSpec(name, limits={GPU: gpu})


def test_it_calls_back_before_it_answers(plugin):
    until(lambda: len(plugin.order) == 3)
    assert plugin.order.index("options") < plugin.order.index("registered")


@pytest.mark.parametrize(
    ("version", "resource", "message"),
    [
        ("v1alpha", None, "not supported by kubelet"),
        ("v1beta1", "cpu", "'cpu' is invalid"),
        ("v1beta1", "kubernetes.io/x", "invalid"),
    ],
)
def test_registrations_that_are_refused(folder, kubelet, plugin, version, resource, message):
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(folder, version, resource)
    assert message in caught.value.details()
    assert len(kubelet.registrations) == 1


def test_a_plugin_that_is_not_there(folder, kubelet, monkeypatch):
    monkeypatch.setattr("gpulet.sim.endpoint.CALL_BACK_TIMEOUT", 0.3)
    plugin = TinyPlugin(folder)
    plugin.stop()
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(folder)
    assert "failed to dial device plugin" in caught.value.details()


def test_health_and_the_end_of_a_stream(kubelet, plugin):
    plugin.set(b="Unhealthy")
    status = kubelet.wait_for(GPU, 2)
    assert (status.capacity, status.healthy, status.unhealthy) == (3, ("a", "c"), ("b",))
    plugin.stop()
    status = kubelet.wait_for(GPU, 0)
    assert status.capacity == 3
    with pytest.raises(AdmissionError, match="no healthy devices"):
        kubelet.allocate("pod", "main", {GPU: 1})


def test_devices_are_held_until_the_pod_is_gone(kubelet, plugin):
    first = kubelet.allocate("one", "main", {GPU: 2})
    second = kubelet.allocate("two", "main", {GPU: 1})
    assert not set(first.device_ids[GPU]) & set(second.device_ids[GPU])
    with pytest.raises(AdmissionError, match="Requested: 1, Available: 0"):
        kubelet.allocate("three", "main", {GPU: 1})
    kubelet.release("one")
    assert set(kubelet.allocate("three", "main", {GPU: 2}).device_ids[GPU]) == set(first.device_ids[GPU])


def test_a_plugins_refusal(kubelet, plugin):
    plugin.fail = "not this one"
    with pytest.raises(AdmissionError) as caught:
        kubelet.allocate("pod", "main", {GPU: 1})
    assert str(caught.value) == (
        "UnexpectedAdmissionError: Allocate failed due to rpc error: code = InvalidArgument desc = not this one, "
        "which is unexpected"
    )
    assert json.loads(kubelet.checkpoint.read_text())["Data"]["PodDeviceEntries"] is None


def test_the_preferred_are_taken_and_the_rest_filled_up(folder, kubelet):
    plugin = TinyPlugin(folder, devices="abcde", prefer=lambda available, required, size: ["e", "nonsense", "b"])
    plugin.register(folder)
    kubelet.wait_for(GPU, 5)
    assert kubelet.allocate("one", "main", {GPU: 3}).device_ids[GPU] == ("e", "b", "a")
    plugin.fail = "no idea"
    with pytest.raises(AdmissionError, match="code = Unknown desc = no idea"):
        kubelet.allocate("two", "main", {GPU: 1})
    plugin.fail = None
    kubelet.allocate("two", "main", {GPU: 2})  # as many as are free: nothing to prefer
    assert [name for name, _, _ in kubelet.calls].count("GetPreferredAllocation") == 2
    plugin.stop()


def test_init_containers_hand_their_devices_on(kubelet, plugin):
    pod = Pod("p", (container("main", gpu=2), container("side", gpu=1)), (container("init", gpu=2),), uid="uid")
    given = kubelet.admit(pod)
    assert set(given["init"].device_ids[GPU]) == set(given["main"].device_ids[GPU])
    assert not set(given["main"].device_ids[GPU]) & set(given["side"].device_ids[GPU])


def test_a_native_sidecar_keeps_its_devices(kubelet, plugin):
    sidecar = ContainerSpec("sidecar", limits={GPU: 1}, restart_always=True)
    pod = Pod("p", (container("main", gpu=2),), (container("init", gpu=2), sidecar), uid="uid")
    given = kubelet.admit(pod)
    assert set(given["sidecar"].device_ids[GPU]) < set(given["init"].device_ids[GPU])
    assert not set(given["sidecar"].device_ids[GPU]) & set(given["main"].device_ids[GPU])


def test_a_pod_that_is_refused_holds_nothing(kubelet, plugin):
    with pytest.raises(AdmissionError):
        kubelet.admit(Pod("p", (container("main", gpu=2), container("side", gpu=2)), uid="uid"))
    assert len(kubelet.allocate("other", "main", {GPU: 3}).device_ids[GPU]) == 3


def test_the_checkpoint(folder, kubelet):
    plugin = TinyPlugin(folder)
    plugin.numa["a"] = pb.TopologyInfo(nodes=[pb.NUMANode(ID=1)])
    plugin.register(folder)
    kubelet.wait_for(GPU, 3)
    kubelet.allocate("uid-1", "main", {GPU: 2})
    text = (folder / "kubelet_internal_checkpoint").read_text()
    assert "\n" not in text
    content = json.loads(text)
    (entry,) = content["Data"]["PodDeviceEntries"]
    assert (entry["PodUID"], entry["ContainerName"]) == ("uid-1", "main")
    assert entry["ResourceName"] == GPU
    assert entry["DeviceIDs"] == {"1": ["a"], "-1": ["b"]}
    assert pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"])).envs == {"IDS": "a,b"}
    assert content["Data"]["RegisteredDevices"] == {GPU: ["a", "b", "c"]}
    assert isinstance(content["Checksum"], int)
    plugin.stop()


def test_the_checkpoint_shows_a_pod_that_is_gone_until_the_next_allocation(kubelet, plugin):
    def shown():
        return [entry["PodUID"] for entry in json.loads(kubelet.checkpoint.read_text())["Data"]["PodDeviceEntries"]]

    kubelet.allocate("uid-1", "main", {GPU: 3})
    kubelet.release("uid-1")
    assert shown() == ["uid-1"]
    kubelet.allocate("uid-2", "main", {GPU: 3})
    assert shown() == ["uid-2"]


def test_the_pods_list_has_no_init_containers_that_end(kubelet, plugin):
    sidecar = ContainerSpec("sidecar", limits={GPU: 1}, restart_always=True)
    kubelet.admit(Pod("p", (container("main", gpu=1),), (container("init", gpu=2), sidecar), uid="uid"))
    assert [(pod, name) for _, pod, name, *_ in kubelet._held()] == [("p", "sidecar"), ("p", "main")]
    kubelet.release("uid")
    assert kubelet._held() == []


def test_a_restart_keeps_the_checkpoint_and_removes_sockets(folder, kubelet, plugin):
    kubelet.allocate("uid-1", "main", {GPU: 2})
    kubelet.restart()
    assert not plugin.socket.exists()
    assert (kubelet.resources()[GPU].capacity, kubelet.resources()[GPU].allocatable) == (0, 0)
    again = TinyPlugin(folder)
    again.register(folder)
    kubelet.wait_for(GPU, 3)
    with pytest.raises(AdmissionError, match="Requested: 2, Available: 1"):
        kubelet.allocate("uid-2", "main", {GPU: 2})
    again.stop()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Data": null}', '{"Data": {"PodDeviceEntries": [{}]}}'])
def test_a_torn_checkpoint_counts_as_none(folder, text):
    (folder / "kubelet_internal_checkpoint").write_text(text)
    with Kubelet(folder) as kubelet:
        assert kubelet.resources() == {}


def test_threads_end(folder):
    before = threading.active_count()
    kubelet = Kubelet(folder)
    kubelet.start()
    plugin = TinyPlugin(folder)
    plugin.register(folder)
    kubelet.wait_for(GPU, 3)
    kubelet.stop()
    plugin.stop()
    until(lambda: threading.active_count() <= before)
    kubelet.stop()  # a second time does nothing


def test_the_first_to_say_something_wins():
    def response(**fields):
        return pb.ContainerAllocateResponse(**fields)

    merged = merge(
        [
            (
                "a/x",
                ("1",),
                response(
                    envs={"E": "1"},
                    mounts=[pb.Mount(container_path="/m", host_path="/1")],
                    cdi_devices=[pb.CDIDevice(name="v/c=1")],
                ),
            ),
            (
                "b/y",
                ("2",),
                response(
                    envs={"E": "2", "F": "2"},
                    mounts=[pb.Mount(container_path="/m", host_path="/2", read_only=True)],
                    devices=[pb.DeviceSpec(container_path="/d", host_path="/h", permissions="rw")],
                    annotations={"k": "v"},
                    cdi_devices=[pb.CDIDevice(name="v/c=1"), pb.CDIDevice(name="v/c=2")],
                ),
            ),
        ]
    )
    assert merged.device_ids == {"a/x": ("1",), "b/y": ("2",)}
    assert merged.envs == {"E": "1", "F": "2"}
    assert merged.mounts == (Mount("/m", "/1"),)
    assert merged.devices == (DeviceSpec("/d", "/h", "rw"),)
    assert merged.annotations == {"k": "v"}
    assert merged.cdi_devices == ("v/c=1", "v/c=2")
