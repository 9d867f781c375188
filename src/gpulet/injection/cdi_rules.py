"""The rules of CDI specifications: names, versions, which fields there are (CNCF CDI SPEC.md and its Go library).

Pure. Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.codec import is_sound
from gpulet.errors import CdiError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
STAGES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ALNUM = _LETTERS | frozenset("0123456789")

# Fields of each object, with the type that each must have.
_FIELDS: dict[str, dict[str, type]] = {
    "spec": {"cdiVersion": str, "kind": str, "annotations": dict, "devices": list, "containerEdits": dict},
    "device": {"name": str, "annotations": dict, "containerEdits": dict},
    "edits": {
        "env": list,
        "deviceNodes": list,
        "netDevices": list,
        "hooks": list,
        "mounts": list,
        "intelRdt": dict,
        "additionalGids": list,
    },
    "deviceNodes": {
        "path": str,
        "hostPath": str,
        "type": str,
        "major": int,
        "minor": int,
        "fileMode": int,
        "permissions": str,
        "uid": int,
        "gid": int,
    },
    "netDevices": {"hostInterfaceName": str, "name": str},
    "hooks": {"hookName": str, "path": str, "args": list, "env": list, "timeout": int},
    "mounts": {"hostPath": str, "containerPath": str, "options": list, "type": str},
    "intelRdt": {
        "closID": str,
        "l3CacheSchema": str,
        "memBwSchema": str,
        "schemata": list,
        "enableMonitoring": bool,
        "enableCMT": bool,
        "enableMBM": bool,
    },
}
# What the lists of texts and numbers hold.
_ITEMS: dict[str, type] = {
    "env": str, "args": str, "options": str, "schemata": str, "additionalGids": int,
}  # fmt: skip
# What stands in a field as an object of its own, or as a list of such.
_INSIDE = {
    "devices": "device",
    "containerEdits": "edits",
    **{name: name for name in ("deviceNodes", "netDevices", "hooks", "mounts", "intelRdt")},
}
_UNSIGNED = frozenset({"uid", "gid", "fileMode", "additionalGids"})  # of 32 bits


def _bad(what: str, seen: object, wanted: str = "") -> CdiError:
    return CdiError(what, seen=seen, wanted=wanted)


def _check_word(word: str, what: str, first: frozenset[str], middle: str) -> None:
    wanted = f"a {'letter' if first is _LETTERS else 'letter or digit'}, then letters, digits, {' '.join(middle)}"
    if not word or word[0] not in first or word[-1] not in _ALNUM:
        raise _bad(f"invalid {what}", repr(word), wanted + ", and a letter or digit last")
    for character in word:
        if character not in _ALNUM and character not in middle:
            raise _bad(f"invalid {what}", repr(word), wanted)


def split_kind(kind: str) -> tuple[str, str]:
    """("nvidia.com", "gpu") of "nvidia.com/gpu". Raises CdiError."""
    vendor, _, cls = kind.partition("/")
    _check_word(vendor, f"CDI vendor in kind {kind!r}", _LETTERS, "_-.")
    _check_word(cls, f"CDI class in kind {kind!r}", _LETTERS, "_-.")
    return vendor, cls


def split_name(name: str) -> tuple[str, str]:
    """("nvidia.com/gpu", "0") of "nvidia.com/gpu=0". Raises CdiError where it is no qualified name."""
    kind, _, device = name.partition("=")
    split_kind(kind)
    check_device_name(device)
    return kind, device


def is_qualified(name: str) -> bool:
    """Whether it is a "vendor/class=device" name."""
    try:
        split_name(name)
    except CdiError:
        return False
    return True


def check_device_name(name: str) -> None:
    """Raises CdiError where a device may not be called so."""
    _check_word(name, "CDI device name", _ALNUM, "_-.:")


def parse_version(text: str) -> tuple[int, int, int]:
    """A CDI version that exists, as numbers. Raises CdiError."""
    plain = text.removeprefix("v")
    if plain not in VERSIONS:
        raise _bad("unknown CDI version", repr(text), "one of " + " ".join(VERSIONS))
    major, minor, patch = plain.split(".")
    return int(major), int(minor), int(patch)


def all_edits(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The containerEdits of the spec and of each of its devices."""
    yield spec.get("containerEdits") or {}
    for device in spec.get("devices") or ():
        yield device.get("containerEdits") or {}


def needs(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(version, why) for each feature of the spec that is younger than 0.3.0."""
    if spec.get("annotations") or any(device.get("annotations") for device in spec.get("devices") or ()):
        yield "0.6.0", "annotations"
    if "." in spec.get("kind", "").partition("/")[2]:
        yield "0.6.0", "a dot in the class"
    for device in spec.get("devices") or ():
        if device["name"][:1].isdigit():
            yield "0.5.0", f"device name {device['name']!r} begins with a digit"
    for edits in all_edits(spec):
        rdt = edits.get("intelRdt")
        if edits.get("netDevices"):
            yield "1.1.0", "netDevices"
        if rdt is not None:
            newest = rdt.get("schemata") or rdt.get("enableMonitoring")
            yield ("1.1.0", "intelRdt.schemata or enableMonitoring") if newest else ("0.7.0", "intelRdt")
        if edits.get("additionalGids"):
            yield "0.7.0", "additionalGids"
        if any(node.get("hostPath") for node in edits.get("deviceNodes") or ()):
            yield "0.5.0", "deviceNodes.hostPath"
        if any(mount.get("type") for mount in edits.get("mounts") or ()):
            yield "0.4.0", "mounts.type"


def minimum_version(spec: Mapping[str, Any]) -> str:
    """The lowest cdiVersion that may be declared for this content."""
    return max(["0.3.0", *(version for version, _why in needs(spec))], key=parse_version)


# -- validation of a whole spec --


def as_decoded(value: Any, kind: str = "spec") -> Any:
    """A parsed spec as Go's decoder hands it to CDI's library, which is what people try theirs with: a field's name may
    be in other letters, a text may be written as a number (`name: 0`), and a whole number with a point."""
    if isinstance(value, list):  # of lists in it nothing is wanted, and by YAML's aliases they may have no end
        return [as_decoded(one, kind) if isinstance(one, dict) else one for one in value]
    if not isinstance(value, dict):
        return value
    names = {name.lower(): name for name in _FIELDS[kind]}
    decoded = {}
    for written, item in value.items():
        name = names.get(str(written).lower(), str(written))
        if name in _INSIDE and name in _FIELDS[kind]:
            item = as_decoded(item, _INSIDE[name])
        elif name == "annotations" and isinstance(item, dict):
            item = {str(key): _as(str, "" if one is None else one) for key, one in item.items()}
        else:
            wanted = _ITEMS.get(name) or _FIELDS[kind].get(name)
            several = isinstance(item, list)
            item = [_as(wanted, "" if one is None else one) for one in item] if several else _as(wanted, item)
        decoded[name] = item
    return decoded


def _as(wanted: type | None, item: Any) -> Any:
    if isinstance(item, float) and item.is_integer():
        item = int(item) if wanted in (int, str) else item
    if wanted is str and isinstance(item, (bool, int, float)):
        return str(item).lower()
    return item


def _check_fields(value: Any, kind: str, where: str) -> None:
    if not isinstance(value, dict):
        raise _bad(f"{where} is no object", type(value).__name__)
    for name, item in value.items():
        if name not in _FIELDS[kind]:
            raise _bad(f"unknown field in {where}", repr(name), "one of " + " ".join(_FIELDS[kind]))
        if item is None:
            continue
        _check_one(item, _FIELDS[kind][name], f"{where}.{name}", name in _UNSIGNED)
        for one in item if name in _ITEMS else ():
            _check_one(one, _ITEMS[name], f"{where}.{name}", name in _UNSIGNED)
        for one in item.values() if name == "annotations" else ():
            _check_one(one, str, f"{where}.{name}", False)


def _check_one(item: Any, wanted: type, where: str, unsigned: bool) -> None:
    if not isinstance(item, wanted) or (wanted is int and isinstance(item, bool)):
        raise _bad(f"wrong type of {where}", type(item).__name__, wanted.__name__)
    if isinstance(item, str) and not is_sound(item):
        raise _bad(f"{where} can't be handed to the system", repr(item[:80]), "text without NUL, in whole characters")
    if unsigned and isinstance(item, int) and not 0 <= item < 1 << 32:
        raise _bad(f"{where} is out of range", item, "a number from 0 to 2^32 - 1")
    if isinstance(item, int) and not -1 << 63 <= item < 1 << 63:
        raise _bad(f"{where} is out of range", item, "a number of 64 bits")


def _check_env(values: Any, where: str) -> None:
    for value in values or ():
        if not isinstance(value, str) or value.find("=") < 1:
            raise _bad(f"invalid environment variable in {where}", repr(value), "NAME=VALUE")


def _check_node(node: Mapping[str, Any], where: str) -> None:
    if not node.get("path"):
        raise _bad(f"{where} has no path", repr(node.get("path")))
    if node.get("type") not in (None, "", "b", "c", "u", "p"):
        raise _bad(f"wrong type of device in {where}", node.get("type"), "b, c, u or p")
    permissions = node.get("permissions") or ""
    if permissions != "none" and any(letter not in "rwm" for letter in permissions):
        raise _bad(f"wrong permissions in {where}", permissions, 'letters out of "rwm", or "none"')


def _check_hook(hook: Mapping[str, Any], where: str) -> None:
    if hook.get("hookName") not in STAGES:
        raise _bad(f"unknown hookName in {where}", repr(hook.get("hookName")), "one of " + " ".join(STAGES))
    if not hook.get("path"):
        raise _bad(f"{where} has no path", repr(hook.get("path")))
    _check_env(hook.get("env"), where)


def _check_mount(mount: Mapping[str, Any], where: str) -> None:
    for name in ("hostPath", "containerPath"):
        if not mount.get(name):
            raise _bad(f"{where} has no {name}", repr(mount.get(name)))


def _check_rdt(rdt: Mapping[str, Any], where: str) -> None:
    name = rdt.get("closID") or ""
    if name != "/" and (len(name) >= 4096 or name in (".", "..") or "/" in name or "\n" in name):
        raise _bad(f"wrong closID in {where}", repr(name[:80]), 'a folder name, or "/"')


def _check_net_devices(devices: Any, where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for device in devices:
        for field in ("hostInterfaceName", "name"):
            value = device.get(field)
            if not value or (field, value) in seen:
                raise _bad(f"{where}.{field} is empty or used twice", repr(value))
            seen.add((field, value))


def check_edits(edits: Any, where: str) -> None:
    """Raises CdiError where containerEdits are not as they must be; `where` names them."""
    if edits is None:
        return
    _check_fields(edits, "edits", where)
    _check_env(edits.get("env"), f"{where}.env")
    checks = {"deviceNodes": _check_node, "hooks": _check_hook, "mounts": _check_mount}
    for field in ("deviceNodes", "hooks", "mounts", "netDevices"):
        for at, item in enumerate(edits.get(field) or ()):
            _check_fields(item, field, f"{where}.{field}[{at}]")
            if field in checks:
                checks[field](item, f"{where}.{field}[{at}]")
    _check_net_devices(edits.get("netDevices") or (), f"{where}.netDevices")
    if edits.get("intelRdt") is not None:
        _check_fields(edits["intelRdt"], "intelRdt", f"{where}.intelRdt")
        _check_rdt(edits["intelRdt"], f"{where}.intelRdt")


def check(spec: Any) -> None:
    """Raises CdiError where the spec is not one that a CDI engine takes."""
    if not isinstance(spec, dict) or not spec:
        raise _bad("no CDI spec data", type(spec).__name__, "an object")
    _check_fields(spec, "spec", "the spec")
    declared = parse_version(spec.get("cdiVersion") or "")
    split_kind(spec.get("kind") or "")
    check_edits(spec.get("containerEdits"), "containerEdits")
    if not spec.get("devices"):
        raise _bad("the spec has no devices", spec.get("devices"))
    names = set()
    for device in spec["devices"]:
        _check_fields(device, "device", "a device")
        name = device.get("name") or ""
        check_device_name(name)
        if name in names:
            raise _bad("two devices of one name", repr(name))
        names.add(name)
        edits = device.get("containerEdits") or {}
        if not any(edits.values()) and edits.get("intelRdt") is None:  # of which an empty one is a class of its own
            raise _bad(f"device {name!r} has no edits", device.get("containerEdits"))
        check_edits(device["containerEdits"], f"device {name!r}")
    for version, why in needs(spec):
        if declared < parse_version(version):
            raise _bad("cdiVersion is too low", spec["cdiVersion"], f"{version} or newer, because of {why}")
    if declared < (0, 3, 0):
        raise _bad("cdiVersion is too low", spec["cdiVersion"], "0.3.0 or newer")
