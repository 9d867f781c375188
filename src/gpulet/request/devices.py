"""Which devices a container asks for, and through what: the order of preference.

    1. volume mounts: /dev/null bound at /var/run/nvidia-container-devices/<id> (where accepted)
    2. CDI names in annotations (where that mode is on)
    3. the environment: swarm resources, else the configured names, by default NVIDIA_VISIBLE_DEVICES
    4. a legacy image (CUDA_VERSION set, no NVIDIA_REQUIRE_CUDA) and none of those variables set: all
    5. nothing: the container is left alone

The first that names something decides. `all` among others means all, `none` driver files without a GPU (of the two the
first counts), `void` anywhere in a list, or an empty one, nothing at all. Repeated ids count once.

Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.errors import RequestError
from gpulet.request.bundle import Container
from gpulet.request.trace import Trace
from gpulet.settings import VISIBLE_DEVICES, Settings
from gpulet.value import Value

MOUNT_FOLDER = "/var/run/nvidia-container-devices"


class Asked(Value):
    """source as in Request; devices: () with a source means "none"; variable: the environment variable concerned;
    void: whether the container was said to be left alone, or has been served already."""

    source: str = ""
    devices: tuple[str, ...] = ()
    variable: str = ""
    void: bool = False


def asked(container: Container, settings: Settings, trace: Trace, *, annotations: bool) -> Asked:
    """What the container asks for, before policy. annotations: whether CDI names in annotations count."""
    variable = _variable(container, settings)
    devices = from_mounts(container, settings, trace)[0]
    if devices:
        return Asked("volume-mounts", devices, variable)
    if annotations:
        devices = from_annotations(container, settings, trace)
        if devices:
            return Asked("cdi-annotations", devices, variable)
    return _from_environment(container, settings, trace, variable)


def from_mounts(container: Container, settings: Settings, trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Device ids (CDI names included) and IMEX channels asked for by mounts."""
    devices, channels = [], []
    for source, destination in container.mounts:
        # the folder itself or a name that merely begins like it (the peer takes ...-devicesX/0) asks for nothing
        where = os.path.normpath(destination)
        if not where.startswith(MOUNT_FOLDER + "/") or os.path.normpath(source) != "/dev/null":
            continue
        name = where[len(MOUNT_FOLDER) + 1 :]
        if not settings.accept_volume_mounts:
            setting = settings.where("accept_volume_mounts")
            trace.note("volume mounts", name, f"mount {destination}", f"not accepted ({setting})")
            continue
        trace.note("volume mounts", name, f"mount {destination}", "accepted")
        if name.startswith("imex/"):
            channels.append(name[5:])
        elif name.startswith("cdi/"):
            qualified = _qualified_from_path(name[4:])
            if qualified:
                devices.append(qualified)
            else:
                trace.warn("volume mounts", name, f"mount {destination}", "ignored: no CDI name vendor/class/device")
        else:
            devices.append(name)
    return unique(devices), unique(channels)


def from_annotations(container: Container, settings: Settings, trace: Trace) -> tuple[str, ...]:
    """CDI names in annotations with a configured prefix, by key; the parts of a value stand between commas."""
    names = []
    for key, value in _annotations(container, settings):
        trace.note("CDI annotation", value, f"annotation {key}", "accepted")
        names += _split(value)
    return unique(names)


def _annotations(container: Container, settings: Settings) -> list[tuple[str, str]]:
    prefixes = tuple(filter(None, settings.cdi_annotation_prefixes))
    return [(key, value) for key, value in container.annotations if key.startswith(prefixes)]


def tell_hidden(container: Container, settings: Settings, names: tuple[str, ...], trace: Trace) -> None:
    """A warning where names in annotations, none of them an NVIDIA GPU's, stand over a request for GPUs by environment
    or image: the annotation may be a network card's, whose operator knows nothing of GPUs."""
    if any(_names_gpu(name, settings) for name in names):
        return
    try:
        hidden = _from_environment(container, settings, Trace(), _variable(container, settings))
    except RequestError:  # it means mounts, which don't count here
        return
    if hidden.devices:
        keys = [key for key, value in _annotations(container, settings) if _split(value)]
        variable = hidden.variable or "CUDA_VERSION"
        text = f"no NVIDIA GPU, and it stands over {variable}={container.variable(variable)}; name the GPU in it too"
        trace.warn("CDI annotation", ",".join(names), f"annotation {', '.join(keys)}", text)


def _names_gpu(name: str, settings: Settings) -> bool:
    kind, equals, _ = name.partition("=")
    vendor, _, class_name = kind.partition("/")
    ours = f".{vendor}".endswith(".nvidia.com") and class_name.startswith(("gpu", "mig"))
    return not equals or kind == settings.cdi_default_kind or ours


def _variable(container: Container, settings: Settings) -> str:
    """The variable that speaks for the container: the first configured one that is set."""
    names = (*settings.swarm_variables(), *settings.visible_devices_envvars)
    return next((name for name in names if container.variable(name) is not None), "")


def _from_environment(container: Container, settings: Settings, trace: Trace, variable: str) -> Asked:
    swarm = [name for name in settings.swarm_variables() if container.variable(name) is not None]
    misnamed = "" if swarm else _misnamed_resource(container, settings)
    if misnamed:
        wanted = ",".join(settings.swarm_variables())
        text = (
            f"swarm assigned GPUs under a name that swarm-resource ({wanted}) doesn't have: none given, rather than all"
        )
        trace.warn("swarm resource", misnamed, container.position(misnamed), text)
        return Asked("", (), misnamed)
    names = swarm or [name for name in settings.visible_devices_envvars if container.variable(name) is not None]
    if not names:
        return _from_legacy_image(container, settings, trace)
    devices: list[str] = []
    for name in names:
        value = container.variable(name) or ""
        devices += _split(value)
        trace.note("environment", f"{name}={value}", container.position(name), "read")
    # Whoever has injected before (a CDI engine, this runtime) leaves void in the field's own variable.
    served = not swarm and VISIBLE_DEVICES not in names and container.variable(VISIBLE_DEVICES) == "void"
    if served or "void" in devices or not devices:
        where = container.position(VISIBLE_DEVICES if served else variable)
        trace.note("environment", "void" if served or devices else "empty", where, "nothing asked for")
        return Asked("", (), variable, void=True)
    if not _believed(container, settings, trace, ", ".join(names)):
        return Asked("", (), variable)
    # What the device plugin says where its mounts name the devices, and no device's name; the ledger names them too.
    if MOUNT_FOLDER in devices and settings.policy_grants == "env":
        raise RequestError(
            "the devices are named by mounts, which don't count here",
            seen=f"{', '.join(names)}={MOUNT_FOLDER}",
            remedy="set accept-nvidia-visible-devices-as-volume-mounts = true in config.toml, or let the device plugin "
            "name them otherwise (--device-list-strategy)",
        )
    word = next((device for device in devices if device in ("all", "none")), "")
    chosen = {"all": ("all",), "none": ()}.get(word, unique(devices))
    return Asked("environment", chosen, variable)


def _misnamed_resource(container: Container, settings: Settings) -> str:
    """A variable by which swarm has assigned GPUs, where one of another name is configured: DOCKER_RESOURCE_<KIND>,
    with the kind as the engine's node-generic-resources spell it (NVIDIA-GPU for GPU is the usual mistake)."""
    if not settings.swarm_variables():
        return ""
    return next((name for name, _ in container.env if name.startswith("DOCKER_RESOURCE_") and "GPU" in name), "")


def _from_legacy_image(container: Container, settings: Settings, trace: Trace) -> Asked:
    names = ", ".join(settings.visible_devices_envvars)
    if not is_legacy_image(container):
        trace.note("environment", "unset", "process.env", f"none of {names} is set: nothing asked for")
        return Asked()
    version = f"CUDA_VERSION={container.variable('CUDA_VERSION')}"
    trace.warn(
        "legacy image",
        version,
        container.position("CUDA_VERSION"),
        f"CUDA_VERSION without NVIDIA_REQUIRE_CUDA and none of {names}: the image counts as asking for all GPUs",
    )
    if not _believed(container, settings, trace, "legacy image"):
        return Asked()
    return Asked("legacy-image", ("all",))


def _believed(container: Container, settings: Settings, trace: Trace, what: str) -> bool:
    """Whether a request by environment counts for this container."""
    if container.privileged or settings.accept_envvar_unprivileged:
        return True
    where = settings.where("accept_envvar_unprivileged")
    trace.warn("unprivileged environment", what, where, "ignored: the container isn't privileged")
    return False


def is_legacy_image(container: Container) -> bool:
    """Whether the image is of the kind that spoke through CUDA_VERSION alone (before 2018's NVIDIA_REQUIRE_CUDA)."""
    return bool(container.variable("CUDA_VERSION")) and not container.variable("NVIDIA_REQUIRE_CUDA")


def unique(items: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Each item once, where it stood first. (The peer turns the earlier one of a pair into an empty id.)"""
    return tuple(dict.fromkeys(items))


def _split(value: str) -> list[str]:
    return [part for part in map(str.strip, value.split(",")) if part]


def _qualified_from_path(rest: str) -> str:
    """`vendor/class/device`, or a CDI name as it stands, as a CDI name; "" where it is neither."""
    if is_qualified(rest):
        return rest
    parts = rest.split("/", 2)
    name = f"{parts[0]}/{parts[1]}={parts[2]}" if len(parts) == 3 else ""
    return name if is_qualified(name) else ""


def is_qualified(name: str) -> bool:
    """Whether a name has CDI's form vendor/class=device (CDI specification, kinds and device names)."""
    kind, equals, device = name.partition("=")
    vendor, slash, class_name = kind.partition("/")
    if not (equals and slash):
        return False
    return (
        _label(vendor, "_-.")
        and _label(class_name, "_-.")
        and vendor[0].isalpha()
        and class_name[0].isalpha()
        and _label(device, "_-.:")
    )


def _label(text: str, inner: str) -> bool:
    if not text or not text.isascii() or not (text[0].isalnum() and text[-1].isalnum()):
        return False
    return all(letter.isalnum() or letter in inner for letter in text)
