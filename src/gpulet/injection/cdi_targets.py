"""Which CDI versions container engines read, and how to stay below one.

An engine takes what the CDI library takes that it was built with, so a row says: from this engine version on, this
CDI version. Rows err on the low side; they only cost a newer feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpulet.errors import UsageError
from gpulet.injection import cdi_rules

ENGINES: dict[str, tuple[tuple[tuple[int, int], str], ...]] = {
    "podman": (((4, 1), "0.3.0"), ((4, 2), "0.4.0"), ((4, 3), "0.5.0"), ((4, 9), "0.6.0"), ((5, 2), "0.8.0")),
    "containerd": (((1, 7), "0.5.0"), ((2, 0), "0.8.0")),
    "crio": (((1, 23), "0.3.0"), ((1, 26), "0.5.0"), ((1, 28), "0.6.0"), ((1, 31), "0.8.0")),
    "docker": (((25, 0), "0.6.0"), ((27, 1), "0.8.0")),
}
FOLDERS = {  # the spec folders that each engine reads unless configured otherwise
    "podman": ("/etc/cdi", "/var/run/cdi"),
    "containerd": ("/etc/cdi", "/var/run/cdi"),
    "crio": ("/etc/cdi", "/var/run/cdi"),
    "docker": ("/etc/cdi", "/var/run/cdi"),
}


def limit(target: str) -> str:
    """The newest CDI version that a target reads: "podman=4.9", "containerd=1.7", or a CDI version itself."""
    engine, equals, version = target.partition("=")
    if not equals and target.removeprefix("v") in cdi_rules.VERSIONS:
        return target.removeprefix("v")
    rows = ENGINES.get(engine.lower().replace("cri-o", "crio"), ())
    parts = version.split(".")
    if not rows or not all(part.isdigit() for part in parts[:2]):
        raise UsageError(
            "unknown target of a CDI spec", seen=target, wanted=f"ENGINE=VERSION with one of {', '.join(ENGINES)}"
        )
    wanted = (int(parts[0]), int(parts[1]) if len(parts) > 1 else 0)
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
