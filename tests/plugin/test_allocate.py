"""Allocate's answers. The first table is what the peer (k8s-device-plugin 0.20) was seen to answer for two of eight
GPUs; a row of it differs on purpose where said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpulet.errors import ConfigError
from gpulet.plugin.allocate import AllocationRefused, Answer, Surroundings, allocate
from gpulet.plugin.config import Config
from gpulet.plugin.generation import imex_channels
from gpulet.plugin.resources import CONTROL_NODES, inventory
from gpulet.plugin.sharing import Shared, Sharing
from support.hand_made import facts, gpu_uuid, mig_gpu

EIGHT = facts(8)
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOLUME = "/var/run/nvidia-container-devices"
A, B = gpu_uuid(2), gpu_uuid(3)
CDI = "k8s.device-plugin.nvidia.com"


def answer(ids, node=EIGHT, surroundings=Surroundings(), sick=None, **settings) -> Answer:  # noqa: B008
    settings = {"dev_root": "/root", **settings}
    config = Config(**settings)
    return allocate(ids, inventory(node, config).resources[0], config, surroundings, sick or {}, lambda: "token")


def strategy(*names, **settings):
    return {"device_list_strategy": names, **settings}


INDEX = {"device_id_strategy": "index"}
NODES = [("/dev/nvidia2", "/root/dev/nvidia2", "rw"), ("/dev/nvidia3", "/root/dev/nvidia3", "rw")]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (strategy("envvar"), Answer({VISIBLE: f"{A},{B}"})),
        (strategy("envvar", pass_device_specs=True), Answer({VISIBLE: f"{A},{B}"}, devices=NODES)),
        (strategy("envvar", **INDEX), Answer({VISIBLE: "2,3"})),
        (strategy("envvar", **INDEX, pass_device_specs=True), Answer({VISIBLE: "2,3"}, devices=NODES)),
        (
            strategy("volume-mounts"),
            Answer({VISIBLE: VOLUME}, [(f"{VOLUME}/{A}", "/dev/null", False), (f"{VOLUME}/{B}", "/dev/null", False)]),
        ),
        (
            strategy("volume-mounts", **INDEX),
            Answer({VISIBLE: VOLUME}, [(f"{VOLUME}/2", "/dev/null", False), (f"{VOLUME}/3", "/dev/null", False)]),
        ),
        (
            strategy("volume-mounts", **INDEX, pass_device_specs=True),
            Answer(
                {VISIBLE: VOLUME},
                [(f"{VOLUME}/2", "/dev/null", False), (f"{VOLUME}/3", "/dev/null", False)],
                NODES,
            ),
        ),
        (
            strategy("cdi-annotations"),
            Answer(annotations={"cdi.k8s.io/nvidia-device-plugin_token": f"{CDI}/gpu={A},{CDI}/gpu={B}"}),
        ),
        (
            strategy("cdi-annotations", cdi_annotation_prefix="custom.cdi.k8s.io/", **INDEX),
            Answer(annotations={"custom.cdi.k8s.io/nvidia-device-plugin_token": f"{CDI}/gpu=2,{CDI}/gpu=3"}),
        ),
        (strategy("cdi-cri"), Answer(cdi=[f"{CDI}/gpu={A}", f"{CDI}/gpu={B}"])),
        (strategy("cdi-cri", pass_device_specs=True), Answer(cdi=[f"{CDI}/gpu={A}", f"{CDI}/gpu={B}"])),
        (strategy("envvar", "cdi-cri"), Answer({VISIBLE: f"{A},{B}"}, cdi=[f"{CDI}/gpu={A}", f"{CDI}/gpu={B}"])),
        (strategy("envvar", device_list_envvar="CUDA_VISIBLE_DEVICES"), Answer({"CUDA_VISIBLE_DEVICES": f"{A},{B}"})),
        (
            strategy("envvar", gds_enabled=True, gdrcopy_enabled=True, mofed_enabled=True),
            Answer(
                {
                    VISIBLE: f"{A},{B}",
                    "NVIDIA_GDS": "enabled",
                    "NVIDIA_GDRCOPY": "enabled",
                    "NVIDIA_MOFED": "enabled",
                }
            ),
        ),
    ],
)
def test_two_gpus(settings, wanted):
    assert answer([A, B], **settings) == wanted


def test_both_listing_strategies():
    both = answer([A], **strategy("envvar", "volume-mounts"))
    assert both == Answer({VISIBLE: VOLUME}, [(f"{VOLUME}/{A}", "/dev/null", False)])


def test_repeated_ids_keep_their_first_place():
    assert answer([B, A, B]).envs[VISIBLE] == f"{B},{A}"
    assert answer([B, A, B], **INDEX).envs[VISIBLE] == "2,3"  # the peer's order is random


def test_imex_channels():
    channel = Surroundings(imex=(0,))
    assert answer([A], surroundings=channel).envs == {VISIBLE: A, "NVIDIA_IMEX_CHANNELS": "0"}
    volume = answer([A], surroundings=channel, pass_device_specs=True, **strategy("volume-mounts"))
    assert volume.envs == {VISIBLE: VOLUME}
    assert volume.mounts[-1] == (f"{VOLUME}/imex/0", "/dev/null", False)
    node = "/dev/nvidia-caps-imex-channels/channel0"
    assert volume.devices[-1] == (node, f"/root{node}", "rw")
    named = answer([A], surroundings=Surroundings(imex=(0,), cdi_classes=("gds",)), **strategy("cdi-cri"))
    assert named.cdi == [f"{CDI}/gpu={A}", f"{CDI}/imex-channel=0", f"{CDI}/gds=all"]


def test_control_nodes_come_with_device_nodes():
    nodes = answer([A], surroundings=Surroundings(CONTROL_NODES), pass_device_specs=True).devices
    assert [path for path, _, _ in nodes] == [*CONTROL_NODES, "/dev/nvidia2"]
    assert nodes[0] == ("/dev/nvidiactl", "/root/dev/nvidiactl", "rw")


SHARED = Sharing((Shared("nvidia.com/gpu", 4),))


def test_replicas_become_their_gpu():
    assert answer([f"{A}::2"], time_slicing=SHARED).envs == {VISIBLE: A}
    twice = answer([f"{A}::0", f"{A}::3"], time_slicing=SHARED, pass_device_specs=True)
    assert twice.envs == {VISIBLE: A}
    assert twice.devices == NODES[:1]


def test_mps():
    settings = {"mps": Sharing((Shared("nvidia.com/gpu", 2),), True), "mps_root": "/run/nvidia/mps"}
    assert answer([f"{A}::0"], **settings) == Answer(
        {"CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe", VISIBLE: A},
        [
            ("/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu/pipe", False),
            ("/dev/shm", "/run/nvidia/mps/shm", False),
        ],
    )


def test_mig():
    node = facts(mig_gpu(0, "1g.10gb", "1g.10gb"))
    first, second = (mig.uuid for mig in node.gpus[0].mig)
    assert answer([second], node, mig_strategy="mixed").envs == {VISIBLE: second}
    assert answer([second, first], node, mig_strategy="mixed", **INDEX).envs == {VISIBLE: "0:0,0:1"}
    caps = answer([first], node, mig_strategy="mixed", pass_device_specs=True).devices
    assert [path for path, _, _ in caps] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap3",
        "/dev/nvidia-caps/nvidia-cap4",
    ]


PREFIX = 'invalid allocation request for "nvidia.com/gpu": invalid request: '


@pytest.mark.parametrize(
    ("ids", "settings", "code", "text"),
    [
        (["no-such-device"], {}, "INVALID_ARGUMENT", PREFIX + "unknown device: no-such-device"),
        ([A, f"{B}::0"], {}, "INVALID_ARGUMENT", PREFIX + f"unknown device: {B}::0"),
        (
            [f"{A}::0", f"{B}::1"],
            {"time_slicing": Sharing((Shared("nvidia.com/gpu", 4),), True)},
            "INVALID_ARGUMENT",
            PREFIX + "maximum request size for shared resources is 1; found 2",
        ),
        ([A, B], {"sick": {B: "Xid 79"}}, "FAILED_PRECONDITION", PREFIX + f"unhealthy device: {B}: Xid 79"),
        (
            [f"{B}::1"],
            {"sick": {B: "Xid 79"}, "time_slicing": SHARED},
            "FAILED_PRECONDITION",
            PREFIX + f"unhealthy device: {B}::1: Xid 79",
        ),
    ],
)
def test_refusals(ids, settings, code, text):
    with pytest.raises(AllocationRefused) as caught:
        answer(ids, **settings)
    assert (caught.value.code, str(caught.value)) == (code, text)


def test_a_sick_neighbour_is_nobodys_concern():
    assert answer([A], sick={B: "Xid 79"}).envs == {VISIBLE: A}


def test_an_id_that_is_no_cdi_name():
    gpu = mig_gpu(0, "1g.10gb")
    old = f"MIG-{gpu.uuid}/7/0"
    node = facts(gpu.replace(mig=(gpu.mig[0].replace(uuid=old),)))
    with pytest.raises(AllocationRefused, match="is no CDI device name; use --device-id-strategy=index"):
        answer([old], node, mig_strategy="mixed", **strategy("cdi-annotations"))
    assert answer([old], node, mig_strategy="mixed", **strategy("cdi-annotations", **INDEX)).annotations


@pytest.mark.parametrize(("name", "where"), [
    ("envvar", "NVIDIA_IMEX_CHANNELS=0"),
    ("volume-mounts", "/var/run/nvidia-container-devices/imex/0"),
    ("cdi-annotations", "k8s.device-plugin.nvidia.com/imex-channel=0"),
    ("cdi-cri", "k8s.device-plugin.nvidia.com/imex-channel=0"),
])  # fmt: skip
def test_c49_configured_channels_reach_every_strategy(name: str, where: str):
    got = answer([A], surroundings=Surroundings(imex=(0,)), **strategy(name))
    told = [f"{key}={value}" for key, value in got.envs.items()] + [mount[0] for mount in got.mounts] + list(got.cdi)
    told += [one for value in got.annotations.values() for one in value.split(",")]
    assert where in told


def test_c49_a_channel_without_its_node(tmp_path: Path):
    (tmp_path / "dev").mkdir()
    wanted = Config(imex_channel_ids=(0,), dev_root=str(tmp_path), driver_root=str(tmp_path))
    assert imex_channels(wanted) == ()
    with pytest.raises(ConfigError, match="channel0"):
        imex_channels(replace(wanted, imex_required=True))
