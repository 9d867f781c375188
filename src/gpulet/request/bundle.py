"""An OCI bundle: what of its config.json matters for a decision, reading and writing it, and the state that hooks get.

Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet import codec
from gpulet.errors import BundleError
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


# Who the container is, in the words of containerd and of CRI-O.
_IDENTITY = {
    "type": ("io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"),
    "name": ("io.kubernetes.cri.container-name", "io.kubernetes.container.name"),
    "pod_uid": ("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"),
    "pod_name": ("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"),
    "pod_namespace": ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"),
}
_SANDBOX_NAME = "POD"  # the kubelet's and CRI-O's; a container's is a DNS label, which has no capitals
_SOUND = "text without NUL, in whole characters"


class Container(Value):
    """One container as its config.json describes it.

    env: (name, value) in order, duplicates kept; mounts: (source, destination); root: the root file system's absolute
    path; type: "container", "sandbox" or "" outside Kubernetes; pod_uid and the rest: from the engine's annotations,
    "" where two engines' contradict each other; confirmed: whether all of that is the engine's word: the annotations
    are those of one engine alone, and the cgroup's path, which the engine wrote too and a Pod can't choose, carries the
    same Pod UID.
    """

    env: tuple[tuple[str, str], ...] = ()
    annotations: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    privileged: bool = False
    root: str = ""
    cgroups_path: str = ""
    type: str = ""
    name: str = ""
    pod_uid: str = ""
    pod_name: str = ""
    pod_namespace: str = ""
    confirmed: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any], bundle: str = "") -> Container:
        """The container of a config.json. Raises BundleError for a part that has the wrong shape."""
        _check_shapes(config)
        process = _part(config, "process", {})
        annotations = _part(config, "annotations", {})
        cgroups_path = str(_part(config, "linux", {}).get("cgroupsPath") or "")
        who, agreed = _identity(annotations)
        root = str(_part(config, "root", {}).get("path") or "")
        return cls(
            env=_pairs(_part(process, "env", [])),
            annotations=tuple(sorted((key, value or "") for key, value in annotations.items())),
            mounts=tuple((m.get("source") or "", m.get("destination") or "") for m in _part(config, "mounts", [])),
            privileged=_privileged(config, process),
            root=os.path.abspath(os.path.join(bundle, root)) if root else "",
            cgroups_path=cgroups_path,
            confirmed=agreed and _carries(cgroups_path, who["pod_uid"]),
            **who,
        )

    def variable(self, name: str) -> str | None:
        """A variable's value, the last where it stands twice, None where it isn't set."""
        for key, value in reversed(self.env):
            if key == name:
                return value
        return None

    def position(self, name: str) -> str:
        """Where the value of `variable` stands, in words."""
        last = max((i for i, (key, _) in enumerate(self.env) if key == name), default=None)
        return "process.env" if last is None else f"process.env[{last}]"

    def with_variable(self, name: str, value: str) -> Container:
        """The same container with a variable set to this value, where it stands or at the end."""
        if self.variable(name) is None:
            return self.replace(env=(*self.env, (name, value)))
        return self.replace(env=tuple((key, value if key == name else old) for key, old in self.env))


class State(Value):
    """What a hook reads from standard input (OCI runtime-spec, State). root: crun's extension, "" elsewhere."""

    pid: int
    bundle: str
    id: str = ""
    root: str = ""

    @classmethod
    def parse(cls, text: bytes, *, process: bool = True) -> State:
        """Reads a state; `bundlePath` is what Docker wrote before 17.06. Raises BundleError.

        process: whether the container must have one. Of a pid that isn't positive the kernel, and the container CLI,
        make the caller's own process or its parent, and the host would be given what was meant for the container.
        """
        try:
            data = codec.loads(text, first=True)
        except ValueError as error:
            raise BundleError("container state on standard input", seen=error, wanted="a JSON object") from None
        pid = data.get("pid", 0) if isinstance(data, dict) else None
        if not isinstance(pid, int) or isinstance(pid, bool):
            raise BundleError("container state on standard input", seen=str(data)[:80], wanted="an object with a pid")
        if process and pid <= 0:
            raise BundleError(
                "container state on standard input", seen=f"pid {pid}", wanted="the pid of the container's process"
            )
        bundle = data.get("bundle") or data.get("bundlePath") or ""
        texts = str(bundle), str(data.get("id") or ""), str(data.get("root") or "")
        odd = next((value for value in texts if not codec.is_sound(value)), None)
        if odd is not None:
            raise BundleError("container state on standard input", seen=repr(odd)[:80], wanted=_SOUND)
        return cls(pid, *texts)


def read_config(path: str) -> dict[str, Any]:
    """The config.json at a path. Raises BundleError."""
    try:
        config = codec.loads(codec.read_file(path), first=True)
    except OSError as error:
        raise BundleError(f"config.json of the bundle {path}", seen=error.strerror, wanted="an OCI bundle") from None
    except ValueError as error:
        raise BundleError(f"config.json of the bundle {path}", seen=error, wanted="a JSON object") from None
    if not isinstance(config, dict):
        raise BundleError(f"config.json of the bundle {path}", seen=type(config).__name__, wanted="a JSON object")
    return config


def write_config(path: str, config: dict[str, Any]) -> None:
    """Writes a config.json aside and renames it, with the mode and owner of the one it replaces. Raises BundleError."""
    aside = f"{path}.gpulet.{os.getpid()}"
    try:
        before = os.stat(path)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(codec.dumps(config) + b"\n")
                file.flush()
                os.fchmod(descriptor, before.st_mode & 0o7777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            os.rename(aside, path)
        except BaseException:
            os.unlink(aside)
            raise
        _sweep(path)
    except (OSError, ValueError) as error:
        raise not_written(path, error) from None


def not_written(path: str, error: OSError | ValueError) -> BundleError:
    """The error of a config.json that can't be written. ValueError: NaN, a number too large, lists within lists without
    end, which Python reads."""
    what = f"config.json of the bundle {path}"
    if isinstance(error, OSError):
        return BundleError(what, seen=error.strerror, wanted="a file to replace")
    return BundleError(what, seen=error, wanted="what JSON can hold")


def _sweep(path: str) -> None:
    """Takes away what runs that were killed left beside a config.json: files of our own whose process is gone. Says
    nothing where it can't: a container doesn't fail for that."""
    folder, _, name = path.rpartition("/")
    try:
        owners = os.geteuid(), os.stat(path).st_uid
        for entry in os.listdir(folder or "."):
            pid = entry.removeprefix(f"{name}.gpulet.")
            if pid == entry or not (pid.isascii() and pid.isdigit()) or os.path.exists(f"/proc/{pid}"):
                continue
            left = os.path.join(folder, entry)
            if os.lstat(left).st_uid in owners:
                os.unlink(left)
    except OSError:
        pass


def _part(table: dict[str, Any], name: str, default: Any) -> Any:
    """A member of the default's type; absent and null mean the default, as Go decodes them."""
    value = table.get(name)
    if value is None:
        return default
    if not isinstance(value, type(default)) or isinstance(value, bool):
        raise BundleError(f"config.json: {name}", seen=repr(value)[:80], wanted=f"a JSON {_json_name(default)}")
    return value


def _check_shapes(config: dict[str, Any]) -> None:
    """Holds every part that is read or changed later against its kind, so that whoever made it is told which."""
    linux, hooks, process = _part(config, "linux", {}), _part(config, "hooks", {}), _part(config, "process", {})
    user = _part(process, "user", {})
    for name in ("uid", "gid"):
        _part(user, name, 0)
    _part(user, "additionalGids", [])
    _part(linux, "netDevices", {})
    for span in _objects(linux, "gidMappings"):
        for name in ("containerID", "hostID", "size"):
            _part(span, name, 0)
    _check_text("root.path", [_part(config, "root", {}).get("path")])
    _check_text("process.env", _part(process, "env", []))
    _check_text("annotations", _part(config, "annotations", {}).values())
    for table, name, texts, lists in (
        (config, "mounts", ("source", "destination"), ("options",)),
        (linux, "devices", ("path",), ()),
        (linux, "namespaces", ("type",), ()),
        (_part(linux, "resources", {}), "devices", (), ()),
        *((hooks, stage, ("path",), ("args", "env")) for stage in hooks),
    ):
        items = _objects(table, name)
        for text in texts:
            _check_text(f"{name}: {text}", [item.get(text) for item in items])
        for several in lists:
            for item in items:
                _check_text(f"{name}: {several}", _part(item, several, []), null=False)


def _objects(table: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A member that is a list of objects, empty where absent or null."""
    items: list[dict[str, Any]] = _part(table, name, [])
    if not all(isinstance(item, dict) for item in items):
        raise BundleError(f"config.json: {name}", seen=repr(items)[:80], wanted="a list of objects")
    return items


def _check_text(what: str, values: Iterable[Any], *, null: bool = True) -> None:
    """null: whether null may stand for none."""
    for value in values:
        if value is None and null:
            continue
        if not isinstance(value, str):
            raise BundleError(f"config.json: {what}", seen=repr(value)[:80], wanted="text")
        if not codec.is_sound(value):
            raise BundleError(f"config.json: {what}", seen=repr(value)[:80], wanted=_SOUND)


def _json_name(value: object) -> str:
    return "array" if isinstance(value, list) else "object" if isinstance(value, dict) else "number"


def _pairs(env: list[Any]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for entry in env:
        name, equals, value = (entry or "").partition("=")
        if not equals:
            raise BundleError("config.json: invalid environment variable", seen=entry, wanted="NAME=value")
        pairs.append((name, value))
    return tuple(pairs)


def _privileged(config: dict[str, Any], process: dict[str, Any]) -> bool:
    """CAP_SYS_ADMIN in the bounding set: what the peer calls privileged. Between 1.0.0-rc1 and 1.0.0-rc4 the
    specification had one list of capabilities instead of five sets."""
    capabilities = process.get("capabilities")
    if isinstance(capabilities, dict):
        capabilities = capabilities.get("bounding")
    elif capabilities is not None and not str(config.get("ociVersion", "")).startswith("1.0.0-rc"):
        raise BundleError(
            "config.json: process.capabilities", seen=repr(capabilities)[:80], wanted="an object with a list `bounding`"
        )
    return isinstance(capabilities, list) and "CAP_SYS_ADMIN" in capabilities


def _identity(annotations: dict[str, Any]) -> tuple[dict[str, str], bool]:
    """Who the container is, and whether nothing said about it contradicts anything else.

    CRI-O hands nearly every annotation of a Pod on, and containerd those that it is set up to, so a Pod can speak in
    the words of the engine that doesn't run it, of which nothing overwrites the lie. Which of the two is the engine
    can't be told, so where both speak a field holds what both say, and nothing where one says otherwise or is silent.
    Of a Pod's sandbox CRI-O lets an annotation change the type too, but not the name, which no container can have.
    """
    told = [{field: str(annotations.get(keys[engine]) or "") for field, keys in _IDENTITY.items()} for engine in (0, 1)]
    first, *others = [words for words in told if any(words.values())] or told[:1]
    who = {field: word if all(other[field] == word for other in others) else "" for field, word in first.items()}
    if told[1]["name"] == _SANDBOX_NAME:
        who["type"] = "sandbox"
    return who, all(other == first for other in others)


def _carries(cgroups_path: str, pod_uid: str) -> bool:
    """Whether a cgroup's path is of this Pod: ".../pod<UID>/..." with cgroupfs, "...-pod<UID with _>.slice:..." with
    systemd."""
    if not pod_uid:
        return False
    parts = cgroups_path.replace(":", "/").split("/")
    sliced = f"-pod{pod_uid.replace('-', '_')}.slice"
    return any(part == f"pod{pod_uid}" or part.endswith(sliced) for part in parts)
