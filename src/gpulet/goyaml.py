"""YAML as the peers read it: their parser (goyaml 2) and PyYAML differ on what a word without quotes is.

Bare y and n are booleans, 1e3 and 0o17 numbers, 08 is 8; dates, 1:30, 0:1 and 0x_ are text.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TAG = "tag:yaml.org,2002:"
MERGE = _TAG + "merge"
_OURS = tuple(_TAG + kind for kind in ("bool", "int", "float", "timestamp"))
_WORDS = (
    ("bool", "y|Y|n|N|yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", "yYnNtTfFoO"),
    ("int", "[-+]?(0b_*[01][01_]{0,63}|0o_*[0-7][0-7_]{0,39}|0x_*[0-9a-fA-F][0-9a-fA-F_]{0,39}|0[0-7_]{0,39}"
            "|[1-9][0-9_]{0,39})", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]{1,40}|[0-9]{1,40}(\.[0-9]{0,40})?)([eE][-+]?[0-9]{1,3})?|[-+]?\.(inf|Inf|INF)"
              r"|\.(nan|NaN|NAN)", "-+.0123456789"),
)  # fmt: skip


def loader(base: Any) -> Any:
    """A loader class of PyYAML's with the peers' idea of a plain scalar; base: its SafeLoader or CSafeLoader."""

    class Loader(base):  # type: ignore[misc]
        bool_values = {**base.bool_values, "y": True, "n": False}  # noqa: RUF012
        yaml_implicit_resolvers = {  # noqa: RUF012
            first: [row for row in rows if row[0] not in _OURS] for first, rows in base.yaml_implicit_resolvers.items()
        }

        def construct_yaml_int(self, node: Any) -> int:
            text = self.construct_scalar(node).replace("_", "")
            return int(text, 8) if "0o" in text else int(super().construct_yaml_int(node))

    for kind, pattern, first in _WORDS:
        Loader.add_implicit_resolver(_TAG + kind, re.compile(f"(?:{pattern})$"), list(first))
    Loader.add_constructor(_TAG + "int", Loader.construct_yaml_int)
    return Loader
