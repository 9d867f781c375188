"""CDI, the Container Device Interface: to and from injections. The parts are in the modules beside this one.

Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.injection.cdi_calls import HookCalls
from gpulet.injection.cdi_hooks import absorb, take_over
from gpulet.injection.cdi_registry import DEFAULT_FOLDERS, Registry, read_spec
from gpulet.injection.cdi_rules import check, is_qualified, minimum_version, split_name
from gpulet.injection.cdi_spec import channel_spec, make_spec, to_text, write_spec

__all__ = [
    "DEFAULT_FOLDERS",
    "HookCalls",
    "Registry",
    "absorb",
    "channel_spec",
    "check",
    "is_qualified",
    "make_spec",
    "minimum_version",
    "read_spec",
    "split_name",
    "take_over",
    "to_text",
    "write_spec",
]
