"""config.toml over the defaults: the peer's keys, and gpulet's own under [gpulet].

Where: the path given (`--config`), else $GPULET_CONFIG, $NVIDIA_CTK_CONFIG_FILE_PATH,
$XDG_CONFIG_HOME/nvidia-container-runtime/config.toml, /etc/nvidia-container-runtime/config.toml. No file: the defaults.
A key that isn't known is ignored, as the peer ignores it, and listed in `unknown`, which `gpulet node` tells; a value
of the wrong type is a ConfigError that names the line.

Reading TOML costs a starting container about 20 ms, so what a file holds is kept as JSON beside it
(`.config.toml.gpulet`), keyed by the file's inode, size and times; where the folder can't be written, it
isn't.
"""

from __future__ import annotations

import os

from gpulet import codec
from gpulet.errors import ConfigError
from gpulet.value import Value
from gpulet.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

DEFAULT_PATH = "/etc/nvidia-container-runtime/config.toml"
DRIVER_CAPABILITIES = ("compat32", "compute", "display", "graphics", "ngx", "utility", "video")
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class Settings(Value):
    """Every setting; `KEYS` tells its key in the file. source: the file read, "" where there is none; lines: field and
    line; unknown: keys of the file that mean nothing here."""

    disable_require: bool = False
    swarm_resource: str = ""
    accept_envvar_unprivileged: bool = True
    accept_volume_mounts: bool = False
    supported_capabilities: str = ",".join(DRIVER_CAPABILITIES)
    cli_root: str = ""
    cli_path: str = ""
    cli_environment: tuple[str, ...] = ()
    cli_debug: str = ""
    cli_ldcache: str = ""
    cli_load_kmods: bool = True
    cli_no_pivot: bool = False
    cli_no_cgroups: bool = False
    cli_user: str | None = None
    cli_ldconfig: str = "@/sbin/ldconfig"
    visible_devices_envvars: tuple[str, ...] = (VISIBLE_DEVICES,)
    ctk_path: str = "nvidia-ctk"
    debug: str = "/dev/null"
    log_level: str = "info"
    runtimes: tuple[str, ...] = ("runc", "crun")
    mode: str = "auto"
    csv_mount_spec_path: str = "/etc/nvidia-container-runtime/host-files-for-container.d"
    csv_compat_root: str = ""
    cdi_default_kind: str = "nvidia.com/gpu"
    cdi_annotation_prefixes: tuple[str, ...] = ("cdi.k8s.io/",)
    cdi_spec_dirs: tuple[str, ...] = ("/etc/cdi", "/var/run/cdi")
    jit_feature_flags: tuple[str, ...] = ()
    jit_disable_hooks: tuple[str, ...] = ()
    cuda_compat_mode: str = "ldconfig"
    hook_path: str = "nvidia-container-runtime-hook"
    skip_mode_detection: bool = False
    allow_cuda_compat_from_container: bool = False
    allow_ldconfig_from_container: bool = False
    allow_unknown_oci_fields: bool = False
    disable_cuda_compat_hook: bool = False
    disable_imex_creation: bool = False
    ignore_imex_requests: bool = False
    no_device_gids: bool = False
    capabilities: str = "requested"
    loader_cache: str = "native"
    state_dir: str = "/run/gpulet"
    policy_grants: str = "env"
    policy_checkpoint: str = "/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint"
    policy_trusted: tuple[str, ...] = ()
    policy_untrusted_env: str = "ignore"
    source: str = ""
    lines: tuple[tuple[str, int], ...] = ()
    unknown: tuple[str, ...] = ()

    def where(self, field: str) -> str:
        """Where a setting's value comes from, in words: "config.toml line 7" or "default"."""
        line = dict(self.lines).get(field)
        return f"{self.source} line {line}" if line is not None else "default"

    def driver_root(self) -> str:
        """The driver root, "/" where none is set."""
        return self.cli_root or "/"

    def swarm_variables(self) -> tuple[str, ...]:
        """The variables of `swarm-resource`, which outrank the others where set."""
        return tuple(name for name in map(str.strip, self.swarm_resource.split(",")) if name)

    def ldconfig(self) -> str:
        """The loader-cache program: "@" and a host path, `<path>.real` where there is one; a container's path as is."""
        if not self.cli_ldconfig.startswith("@"):
            return self.cli_ldconfig
        path = self.cli_ldconfig[1:].removesuffix(".real")
        return f"@{path}.real" if os.path.exists(path + ".real") else "@" + path


# key in the file -> field of Settings. The field's default tells the type; () means a list of text.
KEYS = {
    "disable-require": "disable_require",
    "swarm-resource": "swarm_resource",
    "accept-nvidia-visible-devices-envvar-when-unprivileged": "accept_envvar_unprivileged",
    "accept-nvidia-visible-devices-as-volume-mounts": "accept_volume_mounts",
    "supported-driver-capabilities": "supported_capabilities",
    "nvidia-container-cli.root": "cli_root",
    "nvidia-container-cli.path": "cli_path",
    "nvidia-container-cli.environment": "cli_environment",
    "nvidia-container-cli.debug": "cli_debug",
    "nvidia-container-cli.ldcache": "cli_ldcache",
    "nvidia-container-cli.load-kmods": "cli_load_kmods",
    "nvidia-container-cli.no-pivot": "cli_no_pivot",
    "nvidia-container-cli.no-cgroups": "cli_no_cgroups",
    "nvidia-container-cli.user": "cli_user",
    "nvidia-container-cli.ldconfig": "cli_ldconfig",
    "nvidia-container-cli.visible-devices-envvars": "visible_devices_envvars",
    "nvidia-ctk.path": "ctk_path",
    "nvidia-container-runtime.debug": "debug",
    "nvidia-container-runtime.log-level": "log_level",
    "nvidia-container-runtime.runtimes": "runtimes",
    "nvidia-container-runtime.mode": "mode",
    "nvidia-container-runtime.modes.csv.mount-spec-path": "csv_mount_spec_path",
    "nvidia-container-runtime.modes.csv.compat-container-root": "csv_compat_root",
    "nvidia-container-runtime.modes.cdi.default-kind": "cdi_default_kind",
    "nvidia-container-runtime.modes.cdi.annotation-prefixes": "cdi_annotation_prefixes",
    "nvidia-container-runtime.modes.cdi.spec-dirs": "cdi_spec_dirs",
    "nvidia-container-runtime.modes.jit-cdi.nvcdi-feature-flags": "jit_feature_flags",
    "nvidia-container-runtime.modes.jit-cdi.nvcdi-disable-hooks": "jit_disable_hooks",
    "nvidia-container-runtime.modes.legacy.cuda-compat-mode": "cuda_compat_mode",
    "nvidia-container-runtime-hook.path": "hook_path",
    "nvidia-container-runtime-hook.skip-mode-detection": "skip_mode_detection",
    "features.allow-cuda-compat-libs-from-container": "allow_cuda_compat_from_container",
    "features.allow-ldconfig-from-container": "allow_ldconfig_from_container",
    "features.allow-unknown-oci-spec-fields": "allow_unknown_oci_fields",
    "features.disable-cuda-compat-lib-hook": "disable_cuda_compat_hook",
    "features.disable-imex-channel-creation": "disable_imex_creation",
    "features.ignore-imex-channel-requests": "ignore_imex_requests",
    "features.no-additional-gids-for-device-nodes": "no_device_gids",
    "gpulet.capabilities": "capabilities",
    "gpulet.loader-cache": "loader_cache",
    "gpulet.state-dir": "state_dir",
    "gpulet.policy.grants": "policy_grants",
    "gpulet.policy.checkpoint": "policy_checkpoint",
    "gpulet.policy.trusted": "policy_trusted",
    "gpulet.policy.untrusted-env": "policy_untrusted_env",
}
CHOICES = {
    "mode": ("auto", "cdi", "jit-cdi", "legacy", "csv"),
    "capabilities": ("requested", "all"),
    "loader_cache": ("native", "ldconfig"),
    "policy_grants": ("env", "kubelet"),
    "policy_untrusted_env": ("ignore", "deny"),
}


def locate(path: str | None = None, environ: Mapping[str, str] | None = None) -> tuple[str, bool]:
    """The configuration file's path, and whether it was asked for by name (then it must exist)."""
    environ = os.environ if environ is None else environ
    named = path or environ.get("GPULET_CONFIG") or environ.get("NVIDIA_CTK_CONFIG_FILE_PATH")
    if named:
        return named, True
    home = environ.get("XDG_CONFIG_HOME")
    return (f"{home}/nvidia-container-runtime/config.toml" if home else DEFAULT_PATH), False


def load(path: str | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings in force. Raises ConfigError for a file that can't be read or used; a missing one gives the
    defaults, unless it was asked for by name."""
    path, named = locate(path, environ)
    try:
        os.stat(path)
    except OSError as error:
        if isinstance(error, (FileNotFoundError, NotADirectoryError)) and not named:
            return Settings()
        raise ConfigError(
            f"configuration file {path}",
            seen=error.strerror,
            wanted="a file that can be read",
            remedy="correct --config or GPULET_CONFIG",
        ) from None
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.gpulet")
    try:
        return _of(codec.kept(path, beside, lambda: _read_toml(path), __version__), path)
    except (KeyError, TypeError, ValueError, AttributeError):  # kept in a form that isn't ours
        return _of(_read_toml(path), path)


def _of(content: dict[str, Any], path: str) -> Settings:
    """The settings that `_read_toml` has found, or that were kept of it. Raises KeyError, TypeError, ValueError or
    AttributeError for what it can't have found."""
    fields: dict[str, Any] = {}
    for name, value in content["fields"].items():
        if _wanted(name, value):
            raise ValueError(name)
        fields[name] = tuple(value) if isinstance(value, list) else value
    lines = tuple((name, line) for name, line in content["lines"].items())
    return Settings(**fields, source=path, lines=lines, unknown=tuple(content["unknown"]))


def _read_toml(path: str) -> dict[str, Any]:
    """`{"fields": {field: value}, "lines": {field: line}, "unknown": [key]}`. Raises ConfigError."""
    import tomllib

    try:
        text = codec.read_file(path).decode("utf-8").removeprefix("\ufeff")  # some editors begin a file so
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path}", seen=error, wanted="TOML") from None
    except RecursionError:
        raise ConfigError(f"configuration file {path}", seen="nested too deeply", wanted="TOML") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path}", seen=error, wanted="text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path}", seen=error.strerror, wanted="a file that can be read") from None
    lines = _lines(text)
    fields, unknown = {}, []
    for key, value in _leaves(data):
        field = KEYS.get(key)
        if field is None:
            unknown.append(key)
        else:
            fields[field] = _checked(path, lines.get(key, 0), key, field, value)
    _check_ldconfig(path, lines, fields)
    return {"fields": fields, "lines": {KEYS[k]: n for k, n in lines.items() if k in KEYS}, "unknown": unknown}


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in KEYS:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _checked(path: str, line: int, key: str, field: str, value: Any) -> Any:
    wanted = _wanted(field, value)
    if wanted:
        raise ConfigError(f"{path} line {line}: {key}", seen=repr(value), wanted=wanted)
    return value


def _wanted(field: str, value: Any) -> str:
    """What a field's value should be where it can't be used, "" where it can. Raises AttributeError for no field."""
    default = getattr(Settings, field)
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return "a list of text"
    elif not isinstance(value, str):
        return "text in quotes"
    if not all(map(codec.is_sound, [value] if isinstance(value, str) else value)):
        return "text without NUL"
    if field in CHOICES and value not in CHOICES[field]:
        return "one of " + ", ".join(CHOICES[field])
    if field == "state_dir" and not value.startswith("/"):
        return "an absolute path"
    return ""


def _check_ldconfig(path: str, lines: dict[str, int], fields: dict[str, Any]) -> None:
    """A container's own ldconfig runs with the hook's privileges (CVE-2024-0136): only where allowed by name."""
    value = fields.get("cli_ldconfig")
    if value is not None and not value.startswith("@") and not fields.get("allow_ldconfig_from_container"):
        key = "nvidia-container-cli.ldconfig"
        raise ConfigError(
            f"{path} line {lines.get(key, 0)}: {key}",
            seen=repr(value),
            wanted="a program of the host, with @ in front",
            remedy='write "@/sbin/ldconfig", or set features.allow-ldconfig-from-container = true',
        )


def _lines(text: str) -> dict[str, int]:
    """Dotted key -> line number. Good enough for messages: a text of several lines may deceive it."""
    table = ""
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith("["):
            table = _plain(line.partition("]")[0].lstrip("[")) + "."
        elif "=" in line and not line.startswith("#"):
            found.setdefault(table + _plain(line.partition("=")[0]), number)
    return found


def _plain(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))
