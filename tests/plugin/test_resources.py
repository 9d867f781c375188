from __future__ import annotations

import pytest

from gpulet.errors import ConfigError
from gpulet.node.gpu import Lost
from gpulet.plugin.config import Config
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import PREFIX, Pattern, Shared, Sharing
from support.hand_made import facts, gpu, gpu_uuid, mig_gpu


def offered(node, **settings) -> dict[str, int]:
    return {one.name: len(one.devices) for one in inventory(node, Config(**settings)).resources}


def test_plain_gpus():
    (resource,) = inventory(facts(gpu(0, numa=1), gpu(1, minor=7)), Config()).resources
    assert (resource.name, resource.endpoint) == ("nvidia.com/gpu", "nvidia-gpu.sock")
    assert [(one.id, one.index, one.paths, one.numa) for one in resource.devices] == [
        (gpu_uuid(0), "0", ("/dev/nvidia0",), 1),
        (gpu_uuid(1), "1", ("/dev/nvidia7",), -1),
    ]


def test_a_lost_gpu_hides_no_other():
    found = inventory(facts(2, lost=(Lost(2, "GPU is lost (NVML 15)"),)), Config())
    assert len(found.resources[0].devices) == 2
    assert "GPU is lost" in found.problems[0]


def test_display_adapters_are_no_compute_devices():
    assert offered(facts(gpu(0), gpu(1, name="NVIDIA DGX Display"), gpu(2))) == {"nvidia.com/gpu": 2}


GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-"
SEVEN = ("1g.10gb",) * 7


@pytest.mark.parametrize(
    ("strategy", "gpus", "wanted"),
    [
        ("none", [mig_gpu(0, *SEVEN), gpu(1)], {"nvidia.com/gpu": 2}),
        ("mixed", [mig_gpu(0, *SEVEN), mig_gpu(1, "1g.10gb"), gpu(2)], {GPU: 1, "nvidia.com/mig-1g.10gb": 8}),
        ("mixed", [mig_gpu(0), gpu(1)], {"nvidia.com/gpu": 1}),
        ("mixed", [mig_gpu(0, "1g.10gb+me", "1g.9gb-me")], {MIG + "1g.10gb.me": 1, MIG + "1g.9gb-me": 1}),
        ("mixed", [mig_gpu(0, "1c.2g.20gb", "2g.20gb")], {"nvidia.com/mig-2g.20gb": 1}),
        ("as-is", [mig_gpu(0, "1c.2g.20gb", "2g.20gb")], {MIG + "1c.2g.20gb": 1, MIG + "2g.20gb": 1}),
        ("single", [mig_gpu(0, *SEVEN), mig_gpu(1, *SEVEN)], {"nvidia.com/gpu": 14}),
        ("single", [gpu(0), gpu(1)], {"nvidia.com/gpu": 2}),
        ("single", [mig_gpu(0, *SEVEN), gpu(1)], {"nvidia.com/gpu": 7}),
        ("single", [mig_gpu(0, *SEVEN), mig_gpu(1)], {"nvidia.com/gpu": 7}),
        ("single", [mig_gpu(0, "1g.10gb", "1g.10gb", "2g.20gb"), mig_gpu(1, *SEVEN)], {"nvidia.com/gpu": 7}),
        ("single", [mig_gpu(0, "1g.10gb", "2g.20gb")], {}),
    ],
)  # fmt: skip
def test_mig_strategies(strategy, gpus, wanted):
    assert offered(facts(*gpus), mig_strategy=strategy) == wanted


def test_a_layout_that_single_cannot_express_takes_that_gpu_out_with_a_reason():
    found = inventory(
        facts(mig_gpu(0, "1g.6gb", "1g.6gb", "2g.12gb"), mig_gpu(1, *SEVEN)), Config(mig_strategy="single")
    )
    assert found.problems == (
        f"GPU 0 {gpu_uuid(0)} has profiles 1g.6gb×2, 2g.12gb×1; strategy single needs one, here 1g.10gb",
    )


def test_mig_devices():
    (resource,) = inventory(facts(mig_gpu(3, "1g.10gb", numa=1)), Config(mig_strategy="mixed")).resources
    (device,) = resource.devices
    assert device.index == "3:0"
    assert device.paths == ("/dev/nvidia3", "/dev/nvidia-caps/nvidia-cap303", "/dev/nvidia-caps/nvidia-cap304")
    assert (device.gpu_uuid, device.gi, device.ci, device.numa) == (gpu_uuid(3), 7, 0, 1)
    assert resource.endpoint == "nvidia-mig-1g.10gb.sock"


def test_names_by_pattern():
    node = facts(gpu(0, name="NVIDIA A100"), gpu(1, name="NVIDIA H100"), gpu(2, name="Tesla T4"))
    patterns = (Pattern("*A100*", "nvidia.com/a100"), Pattern("*H100*", "nvidia.com/h100"))
    assert offered(node, gpu_patterns=patterns) == {"nvidia.com/a100": 1, "nvidia.com/gpu": 1, "nvidia.com/h100": 1}


def sharing(**values) -> Sharing:
    return Sharing((Shared("nvidia.com/gpu", 10, **values),))


def test_time_slicing():
    assert offered(facts(8), time_slicing=sharing()) == {"nvidia.com/gpu": 80}
    assert offered(facts(8), time_slicing=sharing(rename="nvidia.com/gpu.shared")) == {"nvidia.com/gpu.shared": 80}
    some = sharing(rename="nvidia.com/gpu.shared", devices=("1", gpu_uuid(3)))
    assert offered(facts(8), time_slicing=some) == {"nvidia.com/gpu": 6, "nvidia.com/gpu.shared": 20}
    assert offered(facts(8), time_slicing=sharing(devices=3)) == {"nvidia.com/gpu": 5 + 30}
    absent = Sharing((Shared("nvidia.com/other", 2),))
    assert offered(facts(8), time_slicing=absent) == {"nvidia.com/gpu": 8}
    problems = inventory(facts(8), Config(time_slicing=absent)).problems
    assert problems == ("nvidia.com/other: sharing names it, and this node doesn't have it",)


def test_replicas():
    (resource,) = inventory(facts(gpu(0, numa=1)), Config(time_slicing=sharing())).resources
    device = resource.devices[3]
    assert (device.id, device.base, device.numa, device.replicas) == (f"{gpu_uuid(0)}::3", gpu_uuid(0), 1, 10)


def test_shared_devices_that_are_not_there():
    with pytest.raises(ConfigError, match="no matching device: 9"):
        inventory(facts(2), Config(time_slicing=sharing(devices=("9",))))
    with pytest.raises(ConfigError, match="requested 3 devices to be replicated, but only 2"):
        inventory(facts(2), Config(time_slicing=sharing(devices=3)))


LOST = (Lost(2, "GPU is lost (NVML 15)"),)


@pytest.mark.parametrize("devices", [("0", "2"), ("0", "2:1"), ("0", gpu_uuid(2)), ("0", gpu_uuid(0), "2"), 3])
def test_a_lost_gpu_that_is_to_be_shared_takes_no_other_along(devices):
    """The plugin starts anew beside a broken GPU: what is left is offered, and what is missing is said."""
    shared = sharing(devices=devices, rename="nvidia.com/some")
    wanted = {"nvidia.com/some": 20} if devices == 3 else {"nvidia.com/gpu": 1, "nvidia.com/some": 10}
    found = inventory(facts(2, lost=LOST), Config(time_slicing=shared))
    assert {one.name: len(one.devices) for one in found.resources} == wanted
    assert len([text for text in found.problems if "nvidia.com/some: " in text and "GPU is lost" in text]) == 1
    with pytest.raises(ConfigError):
        inventory(facts(2), Config(time_slicing=shared))


def test_a_typing_error_beside_a_lost_gpu_is_one():
    with pytest.raises(ConfigError, match="no matching device: 9"):
        inventory(facts(2, lost=LOST), Config(time_slicing=sharing(devices=("0", "2", "9"))))


def test_a_gpu_left_out_for_its_layout_can_be_named_in_sharing():
    node = facts(mig_gpu(0, *SEVEN), mig_gpu(1, "1g.10gb", "2g.20gb"))
    found = inventory(node, Config(mig_strategy="single", time_slicing=sharing(devices=("0:1", "1:0"))))
    assert {one.name: len(one.devices) for one in found.resources} == {"nvidia.com/gpu": 6 + 10}
    assert [text for text in found.problems if "device 1:0 can't be shared" in text]


@pytest.mark.parametrize(
    ("node", "items", "wanted", "problems"),
    [
        (facts(3), [("gpu", 2, "x", ("0", "1")), ("x", 3, "gpu", "all")], {"nvidia.com/gpu": 1, "nvidia.com/x": 4},
         ["nvidia.com/x: only sharing makes it, and replicas aren't shared again"]),
        (facts(2), [("gpu", 2, "x", "all"), ("gpu.x", 3, "", "all")], {"nvidia.com/x": 4},
         ["nvidia.com/gpu.x: sharing names it, and this node doesn't have it"]),
        (facts(mig_gpu(0, "1g.10gb", "2g.20gb")),
         [("mig-1g.10gb", 2, "mig-2g.20gb", "all"), ("mig-2g.20gb", 3, "", "all")],
         {"nvidia.com/mig-2g.20gb": 2 + 3}, []),
    ],
)  # fmt: skip
def test_replicas_are_made_of_the_nodes_devices_alone(node, items, wanted, problems):
    entries = tuple(
        Shared(PREFIX + name, count, rename and PREFIX + rename, which) for name, count, rename, which in items
    )
    found = inventory(node, Config(mig_strategy="mixed", time_slicing=Sharing(entries)))
    assert {one.name: len(one.by_id) for one in found.resources} == wanted
    assert {one.name: len(one.devices) for one in found.resources} == wanted
    assert list(found.problems) == problems


def test_mps_leaves_mig_devices_out():
    found = inventory(facts(mig_gpu(0, *SEVEN)), Config(mig_strategy="single", mps=sharing(), mps_root="/m"))
    assert found.resources == ()
    assert "not supported for MIG" in found.problems[0]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ((), [0, 1, 2]),
        (("index=1",), [1]),
        ((f"uuid={gpu_uuid(0)}", "index=2"), [0, 2]),
        (("!index=1",), [0, 2]),
        (("pci=00000000:11:00.0",), [1]),
        (("pci=0000:11:00.0",), [1]),
        (("model=*T4*",), [2]),
        (("!model=*H100*",), [2]),
        (("model=*H100*", "!index=0"), [1]),
        (("index=9",), []),
    ],
)
def test_filters(filters, left):
    node = facts(gpu(0), gpu(1), gpu(2, name="Tesla T4"))
    found = inventory(node, Config(device_filter=filters)).resources
    assert [device.gpu for one in found for device in one.devices] == left


@pytest.mark.parametrize("strategy", ["single", "mixed"])
def test_a_mig_device_whose_profile_nobody_tells_is_left_out_alone(strategy):
    node = facts(mig_gpu(0, "1g.10gb", "", "1g.10gb"), mig_gpu(1, ""))
    found = inventory(node, Config(mig_strategy=strategy))
    assert [device.index for one in found.resources for device in one.devices] == ["0:0", "0:2"]
    assert [text.partition(": ")[2] for text in found.problems] == [
        "NVML doesn't tell its profile; run privileged or with NVIDIA_MIG_MONITOR_DEVICES=all"
    ] * 2


def test_a_gpu_without_a_minor_has_no_node():
    (one,) = inventory(facts(gpu(0, minor=-1)), Config()).resources
    assert one.devices[0].paths == ()


def test_a_gpu_of_which_little_is_known_leaves_no_hole_in_the_line():
    lost = (Lost(4, "GPU is lost (NVML 15)"), Lost(5, "reset required", uuid="GPU-5"), Lost(6, "gone", "0000:1b:00.0"))
    assert inventory(facts(1, lost=lost), Config()).problems == (
        "GPU 4: GPU is lost (NVML 15)",
        "GPU 5 GPU-5: reset required",
        "GPU 6 0000:1b:00.0: gone",
    )


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            Config(gpu_patterns=(Pattern("nvidia a100*", "nvidia.com/a100"),)),
            "nvidia.com/a100: its pattern 'nvidia a100*'",
        ),
        (Config(gpu_patterns=(Pattern("NVIDIA A100*", "nvidia.com/a100"), Pattern("*", "nvidia.com/gpu"))), ""),
        (Config(gpu_patterns=(Pattern("*T4*", "nvidia.com/gpu"),)), ""),  # as without it
        (
            Config(mig_strategy="mixed", mig_patterns=(Pattern("1G*", "nvidia.com/small"),)),
            "nvidia.com/small: its pattern",
        ),
        (Config(mig_strategy="none", mig_patterns=(Pattern("1G*", "nvidia.com/small"),)), ""),
    ],
)
def test_a_pattern_without_effect_is_told(config, told):
    node = facts(gpu(0, name="NVIDIA A100-SXM4-40GB"), mig_gpu(1, "1g.5gb", name="NVIDIA A100-SXM4-40GB"))
    problems = inventory(node, config).problems
    assert [text.startswith(told) for text in problems] == ([True] if told else [])
    assert inventory(facts(), config).problems == ()
