"""docs/metrics.md names every metric and every kind of Event that there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from gpulet.plugin import main, metrics, news

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "metrics.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(title: str) -> set[str]:
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_metric():
    assert main.PROGRAM  # imported first, as in the program
    told = set()
    for family in metrics.Metrics().registry.collect():
        told.add(family.name + ("_total" if family.type == "counter" else ""))
    assert first_cells("Metrics") == told


ENDS = (
    "Rejected|Invalid|Fallback|Gone|Allocated|Lost|Mismatch|Stale|PluginReRegistered|Offered|Unhealthy|Recovered|Failed"
)


def test_every_kind_of_event():
    source = "".join(path.read_text() for path in (ROOT / "src" / "gpulet" / "plugin").glob("*.py"))
    kinds = set(re.findall(rf'"([A-Z]\w*(?:{ENDS}))"', source)) | {"PluginReRegistered"}
    kinds -= {"Recovered"}  # an end alone
    assert first_cells("Events") == kinds
    assert kinds <= set(re.findall(r"\w+", news.__doc__ or ""))
