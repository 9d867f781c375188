"""The daemon's settings: flags over environment over the YAML file over the defaults, checked as a whole.

`load` either gives a Config that every part can rely on or raises ConfigError (UsageError for the command line);
a running daemon keeps its last good Config when a new one is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gpulet.errors import ConfigError
from gpulet.plugin.document import Place, get, has, section, unknown_keys
from gpulet.plugin.options import MOST_SECONDS, OPTIONS, Option, Scalar, read_arguments, read_environ
from gpulet.plugin.sharing import Pattern, Sharing, read_patterns, read_sharing

STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
KUBELET_DIR = "/var/lib/kubelet/device-plugins"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything the daemon may be told; field names are those of options.OPTIONS."""

    mig_strategy: str = "none"
    fail_on_init_error: bool = True
    driver_root: str = "/"
    dev_root: str = ""
    pass_device_specs: bool = False
    device_list_strategy: tuple[str, ...] = ("envvar",)
    device_id_strategy: str = "uuid"
    device_list_envvar: str = "NVIDIA_VISIBLE_DEVICES"
    gdrcopy_enabled: bool = False
    gds_enabled: bool = False
    mofed_enabled: bool = False
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    cdi_hook_path: str = "/usr/bin/nvidia-ctk"
    driver_root_ctr_path: str = "/driver-root"
    mps_root: str = ""
    allocation_policy: str = "distributed"
    spread_minimum: int = 0
    discovery: str = "auto"
    imex_channel_ids: tuple[int, ...] = ()
    imex_required: bool = False
    kubelet_socket: str = f"{KUBELET_DIR}/kubelet.sock"
    kubelet_socket_dir: str = ""
    config_file: str = ""
    cdi_feature_flags: tuple[str, ...] = ()
    cdi_disable_hooks: tuple[str, ...] = ()
    cdi_spec_dir: str = "/var/run/cdi"
    device_filter: tuple[str, ...] = ()
    refresh_interval: float = 5.0
    disable_healthchecks: str = ""
    enable_healthchecks: str = ""
    health_profile: str = "default"
    state_dir: str = ""
    runtime_state_dir: str = "/run/gpulet"
    node_name: str = ""
    pod_resources_socket: str = ""
    metrics_address: str = ""
    log_format: str = "text"
    log_level: str = "info"
    time_slicing: Sharing | None = None
    mps: Sharing | None = None
    gpu_patterns: tuple[Pattern, ...] = ()
    mig_patterns: tuple[Pattern, ...] = ()
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def cdi(self) -> bool:
        """Whether any strategy names devices through CDI."""
        return any(name.startswith("cdi-") for name in self.device_list_strategy)

    @property
    def sharing(self) -> Sharing | None:
        """The sharing in force: MPS before time-slicing, where it makes replicas."""
        return next((way for way in (self.mps, self.time_slicing) if way and way.active), None)

    @property
    def mps_active(self) -> bool:
        """Whether devices are shared through MPS."""
        return self.mps is not None and self.mps.active

    def difference(self, old: Config) -> str:
        """What changed since the old one, for people."""
        changed = [item.name for item in fields(self) if getattr(self, item.name) != getattr(old, item.name)]
        return "; ".join(
            f"{name} = {getattr(self, name)!r} (was {getattr(old, name)!r})" for name in changed if name != "warnings"
        )

    @property
    def lookup_root(self) -> str:
        """Where this process finds the driver's files: the root's mount in its container, else the root itself."""
        mounted = os.path.isdir(self.driver_root_ctr_path)
        return self.driver_root_ctr_path if mounted else self.driver_root

    @property
    def lookup_dev_root(self) -> str:
        """The folder whose dev/ this process looks at for device nodes."""
        return self.lookup_root if os.path.isdir(os.path.join(self.lookup_root, "dev")) else "/"


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The settings from the command line, the environment and the file that either names.

    Raises UsageError for the command line, ConfigError for everything else.
    """
    given = {**read_environ(environ), **read_arguments(argv)}
    path = str(given.get("config_file", ""))
    document, place = _document(path)
    from_file = [option for option in OPTIONS if option.key and option.field not in given]
    places = {
        option.field: place.at(*option.key.split("."))
        for option in from_file
        if _find(document, option, place) is not None
    }
    return _checked(_merged(given, document, place), {**places, "mps": place.at("sharing", "mps")})


def _document(path: str) -> tuple[dict[str, Any], Place]:
    if not path:
        return {}, Place("", lambda keys: 0)
    from gpulet.plugin.yaml_file import read  # PyYAML is for those who have a file

    return read(path)


def _merged(given: dict[str, Scalar], document: dict[str, Any], place: Place) -> Config:
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.key and (found := _file_value(document, option, place)) is not None:
            values[option.field] = found
    values.update(given)
    sharing, where = section(document, "sharing", place.at("sharing")), place.at("sharing")
    mps = get(sharing, "mps")
    if has(sharing, "timeSlicing"):
        values["time_slicing"] = read_sharing(
            get(sharing, "timeSlicing"), where.at("timeSlicing"), fail_above_one=False
        )
    if mps is not None:
        values["mps"] = read_sharing(mps, where.at("mps"), fail_above_one=True)
    resources, where = section(document, "resources", place.at("resources")), place.at("resources")
    values["gpu_patterns"] = read_patterns(get(resources, "gpus"), where.at("gpus"))
    values["mig_patterns"] = read_patterns(get(resources, "mig"), where.at("mig"))
    values["dev_root"] = values.get("dev_root") or values.get("driver_root", "/")
    config = _with_sockets(Config(**values), "kubelet_socket" in given)
    beside = config.kubelet_socket_dir
    return replace(
        config,
        warnings=(*_unknown_keys(document, place.file), *_doubts(config)),
        # a folder of the kubelet's, because it is on the host's disk in every manifest; the kubelet removes files there
        # when it starts, and leaves folders
        state_dir=values.get("state_dir", os.path.join(beside, "gpulet")),
        pod_resources_socket=config.pod_resources_socket
        or os.path.join(os.path.dirname(beside.rstrip("/")), "pod-resources", "kubelet.sock"),
    )


def _with_sockets(config: Config, socket_given: bool) -> Config:
    """The kubelet looks for a plugin's socket beside its own, so one of the two settings moves both."""
    if config.kubelet_socket_dir and not socket_given:
        return replace(config, kubelet_socket=os.path.join(config.kubelet_socket_dir, "kubelet.sock"))
    if not config.kubelet_socket_dir:
        return replace(config, kubelet_socket_dir=os.path.dirname(config.kubelet_socket) or KUBELET_DIR)
    return config


def _find(document: dict[str, Any], option: Option, place: Place) -> Any:
    """The file's value for an option as it stands there, None without one. Raises ConfigError."""
    *sections, leaf = option.key.split(".")
    for name in sections:
        place = place.at(name)
        document = section(document, name, place)
    return get(document, leaf)


def _file_value(document: dict[str, Any], option: Option, place: Place) -> Any:
    value = _find(document, option, place)
    if value is None:
        return None
    place = place.at(*option.key.split("."))
    if any("\0" in item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)):
        raise ConfigError(str(place), seen=repr(value), wanted="text without a NUL")
    if option.kind == "bool" and isinstance(value, bool):
        return value
    if option.kind == "text" and isinstance(value, str | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if option.kind == "count" and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if option.kind == "seconds" and number and 0 < value <= MOST_SECONDS:
        return float(value)
    if option.kind == "list" and isinstance(value, str):
        return (value,)
    kind = int if option.kind == "ints" else str
    items = value if option.kind in ("list", "ints") and isinstance(value, list) else [None]
    if all(isinstance(item, kind) and not isinstance(item, bool) for item in items):
        return tuple(items)
    raise ConfigError(str(place), seen=repr(value), wanted=_WANTED[option.kind])


_WANTED = {
    "bool": "true or false",
    "text": "a string",
    "seconds": "seconds, more than 0 and at most a day",
    "count": "a whole number, 0 or more",
    "list": "a list of strings",
    "ints": "a list of numbers",
}
_OTHERS_KEYS = {"flags.gfd", "flags.usenodefeatureapi", "flags.plugin"}  # read by other programs of the same file


def _unknown_keys(document: dict[str, Any], path: str) -> list[str]:
    """The peer passes over a misspelt key in silence; we say it and go on, since its files must keep working."""
    found = unknown_keys(document, {option.key.lower() for option in OPTIONS} | _OTHERS_KEYS) if document else []
    return [f"config file {path}: unknown key {key} ignored" for key in found]


def _doubts(config: Config) -> list[str]:
    """What can be meant so and seldom is."""
    found = []
    strategies = config.device_list_strategy
    if "cdi-annotations" in strategies and not config.cdi_annotation_prefix.startswith("cdi.k8s.io/"):
        found.append(f"--cdi-annotation-prefix={config.cdi_annotation_prefix}: engines with CDI of their own only look "
                     "at annotations that begin with cdi.k8s.io/; a container gets its devices from a runtime that is "
                     "told of this prefix, or not at all")  # fmt: skip
    if {"cdi-annotations", "cdi-cri"} <= set(strategies):
        found.append("--device-list-strategy has cdi-annotations and cdi-cri: the kubelet hands each device to the "
                     "engine twice; cdi-cri alone is enough since Kubernetes 1.31 and containerd 1.7")  # fmt: skip
    return found


def _checked(config: Config, places: Mapping[str, Place]) -> Config:
    """Refuse what can't be used, in the peer's order and wording. places: of fields whose value is the file's."""

    def at(field: str, text: str) -> str:
        return f"{places[field]}: {text}" if field in places else text

    for name in config.device_list_strategy or ("",):
        if name not in STRATEGIES:
            raise ConfigError(
                at("device_list_strategy", "invalid --device-list-strategy option: invalid strategy"),
                seen=name or "none given", wanted=" or ".join(STRATEGIES),
            )  # fmt: skip
    _choice(at("device_id_strategy", "invalid --device-id-strategy option"), config.device_id_strategy, "uuid", "index")
    _choice(at("allocation_policy", "invalid --shared-devices-allocation-policy option"), config.allocation_policy,
            "distributed", "packed", "spread")  # fmt: skip
    if config.spread_minimum and config.allocation_policy != "spread":
        raise ConfigError(at("spread_minimum", "--spread-minimum means nothing under this policy"),
                          seen=config.allocation_policy,
                          remedy="set --shared-devices-allocation-policy=spread")  # fmt: skip
    if config.mps_active and config.mig_strategy == "mixed":
        raise ConfigError(
            at("mps", "using --mig-strategy=mixed is not supported with MPS"), remedy="choose one of the two"
        )
    if config.mps_active and not config.mps_root:
        raise ConfigError(at("mps", "using MPS requires --mps-root to be specified"))
    _choice(at("discovery", "invalid --device-discovery-strategy option"), config.discovery, "auto", "nvml", "tegra")
    _choice(at("mig_strategy", "unknown MIG strategy"), config.mig_strategy, "none", "single", "mixed", "as-is")
    if config.imex_channel_ids not in ((), (0,)):
        raise ConfigError(at("imex_channel_ids", "invalid IMEX channel IDs: invalid IMEX config: channelIDs must be "
                             "[] or [0]; found"), seen=list(config.imex_channel_ids))  # fmt: skip
    for item in config.device_filter:
        key, equals, value = item.removeprefix("!").partition("=")
        if key not in ("uuid", "index", "pci", "model") or not equals or not value:
            raise ConfigError(at("device_filter", "invalid --device-filter option"), seen=item,
                              wanted="uuid=, index=, pci= or model=")  # fmt: skip
    _choice(at("health_profile", "invalid --health-profile option"), config.health_profile, "default", "catalogue")
    _choice("invalid --log-format option", config.log_format, "text", "json")
    _choice("invalid --log-level option", config.log_level, "debug", "info", "warning", "error")
    name = config.device_list_envvar
    if not name or not name.isascii() or not name.replace("_", "a").isalnum() or name[0].isdigit():
        raise ConfigError(at("device_list_envvar", "invalid --device-list-envvar option"), seen=repr(name),
                          wanted="a variable's name")  # fmt: skip
    return config


def _choice(what: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise ConfigError(what, seen=value, wanted=" or ".join(choices))
