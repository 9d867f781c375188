"""policy.py: the kubelet's ledger decides, and whatever is wrong with it denies."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpulet.errors import Refused, RequestError
from gpulet.request.decide import decide, needs_ledger
from gpulet.request.policy import Ledger, read_ledger
from gpulet.settings import Settings
from support.containers import CRIO, FORGED_SANDBOXES, GPUS, UID, container, pod

V = "NVIDIA_VISIBLE_DEVICES"
CHANNEL = b"/var/run/nvidia-container-devices/imex/3"
KUBELET = Settings(policy_grants="kubelet", accept_volume_mounts=True)


def answer(**env: str) -> str:
    """A ContainerAllocateResponse with an environment, a mount and a CDI name, as the kubelet stores it."""

    def field(number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2, len(body)]) + body

    pairs = b"".join(field(1, field(1, k.encode()) + field(2, v.encode())) for k, v in env.items())
    mount = field(2, field(1, b"/in") + field(2, b"/out") + bytes([3 << 3, 1]))
    return base64.b64encode(pairs + mount + field(5, field(1, b"nvidia.com/gpu=0"))).decode()


def entry(*ids: str, name: str = "main", resource: str = "nvidia.com/gpu", **env: str) -> dict[str, Any]:
    return {
        "PodUID": UID,
        "ContainerName": name,
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(ids)},
        "AllocResp": answer(**env),
    }


def ledger(folder: Path, *entries: dict[str, Any]) -> Ledger:
    path = folder / "kubelet_internal_checkpoint"
    data = {"PodDeviceEntries": list(entries), "RegisteredDevices": {"nvidia.com/gpu": list(GPUS)}}
    path.write_text(json.dumps({"Data": data, "Checksum": 1}))
    return read_ledger(str(path))


def test_two_asked_for_two_given_and_the_pods_own_word_is_worth_nothing(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(*GPUS))
    for env in (f"{V}=all", f"{V}=none", f"{V}=7", "A=1", "CUDA_VERSION=11.0"):
        seen = decide(container(env, annotations=pod()), KUBELET, book).request
        assert (seen.source, seen.devices) == ("ledger", GPUS)


def test_the_containers_names_do_not_choose_the_mode_either(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(GPUS[0]))
    seen = decide(container(f"{V}=nvidia.com/gpu=all", annotations=pod()), KUBELET, book)
    assert (seen.mode, seen.request.devices) == ("jit-cdi", (GPUS[0],))


@pytest.mark.parametrize("env", [f"{V}=all", "CUDA_VERSION=11.0", "A=1"])
def test_no_entry_no_gpu(tmp_path: Path, env: str) -> None:
    book = ledger(tmp_path, entry(*GPUS))
    seen = decide(container(env, annotations=pod(container="side")), KUBELET, book)
    assert not seen.request
    assert "the kubelet allocated no GPU to it" in seen.request.reason
    loud = [rule for rule in seen.trace if rule.name == "policy" and rule.level == "warning"]
    assert bool(loud) is (env != "A=1")


def test_void_is_served_already_or_wants_nothing(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(*GPUS))
    assert not decide(container(f"{V}=void", annotations=pod()), KUBELET, book).request


def test_replicas_are_one_device(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(f"{GPUS[0]}::3", f"{GPUS[0]}::1", resource="nvidia.com/gpu.shared"))
    assert decide(container(annotations=pod()), KUBELET, book).request.devices == (GPUS[0],)


def test_several_resources_add_up_and_foreign_ones_do_not(tmp_path: Path) -> None:
    book = ledger(
        tmp_path,
        entry(GPUS[0]),
        entry("MIG-x", resource="nvidia.com/mig-1g.10gb"),
        entry(GPUS[1], resource="team.example/gpu"),
        entry("eth0", resource="example.com/net"),
    )
    assert decide(container(annotations=pod()), KUBELET, book).request.devices == (GPUS[0], "MIG-x", GPUS[1])


def test_lists_of_old_kubelets(tmp_path: Path) -> None:
    old = entry() | {"DeviceIDs": [GPUS[0]], "AllocResp": None}
    assert ledger(tmp_path, old).grants[0].devices == (GPUS[0],)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't be read: No such file"),
        ("", "isn't JSON"),
        ('{"Data": {"PodDeviceEntries": [{"PodUID"', "isn't JSON"),
        ("[]", "has a form"),
        ('{"Data": {}}', "has a form"),
        ('{"Data": {"PodDeviceEntries": [{"PodUID": "x"}]}}', "has a form"),
        ('{"Data": {"PodDeviceEntries": [1]}}', "has a form"),
        ('{"Data": {"PodDeviceEntries": 5}}', "has a form"),
        ('{"v2": {"entries": []}}', "has a form"),
    ],
)
def test_a_ledger_that_cannot_be_used_denies_and_says_so(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "ledger"
    if content is not None:
        path.write_text(content)
    seen = decide(container(f"{V}=all", annotations=pod()), KUBELET, read_ledger(str(path)))
    assert not seen.request
    assert says in seen.request.reason
    assert any(says in rule.outcome for rule in seen.trace if rule.level == "warning")


@pytest.mark.parametrize("answer", ["AA==", "Cg==", "!!!", "CgUKA0E="])
def test_an_answer_that_is_no_protobuf(tmp_path: Path, answer: str) -> None:
    broken = entry(GPUS[0]) | {"AllocResp": answer}
    book = ledger(tmp_path, broken)
    assert not book.trouble
    assert (book.grants[0].devices, book.grants[0].env) == ((GPUS[0],), ())


def test_annotations_alone_decide_nothing(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(*GPUS))
    other = "/kubepods/besteffort/pod00000000-0000-0000-0000-000000000000/abc"
    seen = decide(container(f"{V}=all", annotations=pod(), cgroup=other), KUBELET, book)
    assert not seen.request
    assert "cgroupsPath" in seen.request.reason
    assert "names no Pod" in decide(container(f"{V}=all"), KUBELET, book).request.reason


@pytest.mark.parametrize(
    ("pattern", "trusted"),
    [
        ("default/two", True),
        ("default/*", True),
        ("default/t*", True),
        ("default", True),
        ("default/three", False),
        ("defaul", False),
        ("other/*", False),
        ("*", False),
    ],
)
def test_trusted_pods_are_believed(tmp_path: Path, pattern: str, trusted: bool) -> None:
    settings = KUBELET.replace(policy_trusted=(pattern,))
    one = container(f"{V}=all", annotations=pod(), cgroup=f"/kubepods/pod{UID}")
    assert needs_ledger(one, settings) is not trusted
    assert decide(one, settings, ledger(tmp_path)).request.devices == (("all",) if trusted else ())
    forged = one.replace(confirmed=False)
    assert not decide(forged, settings, ledger(tmp_path)).request


@pytest.mark.parametrize(
    ("env", "refused"),
    [
        (f"{V}=all", True),
        (f"{V}={GPUS[1]}", True),
        (f"{V}={GPUS[0]}", False),
        (f"{V}=0", False),  # what the plugin itself answered
        (f"{V}=1", True),
        (f"{V}=nvidia.com/gpu={GPUS[0]}", False),
        (f"{V}=none", False),
        (f"{V}=void", False),
        ("CUDA_VERSION=11.0", False),
    ],
)
def test_deny_refuses_what_goes_beyond(tmp_path: Path, env: str, refused: bool) -> None:
    deny = KUBELET.replace(policy_untrusted_env="deny")
    book = ledger(tmp_path, entry(GPUS[0], NVIDIA_VISIBLE_DEVICES="0"))
    one = container(env, annotations=pod())
    if refused:
        with pytest.raises(Refused, match=r"default/two/main asks for GPUs.*resources\.limits"):
            decide(one, deny, book)
    else:
        decide(one, deny, book)


def test_policy_env_reads_no_ledger() -> None:
    assert not needs_ledger(container(annotations=pod()), Settings())
    assert not needs_ledger(container(annotations=pod(kind="sandbox")), KUBELET)


def test_what_the_environment_alone_could_bring_stays_out(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(GPUS[0]))
    one = container("NVIDIA_IMEX_CHANNELS=0", mounts=("1", "imex/2"), annotations=pod())
    seen = decide(one, KUBELET, book).request
    assert (seen.devices, seen.imex) == ((GPUS[0],), ())


def test_devices_beside_gpus_by_the_plugins_answer_alone(tmp_path: Path) -> None:
    book = ledger(tmp_path, entry(GPUS[0], NVIDIA_GDS="enabled", NVIDIA_MOFED="disabled"))
    own = ("NVIDIA_GDS=enabled", "NVIDIA_MOFED=enabled", "NVIDIA_NVSWITCH=enabled")
    seen = decide(container(*own, annotations=pod()), KUBELET, book)
    assert seen.request.gated == ("gds",)
    assert [rule.where for rule in seen.trace if rule.name == "gds"] == ["the device plugin's answer in the ledger"]


@pytest.mark.parametrize("privileged", [True, False])
@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_mig_management_by_the_plugins_answer_alone(tmp_path: Path, privileged: bool, mode: str) -> None:
    settings = KUBELET.replace(mode=mode)
    own = ("NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES=all")
    one = container(*own, annotations=pod(), privileged=privileged)
    seen = decide(one, settings, ledger(tmp_path, entry(GPUS[0]))).request
    assert (seen.devices, seen.mig_config, seen.mig_monitor) == ((GPUS[0],), "", "")
    answered = ledger(tmp_path, entry(GPUS[0], NVIDIA_MIG_MONITOR_DEVICES="0"))
    if privileged:
        assert decide(one, settings, answered).request.mig_monitor == "0"
    elif mode == "auto":
        assert decide(one, settings, answered).request.mig_monitor == ""
    else:
        with pytest.raises(RequestError, match="non privileged"):
            decide(one, settings, answered)
    trusting = settings.replace(policy_trusted=("default/two",))
    if privileged:
        assert decide(one.with_variable(V, "0"), trusting).request.mig_config == "all"


@pytest.mark.parametrize("unprivileged", [True, False])
def test_imex_channels_by_the_plugins_answer_alone(tmp_path: Path, unprivileged: bool) -> None:
    settings = KUBELET.replace(accept_envvar_unprivileged=unprivileged)
    one = container("NVIDIA_IMEX_CHANNELS=7", mounts=("imex/8",), annotations=pod())
    by_env = ledger(tmp_path, entry(GPUS[0], NVIDIA_IMEX_CHANNELS="0,1"))
    assert decide(one, settings, by_env).request.imex == ("0", "1")
    mount = b"".join(bytes([number << 3 | 2, len(text)]) + text for number, text in ((1, CHANNEL), (2, b"/dev/null")))
    response = base64.b64encode(bytes([2 << 3 | 2, len(mount)]) + mount).decode()
    by_mount = ledger(tmp_path, entry(GPUS[0]) | {"AllocResp": response})
    assert decide(one, settings, by_mount).request.imex == ("3",)
    ignored = settings.replace(ignore_imex_requests=True)
    assert decide(one, ignored, by_env).request.imex == ()


def test_other_devices_of_nvidias_are_no_indices_of_gpus(tmp_path: Path) -> None:
    card = entry("0000:3b:00.0", resource="nvidia.com/hostdev")
    group = entry("3", resource="nvidia.com/GA102GL_A10")
    book = ledger(tmp_path, card, group)
    assert not decide(container(f"{V}=all", annotations=pod()), KUBELET, book).request
    book = ledger(tmp_path, card, entry(GPUS[0]))
    assert decide(container(annotations=pod()), KUBELET, book).request.devices == (GPUS[0],)
    assert ledger(tmp_path, entry("tegra")).grants[0].devices == ("tegra",)


@pytest.mark.parametrize(
    "forged",
    [
        {"io.kubernetes.cri.sandbox-namespace": "exporters"},
        {"io.kubernetes.cri.sandbox-namespace": "exporters", "io.kubernetes.cri.sandbox-name": "dcgm"},
        {"io.kubernetes.cri.container-name": "other"},
    ],
)
def test_a_pod_that_speaks_as_the_engine_that_does_not_run_it(tmp_path: Path, forged: dict[str, str]) -> None:
    book = ledger(tmp_path, entry(GPUS[0]), entry(GPUS[1], name="other"))
    settings = KUBELET.replace(policy_trusted=("exporters/*",))
    assert decide(container(f"{V}=all", annotations=CRIO), settings, book).request.devices == (GPUS[0],)
    seen = decide(container(f"{V}=all", annotations=CRIO | forged), settings, book).request
    assert not seen
    assert "contradict" in seen.reason
    assert decide(container(annotations=CRIO | pod()), settings, book).request.devices == (GPUS[0],)


@pytest.mark.parametrize("annotations", FORGED_SANDBOXES)
def test_nobody_makes_himself_a_pause_container(tmp_path: Path, annotations: dict[str, str]) -> None:
    one = container(f"{V}=all", annotations=annotations)
    assert needs_ledger(one, KUBELET)
    book = ledger(tmp_path, entry(GPUS[0]))
    seen = decide(one, KUBELET, book)
    assert not seen.request
    assert seen.denied()
    with pytest.raises(Refused, match="asks for GPUs by environment"):
        decide(one, KUBELET.replace(policy_untrusted_env="deny"), book)


@pytest.mark.parametrize("untrusted", ["ignore", "deny"])
def test_the_ledger_names_what_mounts_that_do_not_count_would(tmp_path: Path, untrusted: str) -> None:
    folder = "/var/run/nvidia-container-devices"
    book = ledger(tmp_path, entry(GPUS[0], NVIDIA_VISIBLE_DEVICES=folder))
    settings = KUBELET.replace(accept_volume_mounts=False, policy_untrusted_env=untrusted)
    one = container(f"{V}={folder}", mounts=(GPUS[0],), annotations=pod())
    assert decide(one, settings, book).request.devices == (GPUS[0],)


def test_a_ledger_that_is_no_file_makes_nobody_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert read_ledger(str(path)).trouble == "can't be read: not a regular file"
