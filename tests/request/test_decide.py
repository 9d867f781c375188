"""decide.py and what it asks: the order of preference, the lists, privileges, capabilities, IMEX, MIG."""

from __future__ import annotations

import pytest

from gpulet.errors import ConfigError, RequestError
from gpulet.request.bundle import Container
from gpulet.request.cuda import cuda_value
from gpulet.request.decide import decide
from gpulet.request.model import Request
from gpulet.settings import Settings
from support.containers import FOLDER, GPUS, container, pod

V = "NVIDIA_VISIBLE_DEVICES"
MOUNTS = Settings(accept_volume_mounts=True)
UNPRIVILEGED = Settings(accept_envvar_unprivileged=False)
SWARM = Settings(swarm_resource="SWARM_A, SWARM_B")


def asked(*env: str, settings: Settings | None = None, **more: object) -> Request:
    return decide(container(*env, **more), settings or Settings()).request


@pytest.mark.parametrize(
    ("env", "source", "devices"),
    [
        ((), "", ()),
        ((f"{V}=",), "", ()),
        ((f"{V}=void",), "", ()),
        ((f"{V}=0,void",), "", ()),
        ((f"{V}= , ",), "", ()),
        ((f"{V}=none",), "environment", ()),
        ((f"{V}=0,none",), "environment", ()),
        ((f"{V}=none,all",), "environment", ()),
        ((f"{V}=all",), "environment", ("all",)),
        ((f"{V}=0,all,1",), "environment", ("all",)),
        ((f"{V}= 0 , 1 ",), "environment", ("0", "1")),
        ((f"{V}=0,0,1",), "environment", ("0", "1")),
        ((f"{V}=GPU-1,0:1",), "environment", ("GPU-1", "0:1")),
        ((f"{V}=0", f"{V}=1"), "environment", ("1",)),
        ((f"{V}=all", f"{V}=void"), "", ()),
        ((f"{V}=void", f"{V}=all"), "environment", ("all",)),
        (("CUDA_VERSION=11.0.3",), "legacy-image", ("all",)),
        (("CUDA_VERSION=",), "", ()),
        (("CUDA_VERSION=11.0.3", "NVIDIA_REQUIRE_CUDA=cuda>=11.0"), "", ()),
        (("CUDA_VERSION=11.0.3", f"{V}="), "", ()),
        (("CUDA_VERSION=11.0.3", f"{V}=0"), "environment", ("0",)),
    ],
)
def test_the_environments_list(env: tuple[str, ...], source: str, devices: tuple[str, ...]) -> None:
    seen = asked(*env)
    assert (seen.source, seen.devices) == (source, devices)
    assert bool(seen) is bool(source)


@pytest.mark.parametrize(
    ("env", "devices"),
    [
        (("SWARM_A=0,1", f"{V}=7"), ("0", "1")),
        (("SWARM_A=1", "SWARM_B=2"), ("1", "2")),
        (("SWARM_A=", f"{V}=7"), ()),
        ((f"{V}=7",), ("7",)),
    ],
)
def test_swarm_resources_outrank(env: tuple[str, ...], devices: tuple[str, ...]) -> None:
    assert asked(*env, settings=SWARM).devices == devices


def test_the_variables_names_come_from_the_configuration() -> None:
    other = Settings(visible_devices_envvars=("MY_GPUS", "CUDA_VISIBLE_DEVICES"))
    assert asked("CUDA_VISIBLE_DEVICES=0", settings=other).variable == "CUDA_VISIBLE_DEVICES"
    assert asked("CUDA_VISIBLE_DEVICES=0", "MY_GPUS=1", settings=other).devices == ("1", "0")
    assert not asked(f"{V}=0", settings=other)
    assert not asked("CUDA_VISIBLE_DEVICES=0")
    # a CDI engine, or an earlier run of the runtime, leaves void in the field's own variable
    assert not asked("CUDA_VISIBLE_DEVICES=0", f"{V}=void", settings=other)


@pytest.mark.parametrize(
    ("mounts", "env", "source", "devices"),
    [
        (("0",), f"{V}=all", "volume-mounts", ("0",)),
        (("1", "0", "1"), "A=1", "volume-mounts", ("1", "0")),
        (("all",), "A=1", "volume-mounts", ("all",)),
        (("cdi/nvidia.com/gpu/0",), "A=1", "volume-mounts", ("nvidia.com/gpu=0",)),
        (("cdi/nvidia.com/gpu=0",), "A=1", "volume-mounts", ("nvidia.com/gpu=0",)),
        (("cdi/nope",), "A=1", "", ()),
        (("imex/3",), f"{V}=1", "environment", ("1",)),
        ((), f"{V}=1", "environment", ("1",)),
    ],
)
def test_mounts_come_first(mounts: tuple[str, ...], env: str, source: str, devices: tuple[str, ...]) -> None:
    seen = asked(env, mounts=mounts, settings=MOUNTS)
    assert (seen.source, seen.devices) == (source, devices)


def test_mounts_that_ask_for_nothing() -> None:
    one = container(f"{V}=1")
    for source, destination in [
        ("/dev/zero", f"{FOLDER}/0"),
        ("/dev/null", f"{FOLDER}X/0"),
        ("/dev/null", FOLDER),
        ("/dev/null", "/run/nvidia-container-devices/0"),
        ("/dev/null", f"{FOLDER}/../0"),
    ]:
        assert decide(one.replace(mounts=((source, destination),)), MOUNTS).request.source == "environment"
    assert decide(one.replace(mounts=(("/dev/null", f"{FOLDER}/0"),)), Settings()).request.devices == ("1",)
    assert decide(one.replace(mounts=(("/dev//null", f"{FOLDER}//0/"),)), MOUNTS).request.devices == ("0",)


def annotated(value: str, *env: str, mounts: tuple[str, ...] = ()) -> Container:
    return container(*env, mounts=mounts, annotations={"cdi.k8s.io/x_1": value})


@pytest.mark.parametrize(
    ("value", "mode", "source", "devices", "resolved"),
    [
        ("a.b/gpu=0,a.b/gpu=1", "auto", "cdi-annotations", ("a.b/gpu=0", "a.b/gpu=1"), "cdi"),
        ("0", "auto", "environment", ("1",), "jit-cdi"),
        ("0", "cdi", "cdi-annotations", ("0",), "cdi"),
        ("nvidia.com/gpu=0", "jit-cdi", "environment", ("1",), "jit-cdi"),
        ("nvidia.com/gpu=0", "legacy", "environment", ("1",), "legacy"),
        ("", "cdi", "environment", ("1",), "cdi"),
    ],
)
def test_annotations_count_in_mode_cdi_alone(
    value: str, mode: str, source: str, devices: tuple[str, ...], resolved: str
) -> None:
    seen = decide(annotated(value, f"{V}=1"), Settings(mode=mode))
    assert (seen.request.source, seen.request.devices, seen.mode) == (source, devices, resolved)


@pytest.mark.parametrize(
    ("value", "env", "hidden"),
    [
        ("nvidia.com/net-rdma=mlx5_0", (f"{V}=0",), f"{V}=0"),
        ("intel.com/gpu=0", (f"{V}=all", "CUDA_VERSION=12"), f"{V}=all"),
        ("vendor.com/net=1", ("CUDA_VERSION=12",), "CUDA_VERSION=12"),
        ("vendor.com/net=1,nvidia.com/gpu=0", (f"{V}=all",), ""),
        ("k8s.device-plugin.nvidia.com/gpu=GPU-1", (f"{V}=all",), ""),
        ("notnvidia.com/gpu=0", (f"{V}=all",), f"{V}=all"),
        ("vendor.com/net=1", (f"{V}=void",), ""),
        ("vendor.com/net=1", (f"{V}=none",), ""),
        ("vendor.com/net=1", (f"{V}={FOLDER}",), ""),
        ("vendor.com/net=1", (), ""),
    ],
)
def test_an_annotation_of_another_vendor_over_a_request_for_gpus_is_told(
    value: str, env: tuple[str, ...], hidden: str
) -> None:
    seen = decide(annotated(value, *env), Settings())
    assert seen.request.devices == tuple(value.split(",")) and seen.mode == "cdi"
    told = [rule for rule in seen.trace if rule.level == "warning"]
    assert [rule.where for rule in told] == (["annotation cdi.k8s.io/x_1"] if hidden else [])
    assert hidden in "".join(rule.outcome for rule in told)
    kept = Settings(policy_grants="kubelet")  # there neither counts
    assert [rule.name for rule in decide(annotated(value, *env), kept).trace if rule.level == "warning"] == ["policy"]


def test_an_annotation_of_the_sites_own_kind_hides_nothing() -> None:
    ours = Settings(cdi_default_kind="example.org/accelerator")
    seen = decide(annotated("example.org/accelerator=0", f"{V}=all"), ours)
    assert all(rule.level == "info" for rule in seen.trace)


def test_mounts_outrank_annotations_and_the_hook_knows_none() -> None:
    both = annotated("nvidia.com/gpu=0", mounts=("1",))
    assert decide(both, MOUNTS.replace(mode="cdi")).request.devices == ("1",)
    seen = decide(annotated("nvidia.com/gpu=0", f"{V}=1"), Settings(), hook=True)
    assert (seen.request.devices, seen.mode) == (("1",), "legacy")


def test_cdi_names_in_the_environment_choose_the_mode() -> None:
    assert decide(container(f"{V}=nvidia.com/gpu=0"), Settings()).mode == "cdi"
    assert decide(container(f"{V}=nvidia.com/gpu=0,1"), Settings()).mode == "jit-cdi"


def test_the_unprivileged_are_believed_only_where_configured() -> None:
    assert not asked(f"{V}=all", settings=UNPRIVILEGED)
    assert not asked("CUDA_VERSION=11.0", settings=UNPRIVILEGED)
    assert asked(f"{V}=all", settings=UNPRIVILEGED, privileged=True).devices == ("all",)
    both = UNPRIVILEGED.replace(accept_volume_mounts=True)
    assert asked(f"{V}=all", mounts=("1",), settings=both).devices == ("1",)
    trace = decide(container(f"{V}=all"), UNPRIVILEGED).trace
    assert [rule.outcome for rule in trace if rule.level == "warning"] == ["ignored: the container isn't privileged"]


def test_a_pause_container_is_left_alone_at_once() -> None:
    seen = decide(container(f"{V}=all", annotations=pod(kind="sandbox")), Settings())
    assert not seen.request
    assert len(seen.trace) == 1


C = "NVIDIA_DRIVER_CAPABILITIES"
ALL_OF_THEM = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")


@pytest.mark.parametrize(
    ("env", "supported", "wanted"),
    [
        ((), "all", ("compute", "utility")),
        ((f"{C}=",), "all", ("compute", "utility")),
        ((f"{C}=",), "compute", ("compute",)),
        ((), "video", ()),
        ((f"{C}=all",), "all", ALL_OF_THEM),
        ((f"{C}=video,all",), "compute,utility", ("compute", "utility")),
        ((f"{C}= video , compute,",), "all", ("compute", "video")),
        (("CUDA_VERSION=11.0",), "all", ALL_OF_THEM),
        (("CUDA_VERSION=11.0", f"{C}="), "all", ("compute", "utility")),
    ],
)
def test_capabilities(env: tuple[str, ...], supported: str, wanted: tuple[str, ...]) -> None:
    for mode in ("legacy", "jit-cdi"):
        settings = Settings(mode=mode, supported_capabilities=supported)
        assert asked(f"{V}=0", *env, settings=settings).capabilities == wanted


def test_an_unknown_capability_stops_legacy_and_is_left_out_elsewhere() -> None:
    with pytest.raises(RequestError, match=r"'compute,foo' \(allowed 'compute'\)"):
        asked(f"{V}=0", f"{C}=foo,compute", settings=Settings(mode="legacy"))
    assert asked(f"{V}=0", f"{C}=foo,compute").capabilities == ("compute",)
    with pytest.raises(ConfigError, match="supported-driver-capabilities"):
        asked(f"{V}=0", settings=Settings(supported_capabilities="all,compute"))


@pytest.mark.parametrize(
    "said",
    ["CUDA_VERSION=cu118", "NVIDIA_REQUIRE_CUDA=foo", "NVIDIA_REQUIRE_CUDA=cuda>=1.0 cuda>=x", "NVIDIA_REQUIRE_X=cuda"],
)
def test_a_requirement_that_cannot_be_read_is_passed_over_with_a_warning(said: str) -> None:
    decision = decide(container(f"{V}=0", said, "NVIDIA_REQUIRE_DRIVER=driver>=450"), Settings())
    assert decision.request.requirements == ("driver>=450",)
    (told,) = [rule for rule in decision.trace if rule.level == "warning" and rule.name == "requirements"]
    assert told.input == said


def test_a_cuda_version_that_cannot_be_read_stops_legacy() -> None:
    with pytest.raises(RequestError, match="CUDA_VERSION"):
        asked(f"{V}=0", "CUDA_VERSION=cu118", settings=Settings(mode="legacy"))


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ('"all"', ALL_OF_THEM),
        ("ALL", ALL_OF_THEM),
        ("'compute,utility'", ("compute", "utility")),
        ("Compute, UTILITY", ("compute", "utility")),
        ("nvidia.com/gpu=all", ALL_OF_THEM),
        ("compute;utility", ALL_OF_THEM),
        ("gpu,compute", ("compute",)),
        (" compute , 'utility'", ("compute", "utility")),
    ],
)
def test_odd_words_for_capabilities_leave_no_container_without_its_driver(value: str, wanted: tuple[str, ...]) -> None:
    """The peer's CDI modes never look at them, so containers with such words run today; where legacy mode stops, it
    goes on to."""
    assert asked(f"{V}=0", f"{C}={value}").capabilities == wanted
    with pytest.raises(RequestError, match="unsupported capabilities"):
        asked(f"{V}=0", f"{C}={value}", settings=Settings(mode="legacy"))


@pytest.mark.parametrize("value", [" ", ",", '""', "''", " , "])
def test_no_word_at_all_for_capabilities_is_as_if_unset(value: str) -> None:
    """In the CDI modes; legacy mode has always taken commas and blanks for none."""
    assert asked(f"{V}=0", f"{C}={value}").capabilities == ("compute", "utility")
    if not value.strip(", "):
        assert asked(f"{V}=0", f"{C}={value}", settings=Settings(mode="legacy")).capabilities == ()


def test_a_capability_that_is_not_allowed_does_not_become_all() -> None:
    settings = Settings(supported_capabilities="compute,utility")
    assert asked(f"{V}=0", f"{C}=graphics", settings=settings).capabilities == ()
    assert asked(f"{V}=0", f"{C}=graphics,foo", settings=settings).capabilities == ()
    assert asked(f"{V}=0", f"{C}=foo", settings=settings).capabilities == ("compute", "utility")


def test_every_capability_the_peers_way() -> None:
    settings = Settings(capabilities="all")
    assert asked(f"{V}=0", f"{C}=compute", settings=settings).capabilities == ALL_OF_THEM
    strict = settings.replace(mode="legacy")
    assert asked(f"{V}=0", f"{C}=compute", settings=strict).capabilities == ("compute",)


@pytest.mark.parametrize(
    ("env", "mounts", "settings", "wanted"),
    [
        (("NVIDIA_IMEX_CHANNELS=0,2,0",), (), Settings(), ("0", "2")),
        (("NVIDIA_IMEX_CHANNELS=all",), (), Settings(), ()),
        (("NVIDIA_IMEX_CHANNELS=none",), (), Settings(), ()),
        (("NVIDIA_IMEX_CHANNELS=0",), ("imex/3",), MOUNTS, ("3",)),
        (("NVIDIA_IMEX_CHANNELS=0",), ("imex/3",), Settings(), ("0",)),
        (("NVIDIA_IMEX_CHANNELS=0",), ("1",), MOUNTS.replace(accept_envvar_unprivileged=False), ()),
        (("NVIDIA_IMEX_CHANNELS=0",), (), Settings(ignore_imex_requests=True), ()),
    ],
)
def test_imex(env: tuple[str, ...], mounts: tuple[str, ...], settings: Settings, wanted: tuple[str, ...]) -> None:
    assert asked(f"{V}=0", *env, mounts=mounts, settings=settings).imex == wanted


def test_gated_devices_by_their_exact_word() -> None:
    assert asked(f"{V}=0", "NVIDIA_GDS=enabled", "NVIDIA_MOFED=1", "NVIDIA_NVSWITCH=enabled").gated == (
        "gds",
        "nvswitch",
    )


def test_mig_management_needs_privilege() -> None:
    with pytest.raises(RequestError, match="cannot set MIG_CONFIG_DEVICES in non privileged container"):
        asked(f"{V}=0", "NVIDIA_MIG_CONFIG_DEVICES=all", settings=Settings(mode="legacy"))
    assert asked(f"{V}=0", "NVIDIA_MIG_MONITOR_DEVICES=all").mig_monitor == ""
    assert asked(f"{V}=0", "NVIDIA_MIG_MONITOR_DEVICES=all", privileged=True).mig_monitor == "all"


@pytest.mark.parametrize(
    ("devices", "value"),
    [
        (("all",), None),
        ((), ""),
        (("3", "5"), "0,1"),
        (("5", "3"), "1,0"),
        (("10", "9", "2"), "2,1,0"),
        (("1", "01", "0"), "1,0"),
        (("nvidia.com/gpu=3", "nvidia.com/gpu=1"), "1,0"),
        (("1:0", "0:1", "0"), "2,1,0"),
        ((GPUS[0], "1", "0"), "0,1,2"),
        (GPUS, ",".join(GPUS)),
        (("nvidia.com/gpu=" + GPUS[0],), GPUS[0]),
        (("nvidia.com/gpu=1",), "0"),
        (("nvidia.com/gpu=all",), None),
        (("MIG-x", "0"), "0,1"),
        (("ALL",), None),
        (("0", "All"), None),
        (("nvidia.com/gpu=ALL",), None),
        (("NONE",), ""),
        (("Void", "3"), "0"),
        (("gpu-x",), "0"),
    ],
)
def test_what_cuda_reads_inside(devices: tuple[str, ...], value: str | None) -> None:
    assert cuda_value(Request("environment", devices)) == value


@pytest.mark.parametrize(("value", "inside"), [("1,,0", "1,0"), ("0,,1", "0,1"), ("7, 2 ,7", "1,0")])
def test_cuda_keeps_the_order_that_was_asked_for(value: str, inside: str) -> None:
    settings = Settings(visible_devices_envvars=("CUDA_VISIBLE_DEVICES",))
    assert cuda_value(asked(f"CUDA_VISIBLE_DEVICES={value}", settings=settings)) == inside


def test_the_trace_tells_where_each_input_stands() -> None:
    trace = decide(container(f"{V}=0", f"{C}=compute", "NVIDIA_REQUIRE_CUDA=cuda>=12"), Settings()).trace
    told = {rule.name: (rule.input, rule.where, rule.outcome) for rule in trace}
    assert told["environment"] == (f"{V}=0", "process.env[1]", "read")
    assert told["capabilities"] == ("compute", "process.env[2]", "compute")
    assert told["requirements"][1] == "process.env[3]"
    assert told["mode"] == ("auto", "default", "mode jit-cdi")
