"""The registry of CDI spec folders: what devices there are, and an Injection for some of them.

Folder priority, conflicts and the order of edits follow CDI's own library. A broken file is kept as an error and
hides nothing else. JSON is read without YAML's parser, which costs tens of milliseconds. Loaded by the programs in
launch/.
"""

from __future__ import annotations

import os

from gpulet import codec
from gpulet.errors import CdiError
from gpulet.injection import cdi_rules
from gpulet.injection.cdi_hooks import hook_of
from gpulet.injection.model import ROOT, DeviceNode, Hook, Injection, Mount
from gpulet.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

DEFAULT_FOLDERS = ("/etc/cdi", "/var/run/cdi")
MOST_BYTES = 32 << 20  # of a spec file; a node's takes some KiB
_TYPES = {0o020000: "c", 0o060000: "b", 0o010000: "p"}  # stat.h: S_IFCHR, S_IFBLK, S_IFIFO


class SpecFile:
    """One spec file that could be loaded. priority: the folder's place; later folders win."""

    __slots__ = ("kind", "path", "priority", "spec")

    def __init__(self, path: str, priority: int, spec: dict[str, Any]) -> None:
        self.path = path
        self.priority = priority
        self.spec = spec
        self.kind: str = spec["kind"]

    def qualified(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """(qualified name, device) of each of its devices."""
        return ((f"{self.kind}={device['name']}", device) for device in self.spec["devices"])


def parse(data: bytes) -> Any:
    """What a YAML or JSON text holds, the first document of it; keys that occur twice are refused. Raises CdiError."""
    import yaml

    from gpulet import goyaml

    class Loader(goyaml.loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader))):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # a merged map (<<) is no key of its own, and keys that are no scalars are refused anyway
            plain = [key for key, _value in node.value if isinstance(key, yaml.ScalarNode) and key.tag != goyaml.MERGE]
            keys = [str(self.construct_object(key, deep=True)) for key in plain]
            if len(set(keys)) != len(keys):
                raise CdiError("a key occurs twice", seen=f"line {node.start_mark.line + 1}")
            return super().construct_mapping(node, deep)

    try:
        loader = Loader(data)
        try:
            return loader.get_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        # the library's own, and what it stumbles over in odd values: the 99th of a month, a number without digits
        raise CdiError("not YAML", seen=str(error) or type(error).__name__) from error


def read_spec(path: str) -> dict[str, Any]:
    """One file's spec, checked. Raises CdiError that names the file."""
    try:
        data = _content(path)
        spec = cdi_rules.as_decoded(_parse_json(data) if path.endswith(".json") else parse(data))
        cdi_rules.check(spec)
    except OSError as error:
        raise CdiError(f"CDI spec {path}", seen=error.strerror) from error
    except CdiError as error:
        raise CdiError(f"CDI spec {path}", seen=str(error)) from error
    return dict(spec)


def _content(path: str) -> bytes:
    """A file's bytes. A pipe in a spec folder mustn't stop every container, nor a file without end fill the memory."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_mode & 0o170000 != 0o100000:
            raise CdiError("no regular file", wanted="a file, or a link to one")
        if info.st_size > MOST_BYTES:
            raise CdiError("too large", seen=f"{info.st_size} bytes", wanted=f"{MOST_BYTES} at most")
        return file.read()


def _parse_json(data: bytes) -> Any:
    try:
        return codec.loads(data)
    except ValueError:
        return parse(data)  # CDI reads .json as YAML too, which takes more


class Registry:
    """The specs in some folders, later ones with priority over earlier ones. Files are read at the first question."""

    def __init__(self, folders: Sequence[str] = DEFAULT_FOLDERS, *, keep: str = "") -> None:
        """keep: a folder in which specs in YAML are kept as JSON, keyed by their file; "" for none."""
        self._keep = keep
        self.folders = tuple(os.path.normpath(folder) for folder in folders or DEFAULT_FOLDERS if folder)
        self._loaded = False
        self._specs: list[SpecFile] = []
        self._errors: dict[str, CdiError] = {}
        self._devices: dict[str, tuple[SpecFile, Mapping[str, Any]]] = {}
        self._conflicts: dict[str, list[str]] = {}

    def load(self) -> Registry:
        """Read all folders again."""
        self._loaded = True
        self._specs, self._errors, self._devices, self._conflicts = [], {}, {}, {}
        for priority, folder in enumerate(self.folders):
            for path in self._paths(folder):
                try:
                    self._specs.append(SpecFile(path, priority, self._read(path)))
                except CdiError as error:
                    self._errors[path] = error
        for spec in self._specs:
            for name, device in spec.qualified():
                self._offer(name, spec, device)
        for name in self._conflicts:
            self._devices.pop(name, None)
        return self

    def _read(self, path: str) -> dict[str, Any]:
        if not self._keep or path.endswith(".json"):
            return read_spec(path)
        at = f"{self._keep}/cdi{path.replace('/', '-')}.json"
        spec: dict[str, Any] = codec.kept(path, at, lambda: read_spec(path), __version__)
        return spec

    def _paths(self, folder: str) -> list[str]:
        try:
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._errors[folder] = CdiError(f"CDI folder {folder}", seen=error.strerror)
            return []
        paths = (f"{folder}/{name}" for name in names if name.endswith((".json", ".yaml")))
        return [path for path in paths if not os.path.isdir(path)]

    def _offer(self, name: str, spec: SpecFile, device: Mapping[str, Any]) -> None:
        other = self._devices.get(name)
        if other is not None and other[0].priority == spec.priority:
            paths = self._conflicts.setdefault(name, [other[0].path])
            paths.append(spec.path)
        elif other is None or other[0].priority < spec.priority:
            self._devices[name] = (spec, device)

    def _ready(self) -> Registry:
        return self if self._loaded else self.load()

    @property
    def specs(self) -> tuple[SpecFile, ...]:
        """The files that could be loaded, by folder and name."""
        return tuple(self._ready()._specs)

    @property
    def errors(self) -> dict[str, CdiError]:
        """File or folder -> why it couldn't be loaded."""
        return self._ready()._errors

    @property
    def conflicts(self) -> dict[str, list[str]]:
        """Qualified name -> the files of one folder that each define it; nobody gets such a device."""
        return self._ready()._conflicts

    def names(self) -> list[str]:
        """The qualified names that can be resolved, sorted."""
        return sorted(self._ready()._devices)

    def source(self, name: str) -> str:
        """The file that a name is taken from, "" for none."""
        found = self._ready()._devices.get(name)
        return found[0].path if found else ""

    def resolve(self, names: Iterable[str]) -> Injection:
        """What the named devices need, the specs' common edits before the first device of each.

        Raises CdiError, without doing anything by half, where a name isn't there (says which, the conflicts, the
        files that couldn't be loaded and the folders looked into), or where a spec names a file or device node that
        isn't on this node any more.
        """
        wanted = list(dict.fromkeys(names))
        known = self._ready()._devices
        absent = [name for name in wanted if name not in known]
        if absent:
            raise self._unresolvable(absent)
        edits = _Edits()
        seen: set[str] = set()
        for name in wanted:
            spec, device = known[name]
            if spec.path not in seen:
                seen.add(spec.path)
                edits.add(spec.spec.get("containerEdits") or {}, spec.path)
            edits.add(device["containerEdits"], spec.path)
        return edits.injection()

    def _unresolvable(self, absent: Sequence[str]) -> CdiError:
        reasons = [
            f"{name} is defined by each of {', '.join(self._conflicts[name])}"
            for name in absent
            if name in self._conflicts
        ]
        reasons += [str(error) for error in self._errors.values()]
        return CdiError(
            "unresolvable CDI devices " + ", ".join(absent),
            seen="; ".join(reasons) or f"{len(self._devices)} devices in {len(self._specs)} files",
            wanted="devices defined in " + " ".join(self.folders),
            remedy=f"see: gpulet cdi why {absent[0]}",
        )


class _Edits:
    """containerEdits added up as an engine applies them: of two items at one place the later replaces the former."""

    def __init__(self) -> None:
        self.env: dict[str, str] = {}
        self.nodes: dict[str, DeviceNode] = {}
        self.mounts: dict[str, Mount] = {}
        self.hooks: list[Hook] = []
        self.gids: dict[int, None] = {}
        self.net: dict[str, str] = {}
        self.rdt: dict[str, Any] = {}

    def add(self, edits: Mapping[str, Any], path: str) -> None:
        for item in edits.get("env") or ():
            name, _, value = item.partition("=")
            self.env[name] = value
        for item in edits.get("deviceNodes") or ():
            self.nodes.pop(item["path"], None)
            self.nodes[item["path"]] = device_node(item, path)
        for item in edits.get("mounts") or ():
            self.mounts.pop(item["containerPath"], None)
            self.mounts[item["containerPath"]] = mount(item, path)
        self.hooks.extend(hook_of(item) for item in edits.get("hooks") or ())
        self.gids.update((gid, None) for gid in edits.get("additionalGids") or () if gid)
        for item in edits.get("netDevices") or ():
            self.net[item["hostInterfaceName"]] = item["name"]
        self.rdt = dict(edits.get("intelRdt") or self.rdt)

    def injection(self) -> Injection:
        return Injection(
            tuple(self.nodes.values()),
            tuple(self.mounts.values()),
            tuple(self.env.items()),
            tuple(self.gids),
            tuple(dict.fromkeys(self.hooks)),
            net_devices=tuple(self.net.items()),
            intel_rdt=tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in self.rdt.items()),
        )


def _stale(path: str, what: str, seen: object) -> CdiError:
    return CdiError(
        f"CDI spec {path} doesn't fit this node any more: {what}",
        seen=seen,
        remedy=f"write it anew: gpulet cdi generate --output {path}",
    )


def device_node(item: Mapping[str, Any], path: str) -> DeviceNode:
    """One deviceNodes entry, with what it leaves open looked up at its host path. `path` names its spec file.

    Raises CdiError where the entry doesn't say type and major itself, and the host has no such device or one of another
    type.
    """
    host = item.get("hostPath") or item["path"]
    kind, major, minor = item.get("type") or "", item.get("major") or 0, item.get("minor") or 0
    said = kind == "p" or bool(kind and major)
    try:
        info = os.lstat(host)
        real = _TYPES.get(info.st_mode & 0o170000, "")
    except OSError as error:
        info, real = None, ""
        reason: str | None = error.strerror
    else:
        reason = None if real else "not a device node"
    if info is None or not real:
        if not said:
            raise _stale(path, f"device node {host}", reason)
        mode = item.get("fileMode")
        return DeviceNode(
            item["path"], host, major, minor, kind, 0o666 if mode is None else mode, *_owner(item), _access(item),
            f"CDI spec {path}",
        )  # fmt: skip
    if kind and not said and {"u": "c"}.get(kind, kind) != real:  # "u" is a character device, unbuffered
        raise _stale(path, f"device node {host} is of another type", f"{real}, the spec says {kind}")
    if not major and not said and real != "p":
        major, minor = os.major(info.st_rdev), os.minor(info.st_rdev)
    mode = item.get("fileMode")
    return DeviceNode(
        item["path"], host, major, minor, kind or real, info.st_mode & 0o7777 if mode is None else mode,
        *_owner(item), _access(item), f"CDI spec {path}",
    )  # fmt: skip


def _owner(item: Mapping[str, Any]) -> tuple[int, int]:
    said = item.get("uid"), item.get("gid")
    uid, gid = (0 if one is None else one or ROOT for one in said)  # a specification's 0 is root, not nothing said
    return uid, gid


def _access(item: Mapping[str, Any]) -> str:
    said = item.get("permissions") or "rwm"
    return "" if said == "none" else said


def _kind(path: str) -> str:
    name = path.rpartition("/")[2]
    if name.startswith("lib") and ".so" in name:
        return "library"
    return "firmware" if "/firmware/" in path else "other"


def mount(item: Mapping[str, Any], path: str) -> Mount:
    """One mounts entry. Raises CdiError where what it binds isn't there. `path` names its spec file."""
    source, kind = item["hostPath"], item.get("type") or ""
    if source.startswith("/") and kind in ("", "bind") and not os.path.lexists(source):
        raise _stale(path, f"mount of {source}", "no such file")
    target = item["containerPath"]
    return Mount(source, target, tuple(item.get("options") or ()), _kind(target), kind, f"CDI spec {path}")
