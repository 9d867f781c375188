"""Which CDI versions container engines read, and how to stay below one.

An engine takes what the CDI library takes that it was built with, so a row says: from this engine version on, this
CDI version. Each row has its source; where a source only tells that an engine has a version by some release, the row
names that release, so rows err on the low side. That costs newer features alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulet.errors import UsageError
from gpulet.injection import cdi_rules

ENGINES: dict[str, tuple[tuple[tuple[int, int], str], ...]] = {
    "podman": (
        ((4, 1), "0.3.0"),  # CDI project, README, "Podman configuration"
        ((4, 2), "0.4.0"),  # NVIDIA/nvidia-container-toolkit#38: refuses hostPath
        ((4, 3), "0.5.0"),  # seen: Debian's 4.3.1 runs what tests/e2e/test_podman.py generates for it
        ((4, 7), "0.6.0"),  # modules that build on podman 4.7.0 get library 0.6.1
        ((5, 1), "0.7.0"),  # podman#22280, April 2024; 4.9 refuses additionalGids, nvidia-container-toolkit#1860
        ((5, 3), "0.8.0"),  # podman's go.mod of August 2024
    ),
    "containerd": (
        ((1, 7), "0.5.0"),  # containerd#7374; from 1.7.16 on it reads 0.7.0, containerd#10077
        ((2, 0), "0.7.0"),  # containerd#10041
        ((2, 1), "1.0.0"),  # containerd#11522
        ((2, 3), "1.1.0"),  # containerd#12663
    ),
    "crio": (
        ((1, 23), "0.3.0"),  # not confirmed: the first release said to have CDI, in CDI's own first version
        ((1, 27), "0.5.0"),  # cri-o#6711
        ((1, 30), "0.7.0"),  # CDI project, container-device-interface#199
        ((1, 32), "0.8.0"),  # cri-o#9025
        ((1, 36), "1.1.0"),  # cri-o#9650
    ),
    "docker": (
        ((25, 0), "0.6.0"),  # CDI project, README; moby#47706 tells what came before
        ((27, 0), "0.7.0"),  # moby#47706
        ((27, 4), "0.8.0"),  # moby#48886
        ((29, 0), "1.0.0"),  # moby#49738
    ),
}
_BOTH = ("/etc/cdi", "/var/run/cdi")  # CDI's SPEC.md, and so each engine unless configured otherwise
_ONE_FOLDER = ("podman", (5, 5))  # containers/common#2460: these releases leave /var/run/cdi out


def folders(engine: str) -> tuple[str, ...]:
    """The spec folders that "podman", "podman=5.5" etc. read unless configured otherwise, later ones winning."""
    name, _, version = engine.partition("=")
    return _BOTH[:1] if (_name(name), _numbers(version)) == _ONE_FOLDER else _BOTH


def known(engine: str) -> None:
    """Raises UsageError where there is no such engine; its version may be left out."""
    if _name(engine.partition("=")[0]) not in ENGINES:
        raise UsageError("unknown container engine", seen=engine, wanted="one of " + ", ".join(ENGINES))


def _name(engine: str) -> str:
    return engine.lower().replace("cri-o", "crio")


def _numbers(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, None where it has no number first."""
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts[:2]):
        return None
    return int(parts[0]), int(parts[1]) if len(parts) > 1 else 0


def limit(target: str) -> str:
    """The newest CDI version that a target reads: "podman=4.9", "containerd=1.7", or a CDI version itself."""
    engine, equals, version = target.partition("=")
    if not equals and target.removeprefix("v") in cdi_rules.VERSIONS:
        return target.removeprefix("v")
    rows, wanted = ENGINES.get(_name(engine), ()), _numbers(version)
    if not rows or wanted is None:
        raise UsageError(
            "unknown target of a CDI spec", seen=target, wanted=f"ENGINE=VERSION with one of {', '.join(ENGINES)}"
        )
    read = [cdi for since, cdi in rows if since <= wanted]
    if not read:
        first = ".".join(map(str, rows[0][0]))
        raise UsageError(f"{engine} {version} knows no CDI", wanted=f"{engine} {first} or newer")
    return read[-1]


def above(spec: Mapping[str, Any], highest: str) -> list[str]:
    """What in the spec needs more than the CDI version `highest`, each with the version it needs."""
    bound = cdi_rules.parse_version(highest)
    needs = {f"{why} (needs {version})": None for version, why in cdi_rules.needs(spec)
             if cdi_rules.parse_version(version) > bound}  # fmt: skip
    return list(needs)
