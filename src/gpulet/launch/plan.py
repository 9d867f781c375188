"""What the runtime does to one bundle, worked out before anything is touched: the new config.json and the work in the
container's root file system. `gpulet explain` prints what this makes.

    legacy           a prestart hook that calls the container CLI on the live container
    cdi              the edits of CDI specifications in the spec folders
    jit-cdi (auto)   the Injection that build.py makes from this node's facts
    csv              the files that a Tegra's lists name (auto, on such a node)

In the CDI modes the hooks that engines took from CDI specifications are taken over: their work is done beneath the root
before the container exists, and they are not run.
"""

from __future__ import annotations

import os

from gpulet.errors import EngineError
from gpulet.injection import oci
from gpulet.injection.model import DeviceNode, Hook, Injection, Mount, RootfsWork
from gpulet.launch import programs
from gpulet.launch.memory import Memory
from gpulet.request import bundle, policy
from gpulet.request.decide import Decision, decide, needs_ledger
from gpulet.settings import CUDA_VISIBLE_DEVICES, DRIVER_CAPABILITIES, Settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpulet.launch.beside import Laid
    from gpulet.request.bundle import Container
    from gpulet.request.model import Request

HOOK_ENV = ("GPULET_HOOK=1",)  # never empty: runc would hand the container's environment to the hook


class Plan:
    """config: the new config.json; injection: what was put in; work: what is to be done beneath the root; mounts:
    those that bring libraries, for the loader's cache; laid: what is to be put into the state folder; memory: where the
    answer comes from or is to be remembered (see memory.py)."""

    def __init__(
        self,
        config: dict[str, Any],
        injection: Injection,
        work: RootfsWork,
        mounts: tuple[Mount, ...] = (),
        laid: tuple[Laid, ...] = (),
    ) -> None:
        self.config = config
        self.injection = injection
        self.work = work
        self.mounts = mounts
        self.laid = laid
        self.memory: Memory | None = None


class Bundle:
    """One bundle as it is: the path of its config.json, what stands there, the container, and the decision on it."""

    def __init__(self, path: str, settings: Settings) -> None:
        """Reads and decides. Raises BundleError, RequestError, Refused, ConfigError."""
        self.path = path
        self.config = bundle.read_config(path)
        container = bundle.Container.from_config(self.config, os.path.dirname(path))
        if _prestart(self.config):
            from gpulet.launch import legacy

            container = legacy.original(self.config, container)
        self.container = container
        asks_kubelet = needs_ledger(self.container, settings)
        ledger = policy.read_ledger(settings.policy_checkpoint) if asks_kubelet else None
        self.decision = decide(self.container, settings, ledger, given=_is_given(self.config))

    def plan(self, settings: Settings, *, aside: bool = True) -> Plan:
        """What is to be done to it. Raises what `make` raises."""
        config = self.config
        if settings.policy_grants == "kubelet" and config.get("hooks"):
            from gpulet.launch import legacy

            config = legacy.without_credulous(config)
        if self.container.type == "sandbox":
            return Plan(config, Injection(), RootfsWork())
        return make(config, self.container, self.decision, settings, aside=aside)


def make(
    config: dict[str, Any], container: Container, decision: Decision, settings: Settings, *, aside: bool = True
) -> Plan:
    """Works out the plan for a decision. aside: whether things may be laid in the state folder (see beside.py). Raises
    CdiError, NodeError, RequestError, ConfigError."""
    if decision.mode == "legacy":
        return _by_prestart_hook(config, container, decision.request, settings)
    return _direct(config, container, decision, settings, aside)


def _by_prestart_hook(config: dict[str, Any], container: Container, request: Request, settings: Settings) -> Plan:
    from gpulet.launch import legacy

    if not request:
        return Plan(config, Injection(), RootfsWork())
    extra = legacy.beyond_the_cli(request, settings)
    there, config = legacy.has_hook(config), oci.apply(config, extra)  # an engine may have put the hook in already
    if not there:
        config, hook = legacy.with_hook(config, container, request, settings)
        extra = extra.replace(hooks=(hook,))
    plan = Plan(config, extra, extra.rootfs)
    return by_hook(plan) if covered(plan, container.root) else plan


def _direct(config: dict[str, Any], container: Container, decision: Decision, settings: Settings, aside: bool) -> Plan:
    request, memory = decision.request, None
    injection = Injection()
    if request:
        injection, memory = _answer(decision, container, settings)
        config = oci.apply(config, injection)
        if CUDA_VISIBLE_DEVICES in settings.visible_devices_envvars:
            from gpulet.request import cuda

            if cuda.speaks_cuda(settings, container):
                config = oci.put_env(config, CUDA_VISIBLE_DEVICES, cuda.cuda_value(request))
    config, work = _take_over(config, injection.rootfs)
    config = _bind_taken(config, settings.driver_root())
    if decision.kept and settings.capabilities != "all" and not set(DRIVER_CAPABILITIES) <= set(decision.kept):
        from gpulet.injection.narrow import narrow_config

        config, work = narrow_config(config, work, decision.kept)
    plan = Plan(config, injection, work, _libraries(config, injection, work))
    plan.memory = memory
    if aside and any(link.path.startswith("/dev/") for link in work.links):
        _lay_device_links(plan, settings.state_dir)
    if covered(plan, container.root):
        return by_hook(plan)
    if work.freeze_device_nodes:
        _freeze(plan, container, settings.state_dir if aside else "")
    return plan


def _bind_taken(config: dict[str, Any], root: str) -> dict[str, Any]:
    """The same, in a user namespace, with the nodes bound that an engine took from a specification and that lie beneath
    the driver root alone: config.json doesn't say where a node is on the host."""
    if not oci.has_user_namespace(config):
        return config
    from gpulet.node.devices import char_device, choose_dev_root

    root, found = choose_dev_root(root), []
    for entry in config["linux"].get("devices") or ():
        path = str(entry.get("path"))
        node = None if os.path.exists(path) else char_device(root, path)
        if node and (node.major, node.minor) == (entry.get("major"), entry.get("minor")):
            found.append(DeviceNode(path, node.host_path, node.major, node.minor))
    return oci.bind_nodes(config, found)


def _answer(decision: Decision, container: Container, settings: Settings) -> tuple[Injection, Memory]:
    """The Injection for a request, remembered or worked out."""
    memory = Memory(decision.request, decision.mode, settings).recall()
    if memory.found is not None:
        return memory.found, memory
    from gpulet.launch import sources

    found = sources.find(decision.request, decision.mode, container, settings)
    memory.assumed, memory.lacking, memory.unready = found.assumed, found.lacking, found.unready
    memory.watch(found.injection, found.looked)
    return found.injection, memory


def _lay_device_links(plan: Plan, folder: str) -> None:
    from gpulet.launch import beside

    plan.work, laid, mounts = beside.device_links(plan.config, plan.work, folder)
    plan.laid += laid
    plan.config = oci.apply(plan.config, Injection(mounts=mounts))


# Where engines mount as a rule, and no driver's file goes.
_ELSEWHERE = ("/proc/", "/sys/", "/dev/", "/run/", "/var/run/", "/etc/hosts/", "/etc/hostname/", "/etc/resolv.conf/")


def covered(plan: Plan, root: str) -> str:
    """The first mount that would hide what is written beneath the root now, "" for none. root: the container's, whose
    links may lead a mount's destination elsewhere."""
    work = plan.work
    if work.empty():
        return ""
    places = [link.path for link in work.links] + [f"{folder}/soname" for folder in work.folders]
    places += ["/etc/ld.so.cache", "/etc/ld.so.conf.d/conf"] if work.folders or work.host_driver else []
    places += ["/etc/nvidia/profile"] if work.profile_minors else []
    hidden_by = with_above(places)
    destinations = [oci.place(entry.get("destination")) for entry in plan.config.get("mounts") or ()]
    found = next((place for place in destinations if place in hidden_by), "")
    if found:
        return found
    ours = {mount.path for mount in plan.injection.mounts}
    others = [place for place in destinations if place not in ours and not f"{place}/".startswith(_ELSEWHERE)]
    others = [place for place in others if place.rpartition("/")[0] not in work.folders]
    if not others:
        return ""
    from gpulet.launch import aliases

    return aliases.first_within(root, others, places)


def with_above(places: Iterable[str]) -> set[str]:
    """Paths and every folder above them."""
    found: set[str] = set()
    for place in places:
        while place and place not in found:
            found.add(place)
            place = place.rpartition("/")[0]
    return found


def by_hook(plan: Plan) -> Plan:
    """The same plan with the work left to one hook, which runs when the container's mounts are there: for roots whose
    files lie under another mount, or that can't be written from here (another user namespace's). Raises EngineError."""
    from gpulet.injection.cdi_hooks import hook_args

    program = programs.cdi_hook()
    if not program:
        raise EngineError(
            "the container's root can't be prepared from outside",
            wanted="gpulet-cdi-hook beside gpulet-runtime or in PATH",
            remedy="write the launchers with: gpulet install",
        )
    args = hook_args(os.path.basename(program), plan.work, profile=bool(plan.work.profile_minors))
    hooked = Plan(plan.config, plan.injection, RootfsWork(), laid=plan.laid)
    hooked.config = oci.add_hook(plan.config, Hook("createContainer", program, tuple(args), HOOK_ENV))
    hooked.memory = plan.memory
    return hooked


def _take_over(config: dict[str, Any], work: RootfsWork) -> tuple[dict[str, Any], RootfsWork]:
    """The config.json without the hooks that put GPUs in and those whose work can be done now, and that work added."""
    if not config.get("hooks"):
        return config, work
    from gpulet.injection import cdi_hooks
    from gpulet.launch import legacy

    config = legacy.without_ours(config)
    names = [str(node.get("path")) for node in (config.get("linux") or {}).get("devices") or ()]
    minors = [number for number in map(cdi_hooks.gpu_number, names) if number >= 0]
    taken, remaining = cdi_hooks.take_over(config.get("hooks") or {}, minors=minors, nodes=names)
    config = oci.with_hooks(config, remaining)
    return (config if taken.empty() else oci.with_types(config)), cdi_hooks.join([work, taken])


def _freeze(plan: Plan, container: Container, folder: str) -> None:
    """Hiding the driver's ModifyDeviceFiles needs a mount inside the container's /proc, which low-level runtimes refuse
    in a spec: a hook does it, on nodes where the driver makes device nodes at all, but for user namespaces, in which
    nobody can make one. The host's mount(8) does it in a tenth of the time that a program of ours takes to start."""
    if oci.has_user_namespace(plan.config):
        plan.work = plan.work.replace(freeze_device_nodes=False)
        return
    from gpulet.injection import frozen
    from gpulet.launch import beside

    params = frozen.params()
    if params is None:
        return
    mount, ours = beside.mount_program() if folder else "", programs.cdi_hook()
    if mount:
        source = beside.named(folder, "params", params)
        plan.laid += (beside.Laid(source, params),)
        hooks = beside.freeze(container.root, source, mount, frozen.PARAMS)
    elif ours:
        args = (os.path.basename(ours), "disable-device-node-modification")
        hooks = (Hook("createContainer", ours, args, HOOK_ENV),)
    else:
        return
    plan.work = plan.work.replace(freeze_device_nodes=False)
    for hook in hooks:
        plan.config = oci.add_hook(plan.config, hook)


def _is_given(config: dict[str, Any]) -> bool:
    """Whether an engine has put GPUs in already, from a CDI specification."""
    if not config.get("hooks"):
        return False
    from gpulet.injection import cdi_hooks

    return cdi_hooks.from_specification(config["hooks"])


def _prestart(config: dict[str, Any]) -> list[dict[str, Any]]:
    return (config.get("hooks") or {}).get("prestart") or []


def _libraries(config: dict[str, Any], injection: Injection, work: RootfsWork) -> tuple[Mount, ...]:
    """The mounts that bring libraries into the folders of the loader's cache: the injection's, and those that an engine
    has put into config.json already."""
    known = {mount.path: mount for mount in injection.mounts if mount.kind in ("library", "library32")}
    for entry in config.get("mounts") or [] if work.folders else []:
        path = str(entry.get("destination") or "")
        folder, _, name = path.rpartition("/")
        if path not in known and folder in work.folders and name.startswith("lib") and ".so" in name:
            known[path] = Mount(str(entry.get("source") or ""), path, kind="library")
    return tuple(known.values())
