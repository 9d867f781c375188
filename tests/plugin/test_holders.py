"""The kubelet's books beside what is offered."""

from __future__ import annotations

import time

import pytest

from gpulet.plugin.holders import Holder, on_node, troubles
from gpulet.sim.checkpoint import Checkpoint, Entry
from gpulet.sim.kubelet import Kubelet
from gpulet.sim.pods import ContainerSpec, Pod
from support import plugin_process as plugin
from support.hand_made import facts, gpu, gpu_uuid, mig_gpu

GPU = "nvidia.com/gpu"
A, B = gpu_uuid(0), gpu_uuid(1)
MIG = mig_gpu(2, "1g.10gb").mig[0].uuid


@pytest.fixture
def folder():
    with plugin.short_folder() as folder:
        yield folder


def test_a_pod_holds_a_replica_that_an_edit_took_away(folder, caplog):
    """Its GPU is there: nobody must delete a Pod that works."""
    checkpoint = Checkpoint(folder / "kubelet_internal_checkpoint")
    checkpoint.entries.append(Entry("pod-1", "main", GPU, {"-1": [f"{gpu_uuid(1)}::1"]}))
    checkpoint.write()
    told = []
    with (
        Kubelet(folder) as kubelet,
        plugin.running(folder, lambda: facts(2), refresh_every=0.1, report=told.append),
    ):
        kubelet.wait_for(GPU, 2)
        plugin.until(lambda: "is no longer offered" in caplog.text)
        time.sleep(0.3)
    assert told == []
    (record,) = [record for record in caplog.records if "is no longer offered" in record.message]
    assert record.levelname == "WARNING"
    assert record.message == (
        f"{GPU} {gpu_uuid(1)}::1, allocated to Pod pod-1, is no longer offered; the Pod keeps its GPU, which may be "
        "handed out again"
    )


def test_a_pod_that_is_gone_holds_nothing_whatever_the_checkpoint_shows(folder, caplog):
    """As before MIG is switched on: the Pods are deleted first, and the kubelet's file shows them until its next
    allocation. Whoever does hold a GPU that is gone is named."""
    told, now = [], facts(2)
    with (
        Kubelet(folder, folder / "pods.sock") as kubelet,
        plugin.running(
            folder, lambda: now, f"--pod-resources-socket={folder}/pods.sock", refresh_every=0.1, report=told.append
        ),
    ):
        kubelet.wait_for(GPU, 2)
        gone = Pod("gone", (ContainerSpec("main", limits={GPU: 1}),), uid="u-1")
        (device,) = kubelet.admit(gone)["main"].device_ids[GPU]
        kubelet.release("u-1")
        now = facts(*(one for one in facts(2).gpus if one.uuid != device))
        kubelet.wait_for(GPU, 1)
        time.sleep(0.3)
        assert "u-1" in kubelet.checkpoint.read_text()
        assert [notice for notice in told if notice.kind == "AllocatedGPUGone"] == []
        kubelet.admit(Pod("here", (ContainerSpec("main", limits={GPU: 1}),), uid="u-2"))
        now = facts(gpu(3))
        plugin.until(lambda: [notice for notice in told if notice.kind == "AllocatedGPUGone"])
    assert "is allocated to Pod default/here and no longer exists on this node" in caplog.text


@pytest.mark.parametrize(
    ("device", "ends"),
    [
        (f"{A}::3", "the Pod keeps its GPU, which may be handed out again"),  # fewer replicas
        (A, "the Pod keeps its GPU, which may be handed out again"),  # shared since
        (f"{B}::1", "the Pod keeps its GPU"),  # filtered out
        (MIG, "the Pod keeps its GPU"),  # another strategy
        (gpu_uuid(2), "delete the Pod"),  # cut into MIG devices
        (f"{gpu_uuid(3)}::0", "delete the Pod"),
    ],
)
def test_what_is_on_the_node_is_not_gone(device, ends):
    there = on_node(facts(gpu(0), gpu(1), mig_gpu(2, "1g.10gb")))
    ((kind, text),) = troubles([Holder("", "p", "c", GPU, device)], {GPU: [f"{A}::0", f"{A}::1"]}, there)
    assert text.endswith(f"; {ends}")
    assert kind == ("AllocatedGPUGone" if "delete" in ends else "")
