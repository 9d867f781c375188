from __future__ import annotations

import pytest

from gpulet.errors import ConfigError, UsageError
from gpulet.plugin.config import Config, load
from gpulet.plugin.options import OPTIONS, usage
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import Pattern, Shared, Sharing, resource_name
from support.hand_made import facts


def from_file(tmp_path, text: str, *argv: str, **environ: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load(["--config-file", str(path), *argv], environ)


def test_defaults():
    assert load([], {}) == Config(
        dev_root="/",
        kubelet_socket_dir="/var/lib/kubelet/device-plugins",
        state_dir="/var/lib/kubelet/device-plugins/gpulet",
        pod_resources_socket="/var/lib/kubelet/pod-resources/kubelet.sock",
    )


def test_where_faults_are_kept():
    assert load(["--kubelet-socket-dir=/k/s"], {}).state_dir == "/k/s/gpulet"
    assert load(["--kubelet-socket-dir=/k/s"], {"STATE_DIR": "/x"}).state_dir == "/x"
    assert load(["--state-dir="], {}).state_dir == ""


def test_flag_over_environment_over_file_over_default(tmp_path):
    text = "version: v1\nflags: {migStrategy: mixed, plugin: {deviceIDStrategy: index}}"
    assert from_file(tmp_path, text).mig_strategy == from_file(tmp_path, "\ufeff" + text).mig_strategy == "mixed"
    assert from_file(tmp_path, text, MIG_STRATEGY="single").mig_strategy == "single"
    assert from_file(tmp_path, text, "--mig-strategy=none", MIG_STRATEGY="single").mig_strategy == "none"
    assert from_file(tmp_path, text, MIG_STRATEGY="single").device_id_strategy == "index"


@pytest.mark.parametrize(
    "words",
    [
        ["--device-list-strategy=envvar,cdi-cri"],
        ["-device-list-strategy", "envvar, cdi-cri"],
        ["--device-list-strategy", "envvar", "--device-list-strategy", "cdi-cri"],
    ],
)
def test_go_command_lines(words):
    assert load([*words, "--pass-device-specs"], {"DEVICE_LIST_STRATEGY": "volume-mounts"}) == load(
        [], {"DEVICE_LIST_STRATEGY": "envvar,cdi-cri", "PASS_DEVICE_SPECS": "t"}
    )


def test_a_bare_boolean_does_not_eat_the_next_word():
    with pytest.raises(UsageError, match=r"unknown argument: false \(wanted --pass-device-specs=false\)$"):
        load(["--pass-device-specs", "false"], {})
    for words in (["true"], ["--mps-root", "/m", "true"], ["--pass-device-specs=true", "true"]):
        with pytest.raises(UsageError, match="unknown argument: true; see --help"):
            load(words, {})
    with pytest.raises(UsageError, match="unknown argument: maybe; see --help"):
        load(["--pass-device-specs", "maybe"], {})
    assert load(["--fail-on-init-error=false"], {}).fail_on_init_error is False


@pytest.mark.parametrize("name", ["NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"])
def test_both_environment_names(name):
    assert load([], {name: "/usr/bin/x"}).cdi_hook_path == "/usr/bin/x"
    both = {"NVIDIA_CDI_HOOK_PATH": "/first", "NVIDIA_CTK_PATH": "/second"}
    assert load([], both).cdi_hook_path == "/first"


def test_an_empty_variable_is_not_set(tmp_path):
    text = "flags: {plugin: {passDeviceSpecs: true}}"
    assert from_file(tmp_path, text, PASS_DEVICE_SPECS="").pass_device_specs is True


def test_the_root_can_come_from_our_variable():
    assert load([], {"GPULET_DRIVER_ROOT": "/a"}).driver_root == "/a"
    assert load([], {"GPULET_DRIVER_ROOT": "/a", "NVIDIA_DRIVER_ROOT": "/b"}).driver_root == "/b"
    assert load(["--driver-root=/c"], {}).dev_root == "/c"
    assert load(["--driver-root=/c", "--dev-root=/d"], {}).dev_root == "/d"


def test_the_root_as_this_process_sees_it(tmp_path):
    mounted = tmp_path / "mounted"
    config = load([f"--driver-root-ctr-path={mounted}", "--driver-root=/host"], {})
    assert config.lookup_root == "/host"
    (mounted / "dev").mkdir(parents=True)
    assert config.lookup_root == config.lookup_dev_root == str(mounted)


def test_one_setting_moves_all_sockets():
    config = load(["--kubelet-socket-dir=/x"], {})
    assert (config.kubelet_socket, config.kubelet_socket_dir) == ("/x/kubelet.sock", "/x")
    config = load(["--kubelet-socket=/y/kubelet.sock"], {})
    assert (config.kubelet_socket, config.kubelet_socket_dir) == ("/y/kubelet.sock", "/y")
    config = load(["--kubelet-socket="], {})
    assert (config.kubelet_socket, config.kubelet_socket_dir) == ("", "/var/lib/kubelet/device-plugins")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-list-strategy=env"], "invalid --device-list-strategy option: invalid strategy: env"),
        (["--device-list-strategy="], "invalid strategy: none given"),
        (["--device-id-strategy=x"], "invalid --device-id-strategy option: x"),
        (["--shared-devices-allocation-policy=x"], "invalid --shared-devices-allocation-policy option: x"),
        (["--device-discovery-strategy=vfio"], "invalid --device-discovery-strategy option: vfio"),
        (["--mig-strategy=x"], "unknown MIG strategy: x"),
        (["--imex-channel-ids=0,2"], r"channelIDs must be \[\] or \[0\]; found: \[0, 2\]"),
        (["--imex-channel-ids=a"], "flag --imex-channel-ids is no list of numbers: 'a'"),
        (["--pass-device-specs=maybe"], "flag --pass-device-specs is no boolean: 'maybe'"),
        (["--device-list-envvar=9X"], "invalid --device-list-envvar option: '9X'"),
        (["--device-filter=name=x"], "invalid --device-filter option: name=x"),
        (["--refresh-interval=0"], "flag --refresh-interval is no time: '0'"),
        (["--refresh-interval=1s"], "flag --refresh-interval is no time: '1s'"),
        (["--health-profile=x"], "invalid --health-profile option: x"),
        (["--log-format=xml"], "invalid --log-format option: xml"),
        (["--config-file=/no/such/file"], "config file /no/such/file can't be read: No such file"),
    ],
)
def test_refused_values(words, message):
    with pytest.raises(ConfigError, match=message):
        load(words, {})


@pytest.mark.parametrize("words", [["--no-such-flag"], ["word"], ["--mig-strategy"]])
def test_wrong_command_lines(words):
    with pytest.raises(UsageError):
        load(words, {})


def test_environment_boolean_names_its_variable():
    with pytest.raises(ConfigError, match="environment variable GDS_ENABLED is no boolean: 'yes'"):
        load([], {"GDS_ENABLED": "yes"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: v2", "unknown version: v2"),
        ("[1]", "list"),
        ("a: [", "is no YAML"),
        ("flags: 3", "flags: 3"),
        ("flags: {failOnInitError: maybe}", "line 1: flags.failOnInitError: 'maybe'"),
        ("flags: {migStrategy: no}", "unknown MIG strategy: false"),
        ("flags: {plugin: {deviceListStrategy: 'envvar,cdi-cri'}}", "invalid strategy: envvar,cdi-cri"),
        ("flags: {plugin: {deviceListStrategy: 5}}", "deviceListStrategy: 5"),
        ("flags: {plugin: {deviceListStrategy: []}}", "none given"),
        ("imex: {channelIDs: [2]}", "found: "),
        ("sharing: {timeSlicing: null}", "no resources specified"),
        ("sharing: {mps: {}}", "no resources specified"),
        ("sharing: {timeSlicing: {resources: [{replicas: 2}]}}", "no resource name specified"),
        ("sharing: {timeSlicing: {resources: [{name: gpu}]}}", "no replicas specified"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 1}]}}", "must be >= 2: 1"),
        (
            "sharing: {timeSlicing: {resources: [{name: gpu, replicas: '4'}]}}",
            r"is text: '4' \(wanted a number, 2 or more",
        ),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: four}]}}", r"is text: 'four' \(wanted a number"),
        (
            "sharing: {timeSlicing: {resources: [{name: example.com/gpu, replicas: 2}]}}",
            r"'example.com/gpu' \(wanted a name that begins with nvidia.com/, or one without a domain\)",
        ),
        ("resources: {gpus: [{pattern: '*', name: a/b}]}", r"'a/b' \(wanted a name that begins with nvidia.com/"),
        (
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata:\n  any: |\n    version: v1\n",
            r"line 2: kind: this is a ConfigMap's manifest \(wanted what stands under its data.any\)",
        ),
        ("apiVersion: v1\nkind: ConfigMap\n", r"a ConfigMap's manifest \(wanted what stands under its data.<key>\)"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: some}]}}", "'some'"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: 0}]}}", "must be > 0"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: [x]}]}}", "unsupported"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: {}}]}}", "unrecognized"),
        ("sharing: {timeSlicing: {resources: [{name: a, replicas: 2}, {name: a, replicas: 3}]}}", "twice"),
        ("sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}", "MPS requires --mps-root"),
        ("resources: {gpus: [{name: x}]}", "'pattern' field"),
        ("[" * 3000, "nested too deeply"),
        ("flags: &f {plugin: *f}", "more than 30 levels"),
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a, *a]\n"
            "c: &c [*b, *b, *b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]\n"
            "e: [*c, *c, *c, *c, *c, *c, *c, *c, *c, *c]",
            "more than 20000 values",
        ),
        ("flags: {migStrategy: 2024-13-45}", "unknown MIG strategy: 2024-13-45"),  # no date that can't be made
        ("flags: {plugin: {refreshInterval: " + "9" * 5000 + "}}", "at most a day"),
        ("flags: {plugin: {refreshInterval: .inf}}", "at most a day"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: " + "9" * 5000 + "}]}}", "is text: '999"),
        ("a: !!set {x}", "a set where text"),
        ("Version: v2", "unknown version: v2"),
        ("resources: {gpus: [{pattern: x, name: A_B}]}", "incorrect format for resource name"),
    ],
)
def test_refused_files(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        from_file(tmp_path, text)


PLACES = """\
version: v1
flags:
  migStrategy: none
  failOnInitError: true
  plugin: &p
    {}
sharing:
  timeSlicing:
    {}
    resources:
    - name: gpu
      replicas: 2
    - name: other
      {}
resources:
  gpus:
  - pattern: "*"
    name: {}
"""


@pytest.mark.parametrize(
    ("number", "text", "line", "key", "message"),
    [
        (0, "deviceIDStrategy: name", 6, "flags.plugin.deviceIDStrategy", "invalid --device-id-strategy option: name"),
        (0, "DEVICEIDSTRATEGY: name", 6, "flags.plugin.deviceIDStrategy", "invalid --device-id-strategy"),
        (0, "gds: 1\n    stateDir: \"/a\\0b\"", 7, "flags.plugin.stateDir", "without a NUL"),
        (0, "deviceFilter: [index=1,\n      x=3]", 6, "flags.plugin.deviceFilter", "invalid --device-filter"),
        (0, "spreadMinimum: 2", 6, "flags.plugin.spreadMinimum", "means nothing under this policy"),
        (0, "refreshInterval: 1\n    refreshInterval: 0", 7, "flags.plugin.refreshInterval", "at most a day"),
        (0, "a: !!set {x}", 6, "flags.plugin.a", "a set where"),
        (1, "renameByDefault: 3", 9, "sharing.timeSlicing.renameByDefault", "wanted true or false"),
        (2, "replicas: 1", 14, "sharing.timeSlicing.resources[1].replicas", "must be >= 2"),
        (2, "x: 1", 13, "sharing.timeSlicing.resources[1]", "no replicas specified"),
        (2, "replicas: 2\n      devices: [x]", 15, "sharing.timeSlicing.resources[1].devices", "unsupported"),
        (2, "replicas: 2\n      rename: A", 15, "sharing.timeSlicing.resources[1].rename", "incorrect format"),
        (3, "A_B", 18, "resources.gpus[0].name", "incorrect format"),
        (3, "''", 17, "resources.gpus[0]", "must have a 'name' field"),
    ],
)  # fmt: skip
def test_a_refused_value_is_named_by_file_line_and_key(tmp_path, number, text, line, key, message):
    parts = ["x: 1", "renameByDefault: false", "replicas: 3", "x"]
    parts[number] = text
    with pytest.raises(ConfigError) as caught:
        from_file(tmp_path, PLACES.format(*parts))
    start = f"config file {tmp_path}/config.yaml, line {line}: {key}: "
    assert str(caught.value).startswith(start)
    assert message in str(caught.value)


def test_a_flag_that_stands_over_the_file_is_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^unknown MIG strategy: x"):
        from_file(tmp_path, "flags: {migStrategy: none}", "--mig-strategy=x")


def test_sharing_that_the_node_cannot_meet_is_named_by_its_place(tmp_path):
    text = "sharing:\n  timeSlicing:\n    resources:\n    - {name: gpu, replicas: 2, devices: WHICH}"
    for which in ("[99]", "5"):
        with pytest.raises(ConfigError, match=r"yaml, line 4: sharing.timeSlicing.resources\[0\] of nvidia.com/gpu: "):
            inventory(facts(2), from_file(tmp_path, text.replace("WHICH", which)))


def test_a_line_more_is_no_other_configuration(tmp_path):
    text = "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}"
    assert from_file(tmp_path, text) == from_file(tmp_path, f"\n{text}")


def test_mps_and_mixed_do_not_go_together(tmp_path):
    text = "flags: {migStrategy: mixed, mpsRoot: /m}\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}"
    with pytest.raises(ConfigError, match="mixed is not supported with MPS"):
        from_file(tmp_path, text)


def test_sharing_sections(tmp_path):
    text = """
sharing:
  timeSlicing:
    renameByDefault: true
    resources: [{name: gpu, replicas: 2.0, devices: [0, "1:2"]}, {name: nvidia.com/x, replicas: 3, rename: z}]
"""
    config = from_file(tmp_path, text)
    assert config.sharing.fail_above_one is False
    assert config.sharing.resources == (
        Shared("nvidia.com/gpu", 2, "nvidia.com/gpu.shared", ("0", "1:2")),
        Shared("nvidia.com/x", 3, "nvidia.com/z"),
    )
    mps = "flags: {mpsRoot: /m}\nsharing: {mps: {FAIL resources: [{name: gpu, replicas: 2}]}}"
    assert from_file(tmp_path, mps.replace("FAIL", "")).sharing.fail_above_one is True
    explicit = mps.replace("FAIL", "failRequestsGreaterThanOne: false,")
    assert from_file(tmp_path, explicit).sharing.fail_above_one is False


@pytest.mark.parametrize("text", ["", "version:", "version: ''", "flags:", '{"flags": null}'])
def test_files_that_say_nothing(tmp_path, text):
    assert from_file(tmp_path, text).mig_strategy == "none"


def test_keys_in_any_case_and_misspelt_keys(tmp_path):
    config = from_file(tmp_path, "flags: {MIGSTRATEGY: mixed, migStrategys: none, gfd: {oneshot: true}}\nflagz: 1")
    assert config.mig_strategy == "mixed"
    assert [warning.partition("unknown key ")[2] for warning in config.warnings] == [
        "flagz ignored",
        "flags.migStrategys ignored",
    ]


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        ("*", "anything", True),
        ("1g.24gb", "1g.24gb", True),
        ("1g.24gb", "1g.24gb-me", False),
        ("1g.24gb", "1g.24gb+gfx", False),
        ("1g.*", "1g.24gb+me.all", True),
        ("*H100*", "NVIDIA H100 80GB HBM3", True),
        ("H100*", "NVIDIA H100", False),
        ("A.C", "ABC", False),
    ],
)
def test_patterns(pattern, text, matches):
    assert Pattern(pattern, "nvidia.com/x").matches(text) is matches


@pytest.mark.parametrize(("text", "full"), [("gpu", "nvidia.com/gpu"), ("nvidia.com/mig-1g.5gb.me", None)])
def test_resource_names(text, full):
    assert resource_name(text) == (full or text)


@pytest.mark.parametrize("text", ["foo.com/bar", "x" * 60, "-a", "a_b", "A"])
def test_no_resource_names(text):
    with pytest.raises(ConfigError):
        resource_name(text)


def test_usage_names_every_flag():
    text = usage("gpulet-device-plugin")
    for option in OPTIONS:
        assert all(f"--{flag}" in text for flag in option.flags)
        assert hasattr(Config(), option.field)


def test_yaml_as_the_peers_parser_reads_it(tmp_path):
    config = from_file(tmp_path, "flags: {failOnInitError: n, gdsEnabled: Y, mpsRoot: 2024-01-05}\n---\nversion: v9\n")
    assert (config.fail_on_init_error, config.gds_enabled, config.mps_root) == (False, True, "2024-01-05")
    text = "sharing: {timeslicing: {resources: [{name: gpu, replicas: 1e1, devices: [1:0, 010]}]}}"
    assert from_file(tmp_path, text).time_slicing == Sharing((Shared("nvidia.com/gpu", 10, "", ("1:0", "8")),))


@pytest.mark.parametrize("value", ["!!int ''", "!!int x", "!!bool q", "!!timestamp x", "!!binary a", "!!float x"])
def test_a_value_that_is_not_what_its_tag_says(tmp_path, value):
    with pytest.raises(ConfigError, match="is no YAML"):
        from_file(tmp_path, f"flags: {{mpsRoot: {value}}}")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("1: x", "1"),
        ("on: x", "true"),
        ("flags: {~: 1}", "flags.null"),
        ("sharing: {timeSlicing: {renamebydefault: true, resources: [{name: gpu, replicas: 2}]}}",
         "sharing.timeSlicing.renamebydefault"),
        ("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, Rename: x}]}}",
         "sharing.timeSlicing.resources[].Rename"),
        ("resources: {gpus: [{pattern: '*', name: x, nmae: y}]}", "resources.gpus[].nmae"),
    ],
)  # fmt: skip
def test_keys_that_nobody_reads_are_named(tmp_path, text, key):
    assert from_file(tmp_path, text).warnings == (f"config file {tmp_path}/config.yaml: unknown key {key} ignored",)


def test_numbers_of_thousands_of_digits():
    for flag in ("spread-minimum", "imex-channel-ids", "refresh-interval"):
        with pytest.raises(ConfigError):
            load([f"--{flag}={'9' * 5000}"], {})
