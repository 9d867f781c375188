"""What was found, in words."""

from __future__ import annotations

import pytest

from gpulet.sim.evidence import changes, inside, ranges


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([7, 0, 1], "0-1,7"), ([2, 4, 6], "2,4,6")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_changes_are_told_and_nothing_else() -> None:
    node, mount = {"path": "/dev/nvidia0"}, {"destination": "/usr/bin/nvidia-smi"}
    hook = {"path": "/usr/bin/hook"}
    before = {"process": {"env": ["A=1", "CUDA_VISIBLE_DEVICES=all"]}, "hooks": {"createContainer": [hook, hook]}}
    after = {"process": {"env": ["A=2"]}, "linux": {"devices": [node]}, "mounts": [mount], "hooks": {}}
    assert changes(before, after) == (
        "+1 device nodes, +1 mounts, A=2, CUDA_VISIBLE_DEVICES unset, -2 createContainer hooks"
    )
    assert changes(before, before) == "config.json left as it was"


def test_inside() -> None:
    probe = {
        "devices": [
            "/dev/nvidia-uvm",
            "/dev/nvidia0",
            "/dev/nvidia1",
            "/dev/nvidiactl",
            "/dev/nvidia-caps/nvidia-cap3",
        ],
        "nvml": [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}],
        "nvml_error": None,
        "denied": [2, 3],
        "files": [{"path": "/usr/bin/nvidia-smi", "flags": ["ro"]}, {"path": "/run/nvidia", "flags": ["rw"]}],
        "libraries": {"libnvidia-ml.so.1": "/lib/libnvidia-ml.so.1"},
    }
    assert inside(probe) == (
        "NVML lists 2 through /lib/libnvidia-ml.so.1; nvidia0-1 nvidia-uvm nvidiactl nvidia-caps/nvidia-cap3; "
        "2 driver mounts (1 read-only); 2 GPUs refused"
    )
    nothing = probe | {"devices": [], "nvml_error": "no such file", "nvml": []}
    assert inside(nothing) == "no /dev/nvidia*, no driver library (no such file); 2 GPUs refused"
