"""The daemon's flags: one row says a setting's name, its environment variables and its place in the YAML file.

Names and lookup order are the peer's (k8s-device-plugin v0.20), so its manifests keep working; the rows marked "ours"
are additions. Command lines follow Go's rules: one or two dashes, `--name=value` or `--name value`, a bare boolean is
true, list flags may be repeated and are split at commas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpulet.errors import ConfigError, UsageError

TRUE = ("1", "t", "T", "TRUE", "true", "True")
LONGEST_NUMBER = 19  # digits; Python itself gives up at some thousands, with an error of another kind
MOST_SECONDS = 86400.0  # beyond a day nobody would know that a node is being looked at
FALSE = ("0", "f", "F", "FALSE", "false", "False")

Scalar = str | bool | int | float | tuple[str, ...] | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. kind: "text", "bool", "seconds", "count", "list" or "ints"; key: its path in the file, or ""."""

    field: str
    kind: str
    flags: tuple[str, ...]
    environ: tuple[str, ...]
    key: str
    help: str


def row(field: str, kind: str, flags: str, environ: str, key: str, text: str) -> Option:
    """An Option; flags and variables as words."""
    return Option(field, kind, tuple(flags.split()), tuple(environ.split()), key, text)


OPTIONS: tuple[Option, ...] = (
    row("mig_strategy", "text", "mig-strategy", "MIG_STRATEGY", "flags.migStrategy",
        "what to advertise of MIG: none, single, mixed or as-is"),
    row("fail_on_init_error", "bool", "fail-on-init-error", "FAIL_ON_INIT_ERROR", "flags.failOnInitError",
        "end when NVML can't be initialised, instead of waiting for it"),
    row("driver_root", "text", "driver-root nvidia-driver-root", "NVIDIA_DRIVER_ROOT GPULET_DRIVER_ROOT",
        "flags.nvidiaDriverRoot", "where the driver's files are on the host"),
    row("dev_root", "text", "dev-root nvidia-dev-root", "NVIDIA_DEV_ROOT", "flags.nvidiaDevRoot",
        "where the host's dev/ folder is; the driver root by default"),
    row("pass_device_specs", "bool", "pass-device-specs", "PASS_DEVICE_SPECS", "flags.plugin.passDeviceSpecs",
        "name the device nodes in Allocate's answers too"),
    row("device_list_strategy", "list", "device-list-strategy", "DEVICE_LIST_STRATEGY",
        "flags.plugin.deviceListStrategy", "any of envvar, volume-mounts, cdi-annotations, cdi-cri"),
    row("device_id_strategy", "text", "device-id-strategy", "DEVICE_ID_STRATEGY", "flags.plugin.deviceIDStrategy",
        "uuid or index"),
    row("device_list_envvar", "text", "device-list-envvar", "DEVICE_LIST_ENVVAR", "flags.plugin.deviceListEnvvar",
        "(ours) the variable that names a container's devices"),
    row("gdrcopy_enabled", "bool", "gdrcopy-enabled", "GDRCOPY_ENABLED", "flags.gdrcopyEnabled", "ask for GDRCopy"),
    row("gds_enabled", "bool", "gds-enabled", "GDS_ENABLED", "flags.gdsEnabled", "ask for GPUDirect Storage"),
    row("mofed_enabled", "bool", "mofed-enabled", "MOFED_ENABLED", "flags.mofedEnabled", "ask for MOFED devices"),
    row("cdi_annotation_prefix", "text", "cdi-annotation-prefix", "CDI_ANNOTATION_PREFIX",
        "flags.plugin.cdiAnnotationPrefix", "prefix of the CDI annotation's key"),
    row("cdi_hook_path", "text", "nvidia-cdi-hook-path nvidia-ctk-path", "NVIDIA_CDI_HOOK_PATH NVIDIA_CTK_PATH",
        "flags.plugin.nvidiaCTKPath",
        "the host's path of the hook program in CDI specs: gpulet-cdi-hook does all in one process, any other is given "
        "NVIDIA's hooks one by one"),
    row("driver_root_ctr_path", "text", "driver-root-ctr-path container-driver-root",
        "DRIVER_ROOT_CTR_PATH CONTAINER_DRIVER_ROOT", "flags.plugin.containerDriverRoot",
        "where the driver root is mounted for this process; the driver root itself where that isn't there"),
    row("mps_root", "text", "mps-root", "MPS_ROOT", "flags.mpsRoot", "the host's folder of the MPS daemons' files"),
    row("allocation_policy", "text", "shared-devices-allocation-policy", "SHARED_DEVICES_ALLOCATION_POLICY",
        "flags.plugin.sharedDevicesAllocationPolicy", "distributed, packed or (ours) spread, for shared devices"),
    row("spread_minimum", "count", "spread-minimum", "SPREAD_MINIMUM", "flags.plugin.spreadMinimum",
        "(ours) under policy spread, refuse so many shared devices on fewer different GPUs than this; 0: any number"),
    row("discovery", "text", "device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY",
        "flags.deviceDiscoveryStrategy", "auto, nvml or tegra"),
    row("imex_channel_ids", "ints", "imex-channel-ids", "IMEX_CHANNEL_IDS", "imex.channelIDs", "[] or [0]"),
    row("imex_required", "bool", "imex-required", "IMEX_REQUIRED", "imex.required",
        "end when an IMEX channel isn't there"),
    row("kubelet_socket", "text", "kubelet-socket", "KUBELET_SOCKET", "",
        "the kubelet's registration socket; empty: don't register"),
    row("kubelet_socket_dir", "text", "kubelet-socket-dir", "KUBELET_SOCKET_DIR", "",
        "(ours) the folder of kubelet.sock and of the plugin's own sockets"),
    row("config_file", "text", "config-file", "CONFIG_FILE", "", "a YAML file with any of these settings"),
    row("cdi_feature_flags", "list", "cdi-feature-flags", "CDI_FEATURE_FLAGS", "", "features of CDI specs"),
    row("cdi_disable_hooks", "list", "cdi-disable-hooks", "CDI_DISABLE_HOOKS", "", "hooks left out of CDI specs"),
    row("cdi_spec_dir", "text", "cdi-spec-dir", "CDI_SPEC_DIR", "", "(ours) where CDI specs are written"),
    row("device_filter", "list", "device-filter", "DEVICE_FILTER", "flags.plugin.deviceFilter",
        "(ours) offer only GPUs that match any of uuid=, index=, pci= or model=PATTERN, and none that match a !one"),
    row("refresh_interval", "seconds", "refresh-interval", "REFRESH_INTERVAL", "flags.plugin.refreshInterval",
        "(ours) seconds between looks at the node's GPUs and at the config file"),
    row("disable_healthchecks", "text", "disable-healthchecks", "DP_DISABLE_HEALTHCHECKS", "",
        "Xids that make nothing unhealthy: numbers, or all"),
    row("enable_healthchecks", "text", "enable-healthchecks", "DP_ENABLE_HEALTHCHECKS", "",
        "Xids that make their GPU unhealthy all the same"),
    row("health_profile", "text", "health-profile", "HEALTH_PROFILE", "flags.plugin.healthProfile",
        "(ours) default: pass over the Xids that the peer does; catalogue: go by NVIDIA's catalogue"),
    row("state_dir", "text", "state-dir", "STATE_DIR", "flags.plugin.stateDir",
        "(ours) where faults are kept across restarts: gpulet beside the sockets by default; --state-dir= for "
        "nowhere; a file well/UUID in it clears a GPU's"),
    row("runtime_state_dir", "text", "runtime-state-dir", "RUNTIME_STATE_DIR", "",
        "(ours) gpulet-runtime's state-dir, where it counts its injections for our metrics"),
    row("node_name", "text", "node-name", "NODE_NAME", "",
        "(ours) this node's name in the cluster: where it and an API server are known, health changes become Events"),
    row("pod_resources_socket", "text", "pod-resources-socket", "POD_RESOURCES_SOCKET", "",
        "(ours) the kubelet's PodResources socket, which tells metrics who has which GPU; pod-resources/kubelet.sock "
        "beside the sockets' folder by default"),
    row("metrics_address", "text", "metrics-address", "METRICS_ADDRESS", "",
        "(ours) host:port for /metrics, /healthz and /readyz; empty: none"),
    row("log_format", "text", "log-format", "LOG_FORMAT", "", "(ours) text or json"),
    row("log_level", "text", "log-level", "LOG_LEVEL", "", "(ours) debug, info, warning or error"),
)  # fmt: skip


def read_arguments(argv: Sequence[str], options: Sequence[Option] = OPTIONS) -> dict[str, Scalar]:
    """The command line's settings, field name -> value. Raises UsageError."""
    rows = {flag: option for option in options for flag in option.flags}
    found: dict[str, Scalar] = {}
    rest, switch = list(argv), ""
    while rest:
        word = rest.pop(0)
        name, equals, text = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in rows:
            meant = f"--{switch}={word}" if switch and word in TRUE + FALSE else ""
            raise UsageError("unknown argument", seen=word, wanted=meant, remedy="" if meant else "see --help")
        option = rows[name]
        switch = name if option.kind == "bool" and not equals else ""
        if not equals and option.kind != "bool":
            if not rest:
                raise UsageError(f"flag --{name} has no value", wanted=f"--{name}=VALUE")
            text = rest.pop(0)
        value = convert(option, text if equals or option.kind != "bool" else "true", f"flag --{name}")
        earlier = found.get(option.field)
        if isinstance(value, tuple) and isinstance(earlier, tuple):
            value = (*earlier, *value)
        found[option.field] = value
    return found


def read_environ(environ: Mapping[str, str], options: Sequence[Option] = OPTIONS) -> dict[str, Scalar]:
    """The environment's settings. A variable that is set to nothing counts as not set (the peer lets an empty
    variable override the file, with "" or false)."""
    found: dict[str, Scalar] = {}
    for option in options:
        for name in option.environ:
            if environ.get(name):
                found[option.field] = convert(option, environ[name], f"environment variable {name}")
                break
    return found


def convert(option: Option, text: str, where: str) -> Scalar:
    """A setting's value from text. Raises ConfigError naming `where`."""
    if option.kind == "bool":
        if text in TRUE or text in FALSE:
            return text in TRUE
        raise ConfigError(f"{where} is no boolean", seen=repr(text), wanted="true or false")
    if option.kind == "text":
        return text
    if option.kind == "seconds":
        return _seconds(text, where)
    if option.kind == "count":
        if text.isascii() and text.isdigit() and len(text) < LONGEST_NUMBER:
            return int(text)
        raise ConfigError(f"{where} is no count", seen=repr(text), wanted="a whole number, 0 or more")
    items = tuple(item.strip() for item in text.split(","))
    if option.kind == "list":
        return tuple(item for item in items if item)
    if not all(item.isascii() and item.isdigit() and len(item) < LONGEST_NUMBER for item in items if item):
        raise ConfigError(f"{where} is no list of numbers", seen=repr(text), wanted="numbers joined by commas")
    return tuple(int(item) for item in items if item)


def _seconds(text: str, where: str) -> float:
    whole, _, part = text.partition(".")
    if not (whole + part).isdigit() or not (whole + part).isascii() or not 0 < float(text) <= MOST_SECONDS:
        raise ConfigError(f"{where} is no time", seen=repr(text), wanted="seconds, more than 0 and at most a day")
    return float(text)


def usage(program: str, options: Sequence[Option] = OPTIONS) -> str:
    """The text of --help."""
    lines = [f"usage: {program} [--FLAG=VALUE ...]", ""]
    for option in options:
        lines.append(f"  --{', --'.join(option.flags)}  [{', '.join(option.environ)}]")
        lines.append(f"        {option.help}")
    return "\n".join([*lines, "", "  --version", "  --help"])
