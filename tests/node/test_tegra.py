"""A Tegra without NVML, and GPUs that NVML says are no PCI devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from gpulet.errors import NodeError
from gpulet.node import nvml_place, tegra


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n# more\n", "36.4.3"),
        ("# R32 (release), REVISION: 7.1", "32.7.1"),
        ("# R35 (release)", "35"),
        ("# R35 (release), REVISION:", "35"),
        ("nothing of the kind", ""),
        ("", ""),
    ],
)
def test_release_out_of_its_line(tmp_path: Path, text: str, release: str) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text(text)
    assert tegra.release(str(tmp_path)) == release


def test_one_gpu_that_is_part_of_the_chip(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    facts = tegra.facts(str(tmp_path))
    (gpu,) = facts.gpus
    assert (facts.source, facts.dev_root, facts.driver) == ("tegra", str(tmp_path), "")
    assert (gpu.index, gpu.minor, gpu.uuid, gpu.bus_id) == (0, -1, "", "")


def _raises(code: int) -> Any:
    def function(*_: object) -> None:
        raise pynvml.NVMLError(code)

    return function


def test_a_gpu_that_is_no_pci_device_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", _raises(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert nvml_place.place(object(), "Orin (nvgpu)", "/", "/") == ("", -1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", _raises(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(pynvml.NVMLError):
        nvml_place.place(object(), "Orin (nvgpu)", "/", "/")


@pytest.mark.parametrize(("name", "part_of_it"), [("NVIDIA Thor", True), ("NVIDIA T4", False)])
def test_no_minor_is_a_tegras_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, part_of_it: bool
) -> None:
    """Any other is handed over as /dev/nvidiaN."""
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPciInfo", lambda _: SimpleNamespace(busId="00000000:01:00.0"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMinorNumber", _raises(pynvml.NVML_ERROR_NOT_SUPPORTED))
    if part_of_it:
        assert nvml_place.place(object(), name, str(tmp_path), str(tmp_path)) == ("", -1)
    else:
        with pytest.raises(NodeError, match=r"Device Minor in .*/0000:01:00\.0/information"):
            nvml_place.place(object(), name, str(tmp_path), str(tmp_path))
