"""CDI specifications out of injections: make one for a node's GPUs, write it to a file."""

from __future__ import annotations

import os

from gpulet.errors import CdiError
from gpulet.injection import build, cdi_rules
from gpulet.injection.cdi_calls import HookCalls
from gpulet.injection.model import DeviceNode, Injection, Mount, RootfsWork, SymLink
from gpulet.injection.select import Selection, select
from gpulet.node.gpu import Gpu, MigDevice, NodeFacts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from gpulet.node.driver import DriverFiles

# Majors that are the same after every boot (Linux devices.txt): NVIDIA's own and DRM's. Numbers under another major
# are left for the engine to look up when a container starts, so that a spec doesn't go stale with the next boot.
_FIXED_MAJORS = (195, 226)

_DISPLAY_ONLY = "DGX Display"  # the GPU of a DGX Station that only drives its screen

NO_DEVICE = "none"
_EMPTY = ("NVCT_EMPTY_DEVICE=",)  # a device must have some edit


class HostPaths:
    """Where a path seen here is on the host: needed where this program runs in a container with the tree mounted."""

    def __init__(self, root: str = "", host_root: str = "", dev_root: str = "", host_dev_root: str = "") -> None:
        self._files = (root.rstrip("/"), host_root.rstrip("/")) if host_root else ("", "")
        self._nodes = (dev_root.rstrip("/"), host_dev_root.rstrip("/")) if host_dev_root else ("", "")

    @staticmethod
    def _moved(path: str, move: tuple[str, str]) -> str:
        old, new = move
        return new + path[len(old) :] if path.startswith(old + "/") else path

    def file(self, path: str) -> str:
        return self._moved(path, self._files)

    def node(self, path: str) -> str:
        return self._moved(path, self._nodes)


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path


def node_record(node: DeviceNode, paths: HostPaths) -> dict[str, Any]:
    """One entry of deviceNodes."""
    record: dict[str, Any] = {"path": node.path}
    if paths.node(node.host_path) != node.path:
        record["hostPath"] = paths.node(node.host_path)
    if node.major in _FIXED_MAJORS:
        record |= {"type": node.type, "major": node.major, "minor": node.minor, "fileMode": node.mode}
    record["permissions"] = node.access
    if node.gid:
        record["gid"] = node.gid
    return record


def mount_record(mount: Mount, paths: HostPaths) -> dict[str, Any]:
    """One entry of mounts."""
    record: dict[str, Any] = {
        "hostPath": paths.file(mount.source),
        "containerPath": mount.path,
        "options": list(mount.options),
    }
    if mount.type:
        record["type"] = mount.type
    return record


def edits_of(
    injection: Injection, paths: HostPaths | None = None, calls: HookCalls | None = None, *, profile: bool = False
) -> dict[str, Any]:
    """An injection as containerEdits, fields in CDI's order, empty ones left out. calls, profile: see HookCalls."""
    paths = paths or HostPaths()
    hooks = [
        {"hookName": hook.stage, "path": hook.path, "args": list(hook.args), "env": list(hook.env)}
        for hook in injection.hooks
    ]
    hooks += (calls or HookCalls()).records(injection.rootfs, profile=profile)
    edits: dict[str, Any] = {
        "env": [f"{name}={value}" for name, value in injection.env],
        "deviceNodes": [
            node_record(node, paths) for node in sorted(injection.devices, key=lambda node: _depth(node.path))
        ],
        "hooks": hooks,
        "mounts": [
            mount_record(mount, paths) for mount in sorted(injection.mounts, key=lambda mount: _depth(mount.path))
        ],
        "additionalGids": list(injection.gids),
    }
    return {name: value for name, value in edits.items() if value}


# -- names --


def _index(device: Gpu | MigDevice) -> str:
    return str(device.index) if isinstance(device, Gpu) else f"{device.gpu}:{device.slot}"


NAMINGS: dict[str, Callable[[Gpu | MigDevice], str]] = {
    "index": _index,
    "uuid": lambda device: device.uuid,
    "type-index": lambda device: ("gpu" if isinstance(device, Gpu) else "mig") + _index(device),
}


def names_of(device: Gpu | MigDevice, namings: Sequence[str]) -> Iterable[str]:
    """The names of a device, one for each naming that it has a name in. Raises CdiError for an unknown naming."""
    for naming in namings:
        if naming not in NAMINGS:
            raise CdiError("unknown naming of CDI devices", seen=naming, wanted="one of " + ", ".join(NAMINGS))
        name = NAMINGS[naming](device)
        if name and "/" not in name and ":-1" not in name:  # an old-style MIG UUID may not be a name; no slot known
            yield name


def _devices(facts: NodeFacts) -> list[tuple[Gpu | MigDevice, Selection]]:
    """What is offered: each GPU that computes and isn't partitioned, each MIG device."""
    able = (gpu for gpu in facts.gpus if not gpu.mig_enabled and gpu.name.removeprefix("NVIDIA ") != _DISPLAY_ONLY)
    whole = [(gpu, Selection((gpu,))) for gpu in able]
    return [*whole, *((mig, Selection((), (mig,))) for gpu in facts.gpus for mig in gpu.mig)]


def assemble(
    kind: str, devices: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any], annotations: Mapping[str, str]
) -> dict[str, Any]:
    """A whole spec, devices sorted by name, with the lowest version that its content needs. Raises CdiError."""
    spec: dict[str, Any] = {"cdiVersion": "0.3.0", "kind": kind}
    if annotations:
        spec["annotations"] = dict(sorted(annotations.items()))
    spec["devices"] = [{"name": name, "containerEdits": dict(devices[name])} for name in sorted(devices)]
    spec["containerEdits"] = dict(common)
    if not devices:
        raise CdiError(f"nothing to put into a CDI spec of {kind}", seen="no device", remedy="see: gpulet node")
    spec["cdiVersion"] = cdi_rules.minimum_version(spec)
    cdi_rules.check(spec)
    return spec


def make_spec(
    facts: NodeFacts,
    files: DriverFiles,
    *,
    vendor: str = "nvidia.com",
    cls: str = "gpu",
    names: Sequence[str] = ("index", "uuid"),
    calls: HookCalls | None = None,
    all_device: bool = True,
    dev_root: str = "",
    host_root: str = "",
    host_dev_root: str = "",
    paths: HostPaths | None = None,
    annotations: Mapping[str, str] | None = None,
    gids: bool = True,
    sockets: bool = True,
    compat32: bool = False,
    ids: Sequence[str] = ("all",),
) -> dict[str, Any]:
    """The CDI spec of a node: each GPU and MIG device under the names wanted, and "all".

    names: of "index", "uuid", "type-index". calls: see HookCalls. host_root, host_dev_root: where files.root and the
    folder of the device nodes are on the host, when they are mounted elsewhere for this program; paths says both. gids:
    say additionalGids for nodes that not everybody may open (needs 0.7.0). compat32: 32-bit libraries too. ids: which
    devices, as `select` takes them; ("none",) for the one device "none", which brings no GPU. The MPS folder isn't in:
    a spec outlives the daemon that makes it.
    Raises CdiError where there is no device, UnknownDevice for an id that isn't there.
    """
    paths = paths or HostPaths(files.root, host_root, dev_root or facts.dev_root, host_dev_root)
    calls = calls or HookCalls()
    if not compat32:
        files = files.replace(files=tuple(file for file in files.files if file.kind != "library32"))

    def edits(injection: Injection, *, profile: bool = False) -> dict[str, Any]:
        kept = injection if gids else injection.replace(gids=())
        return edits_of(kept, paths, calls, profile=profile)

    shared = build.common(facts, files, dev_root=dev_root, sockets=sockets, mps=False)
    beside: list[SymLink] = []
    found: dict[str, dict[str, Any]] = {}
    each: list[Injection] = []
    wanted = select(facts, ids)
    if tuple(ids) == (NO_DEVICE,):  # driver files and no GPU, for runtimes that ask for a device by that name
        found[NO_DEVICE] = {"env": list(_EMPTY)}
    for device, selection in _devices(facts):
        if device not in wanted.gpus and device not in wanted.migs:
            continue
        injection = build.device(facts, selection, dev_root=dev_root)
        if calls.in_one():
            beside.extend(injection.rootfs.links)  # for the common hook, so that a container has but one
            injection = injection.replace(rootfs=RootfsWork())
        each.append(injection)
        for name in names_of(device, names):
            found[name] = edits(injection)
    if all_device and each:
        found["all"] = edits(build.merge(each))
    shared = shared.replace(rootfs=shared.rootfs.replace(device_links=tuple(dict.fromkeys(beside))))
    return assemble(f"{vendor}/{cls}", found, edits(shared, profile=True), annotations or {})


def channel_spec(
    facts: NodeFacts,
    *,
    vendor: str = "nvidia.com",
    cls: str = "imex-channel",
    host_dev_root: str = "",
    paths: HostPaths | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The CDI spec of a node's IMEX channels: one device each, called by its number, and "all"."""
    paths = paths or HostPaths(dev_root=facts.dev_root, host_dev_root=host_dev_root)
    found = {str(number): edits_of(build.imex(facts, (str(number),)), paths) for number in facts.imex}
    if found:
        found["all"] = edits_of(build.imex(facts, ("all",)), paths)
    return assemble(f"{vendor}/{cls}", found, {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}, annotations or {})


# -- files --


def _yaml(spec: Mapping[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # not every reader of CDI specs knows anchors

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # YAML 1.2 readers take more words for numbers and booleans than PyYAML knows: quote what could be one.
        plain = value[:1].isalpha() or value[:1] in ("/", "-")
        unsure = not plain or value.lower() in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if unsure else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(dict(spec), Dumper=Dumper, sort_keys=False, explicit_start=True, width=1 << 16, indent=2))


def to_text(spec: Mapping[str, Any], form: str) -> str:
    """The spec as "yaml" or "json" text: the same bytes for the same spec."""
    if form == "json":
        import json

        return json.dumps(spec, indent=2) + "\n"
    if form == "yaml":
        return _yaml(spec)
    raise CdiError("unknown format of a CDI spec", seen=form, wanted="yaml or json")


def write_spec(spec: Mapping[str, Any], path: str) -> None:
    """Write the spec to `path` (.json or .yaml), aside and then renamed, readable for all; makes the folder.

    Raises CdiError where the spec is not valid, the name has another extension or the file can't be written.
    """
    cdi_rules.check(dict(spec))
    text = to_text(spec, path.rpartition(".")[2])
    folder = os.path.dirname(path) or "."
    aside = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}.tmp")  # no engine reads this extension
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        try:
            with open(aside, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), 0o644)
            os.rename(aside, path)
        except OSError:
            if os.path.exists(aside):
                os.unlink(aside)
            raise
    except OSError as error:
        raise CdiError(f"can't write CDI spec {path}", seen=error.strerror, remedy="check the folder") from error
