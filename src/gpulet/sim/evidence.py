"""What was found, in words: one line of evidence for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpulet.sim.allocation import Allocation

Report = dict[str, Any]


def answer(allocation: Allocation) -> str:
    """The plugin's answer to Allocate."""
    words = [f"{name}={value}" for name, value in sorted(allocation.envs.items())]
    words += [f"mount {mount.container_path}" for mount in allocation.mounts]
    words += [f"device {device.container_path}" for device in allocation.devices]
    words += [f"annotation {key}={value}" for key, value in sorted(allocation.annotations.items())]
    words += [f"CDI {name}" for name in allocation.cdi_devices]
    return "; ".join(words)


def changes(before: Report, after: Report) -> str:
    """What the runtime did to config.json."""
    words = []
    for what, path in (("device nodes", ("linux", "devices")), ("mounts", ("mounts",))):
        old = _at(before, path)
        added = sum(one not in old for one in _at(after, path))
        if added:
            words.append(f"+{added} {what}")
    words += _variables(_at(before, ("process", "env")), _at(after, ("process", "env")))
    old_hooks, new_hooks = before.get("hooks") or {}, after.get("hooks") or {}
    for stage in sorted({*old_hooks, *new_hooks}):
        difference = len(new_hooks.get(stage) or ()) - len(old_hooks.get(stage) or ())
        if difference:
            words.append(f"{difference:+d} {stage} hook" + ("s" if abs(difference) > 1 else ""))
    return ", ".join(words) if words else "config.json left as it was"


def _variables(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Variables that changed, as they stand afterwards; those that went as "NAME unset"."""
    names = {entry.partition("=")[0] for entry in after}
    gone = dict.fromkeys(entry.partition("=")[0] for entry in before)
    return [entry for entry in after if entry not in before] + [f"{name} unset" for name in gone if name not in names]


def _at(config: Report, path: Sequence[str]) -> list[Any]:
    found: Any = config
    for key in path:
        found = found.get(key) or {}
    return list(found)


def inside(probe: Report) -> str:
    """What the probe reported from inside the container."""
    refused = f"{len(probe['denied'])} GPUs refused"
    if probe["nvml_error"] and not probe["devices"]:
        return f"no /dev/nvidia*, no driver library ({probe['nvml_error']}); {refused}"
    gpus = [int(name) for one in probe["devices"] if (name := one.removeprefix("/dev/nvidia")).isdigit()]
    others = [one.removeprefix("/dev/") for one in probe["devices"] if not one[-1].isdigit() or "/" in one[5:]]
    names = " ".join([f"nvidia{ranges(gpus)}", *others] if gpus else others)
    read_only = sum("ro" in one["flags"] for one in probe["files"])
    library = probe["libraries"].get("libnvidia-ml.so.1")
    nvml = f"NVML lists {len(probe['nvml'])} through {library}" if library else "no libnvidia-ml.so.1"
    return f"{nvml}; {names}; {len(probe['files'])} driver mounts ({read_only} read-only); {refused}"


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers as people write them: "0-3,7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def seen(probe: Report) -> Report:
    """The probe's report as the demo's data has it."""
    kept = {name: probe[name] for name in ("devices", "denied", "files", "libraries", "env")}
    return {"nvml": [one["uuid"] for one in probe["nvml"]], **kept}
