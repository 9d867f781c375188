"""What people write about a node by hand: every slip is one line that names the file and the field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gpulet.errors import ConfigError, GpuletError, UsageError
from gpulet.sim import description, node

GOOD = {"driver": "570.86.15", "cuda": "12.8", "model": "t4", "gpus": [{"bus": "01:00.0"}, {"bus": "02:00.0"}]}


def _load(folder: Path, data: object, **more: int) -> description.Description:
    path = folder / "mine.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return description.load_profile(str(path), **more)


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    made = _load(tmp_path, {**GOOD, "imex": [0, 7], "nvlink": {"mesh": {"0-1": 2}}})
    assert made.profile == "mine" and made.imex == (0, 7)
    assert [gpu.links for gpu in made.gpus] == [("1", "1"), ("0", "0")]
    assert made.gpus[1].bus_id == "00000000:02:00.0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"driver": "../../etc"}, "mine.yaml: driver: '../../etc'"),
        ({"cuda": "twelve"}, "mine.yaml: cuda: 'twelve'"),
        ({"platform": "moon"}, "mine.yaml: platform: 'moon' (wanted 'discrete', 'wsl' or 'tegra')"),
        ({"gpus": 7}, "mine.yaml: gpus: 7 (wanted a valid list)"),
        ({"gpus": [{}]}, "mine.yaml: gpus.0.bus is missing"),
        ({"gpus": [{"bus": "1:0"}]}, "mine.yaml: gpus.0.bus: '1:0'"),
        ({"gpus": [{"bus": "01:00.0", "mnior": 3}]}, "mine.yaml: unknown field: gpus.0.mnior"),
        ({"gpus": [{"bus": "01:00.0", "minor": 255}]}, "minor 255 (wanted index 0, minor 0 to 253)"),
        ({"gpus": [{"bus": "01:00.0"}, {"bus": "01:00.0"}]}, "2 GPUs with the same bus_id: 00000000:01:00.0"),
        ({"model": "t5"}, "unknown model: t5 (wanted one of v100"),
        ({"nvlink": {"mesh": {"0": 1}}}, "mine.yaml: nvlink.mesh.0"),
        ({"nvswitches": -1}, "mine.yaml: nvswitches: -1"),
        ({"gpu": []}, "mine.yaml: unknown field: gpu"),
    ],
)
def test_a_slip_in_a_profile(tmp_path: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, {**GOOD, **change})
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["[", "- 1\n", "", "\x00"])
def test_what_is_no_mapping_or_no_yaml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        _load(tmp_path, text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bus_id": "../../../../etc"}, "gpus.2.bus_id: '../../../../etc'"),
        ({"uuid": "GPU-1\ngpu 0 lost"}, "gpus.2.uuid"),
        ({"minor": "second"}, "gpus.2.minor: 'second'"),
        ({"index": 5}, "gpus.2: index 5, minor 2 (wanted index 2"),
        ({"links": ["9"]}, "gpus.2.links: '9' (wanted 's' for a switch, or a GPU below 4)"),
        ({"levels": [7]}, "gpus.2.levels: 7"),
        ({"brand": "acme"}, "gpus.2.brand: 'acme'"),
        ({"coulour": 1}, "unknown field: gpus.2.coulour"),
    ],
)
def test_a_slip_in_a_whole_description(tmp_path: Path, change: dict[str, object], words: str) -> None:
    data = description.load_profile("l40sx4").to_data()
    data["gpus"][2] |= change
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, data)
    assert words in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("profile", description.profiles())
def test_every_profile_written_down_whole_is_read_as_the_same(tmp_path: Path, profile: str) -> None:
    made = description.load_profile(profile)
    assert _load(tmp_path, description.to_yaml(made)) == made


def test_a_whole_description_can_be_cut_and_not_stretched(tmp_path: Path) -> None:
    whole = description.to_yaml(description.load_profile("dgx-1v"))
    cut = _load(tmp_path, whole, gpus=4)
    assert len(cut.gpus) == 4
    assert {end for gpu in cut.gpus for end in gpu.links} == {"0", "1", "2", "3"}
    with pytest.raises(UsageError, match="has too few GPUs: 9"):
        _load(tmp_path, whole, gpus=9)


def test_a_driver_version_is_checked_wherever_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(GpuletError, match="driver: 'newest'"):
        node.create(tmp_path / "n", "t4x1", driver="newest")
    assert not (tmp_path / "n").exists()
