"""What no longer fits together on a node: the driver's library and its kernel module, CDI specs and the GPUs."""

from __future__ import annotations

import os

from gpulet.errors import NodeError
from gpulet.node import nvml_library, procfs
from gpulet.node.gpu import NodeFacts
from gpulet.plugin.generation import Generation


def driver_versions(root: str) -> tuple[str, str]:
    """The versions of the loaded kernel module and of the library on disk, "" for what isn't known."""
    try:
        library = os.path.basename(nvml_library.locate(root)).partition(".so.")[2]
    except NodeError:
        library = ""
    return procfs.driver_version(root), library if "." in library else ""  # "1" is the interface's name, no version


def mismatch(versions: tuple[str, str]) -> str:
    """What is wrong with the two versions, "" where nothing is."""
    module, library = versions
    if not module or not library or module == library:
        return ""
    return (
        f"the driver's kernel module is {module}, its library {library}: nothing new can use the GPUs; reboot the "
        "node, or stop what uses them and load the module anew"
    )


def stale_specs(current: Generation, looked: NodeFacts | None) -> str:
    """Why our CDI specs aren't of the node that the last look found, "" where they are, or we write none."""
    from gpulet.injection.cdi_fingerprint import fingerprint

    if not current.config.cdi or looked is None:
        return ""
    made, now = fingerprint(current.facts), fingerprint(looked)
    changed = [f"{key} {made.get(key)!r}, now {now.get(key)!r}" for key in sorted({*made, *now})
               if made.get(key) != now.get(key)]  # fmt: skip
    where = current.config.cdi_spec_dir
    return f"CDI specs in {where} are of an earlier state: {'; '.join(changed)}" if changed else ""
