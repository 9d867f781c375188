"""Which IMEX channels a container asks for: mounts first, else NVIDIA_IMEX_CHANNELS.

Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.request.bundle import Container
from gpulet.request.devices import from_mounts, unique
from gpulet.request.trace import Trace
from gpulet.settings import Settings

VARIABLE = "NVIDIA_IMEX_CHANNELS"


def channels(container: Container, settings: Settings, trace: Trace) -> tuple[str, ...]:
    """Channel numbers as text. `all` isn't a channel, and `none` asks for none (the peer's CDI mode gives all)."""
    if settings.ignore_imex_requests:
        trace.note("IMEX channels", "any", settings.where("ignore_imex_requests"), "ignored")
        return ()
    mounted = from_mounts(container, settings, Trace())[1]
    if mounted:
        trace.note("IMEX channels", ",".join(mounted), "mounts", "accepted")
        return mounted
    value = container.variable(VARIABLE)
    items = [part for part in map(str.strip, (value or "").split(",")) if part]
    where = container.position(VARIABLE)
    if not items or "void" in items or "none" in items:
        return ()
    if "all" in items:
        trace.warn("IMEX channels", value, where, "ignored: channels are asked for by number")
        return ()
    if not (container.privileged or settings.accept_envvar_unprivileged):
        trace.warn("IMEX channels", value, where, "ignored: the container isn't privileged")
        return ()
    trace.note("IMEX channels", value, where, "accepted")
    return unique(items)
