"""CUDA_VISIBLE_DEVICES as the variable's name: the CUDA library inside the container reads it too.

Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.request.bundle import Container
from gpulet.request.devices import is_qualified
from gpulet.request.model import Request
from gpulet.settings import CUDA_VISIBLE_DEVICES, Settings

ORIGINAL = "GPULET_VISIBLE_DEVICES"  # in the hook's environment: what the runtime found before it rewrote the variable


def cuda_value(request: Request) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to be inside the container; None: not to be set at all.

    The CUDA library reads it too, where an index counts the visible GPUs only: UUIDs stay, anything else becomes
    0..n-1, `all` goes away, none is an empty value. The words are read as `select` reads them: in capitals too, and
    `all` among others is all.

    The first that is asked for is the first that CUDA shall use, so indices keep their order: those inside count the
    same GPUs from below. How UUIDs or PCI addresses among them lie to each other isn't known here.
    """
    names = [device.partition("=")[2] if is_qualified(device) else device for device in request.devices]
    words = [name.lower() for name in names]
    if "all" in words:
        return None
    names = [name for name, word in zip(names, words, strict=True) if word not in ("none", "void")]
    if all(name.startswith(("GPU-", "MIG-")) for name in names):
        return ",".join(names)
    places = [_place(name) for name in names]
    if not all(places):
        return ",".join(map(str, range(len(names))))
    inside = sorted(set(places))
    return ",".join(str(inside.index(place)) for place in dict.fromkeys(places))


def _place(name: str) -> tuple[int, ...]:
    """Where an index ("3", or "0:1" for a MIG device) stands among others; () for what is no index."""
    parts = name.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
        return ()
    return tuple(map(int, parts))


def speaks_cuda(settings: Settings, container: Container) -> bool:
    """Whether CUDA_VISIBLE_DEVICES is one of the names in use and the container has it."""
    return (
        CUDA_VISIBLE_DEVICES in settings.visible_devices_envvars
        and container.variable(CUDA_VISIBLE_DEVICES) is not None
    )
