"""What one container gets to ask for, after policy, and every rule that was looked at on the way.

Pure: configuration, container and ledger are read by the caller. The runtime, the hook and `gpulet explain` all decide
here. Loaded by the programs in launch/.
"""

from __future__ import annotations

from gpulet.errors import Refused, RequestError, cut
from gpulet.request import policy
from gpulet.request.bundle import Container
from gpulet.request.capabilities import capabilities
from gpulet.request.devices import Asked, asked, is_qualified, tell_hidden
from gpulet.request.imex import channels
from gpulet.request.model import Request
from gpulet.request.requirements import collect
from gpulet.request.trace import Rule, Trace
from gpulet.settings import Settings
from gpulet.value import Value

GATED = (
    ("NVIDIA_GDS", "gds"),
    ("NVIDIA_MOFED", "mofed"),
    ("NVIDIA_GDRCOPY", "gdrcopy"),
    ("NVIDIA_NVSWITCH", "nvswitch"),
)
MIG = (("NVIDIA_MIG_CONFIG_DEVICES", "MIG_CONFIG_DEVICES"), ("NVIDIA_MIG_MONITOR_DEVICES", "MIG_MONITOR_DEVICES"))


class Decision(Value):
    """request: what is to be done for the container; trace: why; mode: "legacy", "jit-cdi", "cdi" or "csv" (auto
    resolved, but for the platform, which only the caller can look at); kept: the driver capabilities whose files stay
    of those that an engine has put in, () where it hasn't."""

    request: Request
    trace: tuple[Rule, ...]
    mode: str
    kept: tuple[str, ...] = ()

    def denied(self) -> bool:
        """Whether the policy keeps from the container what it asks for, or what it was given can't be read."""
        return any(rule.name == "policy" and rule.level == "warning" for rule in self.trace)


def needs_ledger(container: Container, settings: Settings) -> bool:
    """Whether `decide` will look at the kubelet's ledger."""
    return container.type != "sandbox" and not policy.believed(container, settings)


def decide(
    container: Container,
    settings: Settings,
    ledger: policy.Ledger | None = None,
    *,
    hook: bool = False,
    given: bool = False,
) -> Decision:
    """Decides for one container. Raises RequestError, Refused, ConfigError.

    hook: the caller is the prestart hook, for which mode auto means legacy, and which knows no annotations. given: an
    engine has put GPUs in already, from a CDI specification, which has the files of every capability.
    """
    trace = Trace()
    if container.type == "sandbox":
        trace.note("sandbox", container.type, "annotations", "a Pod's pause container: nothing to do")
        return Decision(Request(reason="a Pod's pause container"), trace.rules(), settings.mode)
    wish, mode = _wish(container, settings, trace, hook)
    wish, reason = _after_policy(wish, container, settings, ledger, trace)
    if not wish.source:
        none = Request(variable=wish.variable, privileged=container.privileged, reason=reason)
        kept = capabilities(container, settings, trace, strict=False) if given and mode != "legacy" else ()
        return Decision(none, trace.rules(), mode, kept)
    if wish.source == "cdi-annotations":
        tell_hidden(container, settings, wish.devices, trace)
    own_word = wish.source != "ledger"
    if not own_word and settings.mode == "auto":
        mode = _default_mode(hook)  # the names that chose another were the container's, and don't count
    word = container if own_word else policy.answered(container, ledger)  # on whatever isn't a GPU
    mig_config, mig_monitor = _mig(word, container, trace, strict=mode == "legacy")
    request = Request(
        source=wish.source,
        devices=wish.devices,
        variable=wish.variable,
        capabilities=capabilities(container, settings, trace, strict=mode == "legacy"),
        requirements=collect(container, settings, trace, strict=mode in ("legacy", "csv")),
        imex=channels(word, settings, trace),
        gated=_gated(word, trace),
        mig_config=mig_config,
        mig_monitor=mig_monitor,
        privileged=container.privileged,
        reason=reason,
    )
    return Decision(request, trace.rules(), mode, request.capabilities if given and mode != "legacy" else ())


def _wish(container: Container, settings: Settings, trace: Trace, hook: bool) -> tuple[Asked, str]:
    """What is asked for and the mode. In mode auto CDI names decide the mode, and only mode cdi reads annotations."""
    default = _default_mode(hook)
    mode, where = settings.mode, settings.where("mode")
    if mode != "auto":
        trace.note("mode", mode, where, f"mode {mode}")
        return asked(container, settings, trace, annotations=mode == "cdi" and not hook), mode
    if not hook and any(key.startswith(settings.cdi_annotation_prefixes) for key, _ in container.annotations):
        attempt = Trace()
        wish = asked(container, settings, attempt, annotations=True)
        if wish.devices and all(map(is_qualified, wish.devices)):
            trace.extend(attempt)
            trace.note("mode", "auto", where, "every device is a CDI name: mode cdi")
            return wish, "cdi"
        trace.note("CDI annotation", "present", "annotations", f"not read in mode {default}")
    wish = asked(container, settings, trace, annotations=False)
    if wish.devices and all(map(is_qualified, wish.devices)):
        trace.note("mode", "auto", where, "every device is a CDI name: mode cdi")
        return wish, "cdi"
    trace.note("mode", "auto", where, f"mode {default}")
    return wish, default


def _default_mode(hook: bool) -> str:
    return "legacy" if hook else "jit-cdi"


def _after_policy(
    wish: Asked, container: Container, settings: Settings, ledger: policy.Ledger | None, trace: Trace
) -> tuple[Asked, str]:
    """What of a wish the policy lets through, and the reason in one line."""
    what = _described(wish)
    where = settings.where("policy_grants")
    if policy.believed(container, settings):
        if settings.policy_grants != "env":
            pod = f"{container.pod_namespace}/{container.pod_name}"
            trace.note("policy", "kubelet", where, f"{pod} is trusted ({settings.where('policy_trusted')})")
        else:
            trace.note("policy", "env", where, "the container's word counts" if wish.source else "nothing to grant")
        return wish, what
    if wish.void:
        trace.note("policy", "kubelet", where, "left alone: served already, or wants nothing")
        return wish, what
    ledger = ledger or policy.Ledger(settings.policy_checkpoint, trouble="wasn't read")
    devices, why_not = policy.granted(container, ledger)
    _refuse_beyond(wish, container, settings, ledger)
    if not devices:
        tell = trace.warn if wish.source or ledger.trouble else trace.note
        tell("policy", "kubelet", f"ledger {ledger.path}", f"no GPU: {why_not}")
        outcome = f"asked for {what} but {why_not}" if wish.source else why_not
        return Asked("", (), wish.variable), outcome
    trace.note("policy", "kubelet", f"ledger {ledger.path}", f"granted {','.join(devices)}; asked for: {what}")
    return Asked("ledger", devices, wish.variable), f"the kubelet allocated {','.join(devices)}"


def _refuse_beyond(wish: Asked, container: Container, settings: Settings, ledger: policy.Ledger) -> None:
    if settings.policy_untrusted_env != "deny" or wish.source in ("", "legacy-image") or not wish.devices:
        return
    value = container.variable(wish.variable) if wish.variable else ""
    if policy.beyond(wish.devices, wish.variable, value or "", container, ledger):
        name = "/".join(filter(None, (container.pod_namespace, container.pod_name, container.name)))
        raise Refused(
            f"container {name or 'of no known Pod'} asks for GPUs by {wish.source}",
            seen=",".join(wish.devices),
            wanted="no more than the kubelet allocated",
            remedy="ask for nvidia.com/gpu in resources.limits, or add the Pod to gpulet.policy.trusted",
        )


def _described(wish: Asked) -> str:
    if not wish.source:
        return "asks for no GPU"
    devices = cut(",".join(wish.devices)) or "driver files and no GPU"
    if wish.source == "legacy-image":
        return "all GPUs, because the image is a legacy CUDA image (CUDA_VERSION and no NVIDIA_REQUIRE_CUDA)"
    return f"{devices} by {wish.variable if wish.source == 'environment' else wish.source}"


def _gated(container: Container, trace: Trace) -> tuple[str, ...]:
    found = []
    for variable, name in GATED:
        value = container.variable(variable)
        if value is not None:
            on = value == "enabled"
            trace.note(name, f"{variable}={value}", container.position(variable), "on" if on else "not `enabled`: off")
            if on:
                found.append(name)
    return tuple(found)


def _mig(word: Container, container: Container, trace: Trace, *, strict: bool) -> tuple[str, str]:
    """MIG configuration and monitoring: for privileged containers alone, whoever asks for it on their behalf."""
    values = []
    for variable, short in MIG:
        value = word.variable(variable) or ""
        if value and not container.privileged:
            if strict:
                raise RequestError(
                    f"cannot set {short} in non privileged container",
                    seen=f"{variable}={value}",
                    remedy=f"make the container privileged or unset {variable}",
                )
            trace.warn("MIG", f"{variable}={value}", word.position(variable), "ignored: not privileged")
            value = ""
        values.append(value)
    return values[0], values[1]
