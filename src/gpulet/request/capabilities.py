"""Which driver capabilities a container gets: NVIDIA_DRIVER_CAPABILITIES within what the configuration supports.

Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.errors import ConfigError, RequestError
from gpulet.request.bundle import Container
from gpulet.request.devices import is_legacy_image
from gpulet.request.trace import Trace
from gpulet.settings import DRIVER_CAPABILITIES, Settings

VARIABLE = "NVIDIA_DRIVER_CAPABILITIES"
DEFAULT = ("compute", "utility")
_PLAIN = {ord(quote): None for quote in "\"'"}


def supported(settings: Settings) -> tuple[str, ...]:
    """The capabilities that the configuration allows. Raises ConfigError for a name that isn't one."""
    text = settings.supported_capabilities
    names = DRIVER_CAPABILITIES if text.strip() == "all" else _split(text)
    strange = [name for name in names if name not in DRIVER_CAPABILITIES]
    if strange:
        raise ConfigError(
            f"{settings.source or 'configuration'}: supported-driver-capabilities",
            seen=text,
            wanted="all, or some of " + ",".join(DRIVER_CAPABILITIES),
        )
    return tuple(sorted(set(names)))


def capabilities(container: Container, settings: Settings, trace: Trace, *, strict: bool) -> tuple[str, ...]:
    """The driver capabilities, sorted. strict: a name that isn't supported is a RequestError, as it has always been in
    legacy mode. In the CDI modes the peer never looked at the variable, so whatever stands in it there must go on
    working: quotes and capitals don't count, a name that isn't supported is left out and said, and where no other is
    left, all are given."""
    allowed = supported(settings)
    if settings.capabilities == "all" and not strict:
        trace.note("capabilities", "all", settings.where("capabilities"), ",".join(allowed))
        return allowed
    value = container.variable(VARIABLE)
    where = container.position(VARIABLE)
    if value is None and is_legacy_image(container):
        trace.note("capabilities", "unset", where, f"legacy image: {','.join(allowed)}")
        return allowed
    wanted = sorted(set(_split(value or "") if strict else _split((value or "").translate(_PLAIN).lower())))
    if not value or not (wanted or strict):
        chosen = tuple(name for name in DEFAULT if name in allowed)
        trace.note("capabilities", "unset" if value is None else "empty", where, f"default: {','.join(chosen)}")
        return chosen
    chosen = allowed if "all" in wanted else tuple(name for name in wanted if name in allowed)
    if "all" not in wanted and len(chosen) < len(wanted):
        refused = ",".join(name for name in wanted if name not in allowed)
        if strict:
            raise RequestError(
                f"unsupported capabilities found in '{','.join(wanted)}' (allowed '{','.join(chosen)}')",
                wanted=f"all, or some of {','.join(allowed)}",
                remedy=f"correct {VARIABLE}, or supported-driver-capabilities in config.toml",
            )
        if not chosen and not any(name in DRIVER_CAPABILITIES for name in wanted):
            trace.warn("capabilities", value, where, f"{refused}: none of {','.join(allowed)}; all are given")
            return allowed
        trace.warn("capabilities", value, where, f"{refused}: none of {','.join(allowed)}, left out")
    else:
        trace.note("capabilities", value, where, ",".join(chosen))
    return chosen


def _split(value: str) -> list[str]:
    return [part for part in map(str.strip, value.split(",")) if part]
