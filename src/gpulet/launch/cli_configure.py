"""gpulet-container-cli configure: an injection for a container that has its namespaces, carried out in it."""

from __future__ import annotations

import os

from gpulet.errors import GpuletError, InjectionError, NodeError, RequestError, StepFailed
from gpulet.injection.build import Layout, build
from gpulet.injection.model import Injection, Mount, RootfsWork
from gpulet.launch.cli_report import (
    CAPABILITIES as CAPABILITIES_FOLDER,
)
from gpulet.launch.cli_report import (
    cap_minors,
    channels,
    check_mig,
    driver_files,
    dropped,
    mig_capable,
    node_facts,
    selected,
)
from gpulet.launch.container_cli import CAPABILITIES, Failure
from gpulet.node import procfs
from gpulet.node.devices import CAPS_FOLDER
from gpulet.node.paths import below
from gpulet.request.model import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulet.injection.beneath import Root
    from gpulet.injection.confine import Program
    from gpulet.launch.container_cli import Call
    from gpulet.node.gpu import NodeFacts

MOST_REQUIREMENTS = 32
# option -> its values, the default first
CHOICES = {
    "cuda-compat-mode": ("mount", "ldconfig", "disabled"),
    "loader-cache": ("native", "ldconfig"),
    "dry-run": ("text", "json"),
}
TRIPLETS = {"x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"), "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf")}


def run(call: Call) -> int:
    """Runs the command."""
    rootfs = call.words[0]
    if not rootfs.startswith("/") or not os.path.normpath(rootfs).strip("/"):  # "/." would be the host's own, too
        raise Failure("input error", "invalid rootfs directory")
    pid = _pid(call)
    request = request_of(call)
    layout = layout_of(pid, rootfs)
    injection, rules = injection_of(call, request, layout)
    if call.given("dry-run"):
        _tell(call, injection, rules)
        return 0
    from gpulet.injection import live

    ldconfig = _loader_program(call)
    log = _open_log(call)
    try:
        done = live.apply(
            injection,
            pid,
            rootfs,
            cgroups=not call.given("no-cgroups"),
            devbind=not call.given("no-devbind"),
            driver_root=call.last("root", "/"),
            rules=rules,
            ldconfig=ldconfig,
            pivot=not call.given("no-pivot"),
            fork=not call.own_process,
        )
    except InjectionError as error:
        raise Failure(_category(error), error) from error
    _write_log(log, (*call.told, *done))
    return 0


def _tell(call: Call, injection: Injection, rules: tuple[tuple[int, int], ...]) -> None:
    from gpulet.launch.start import put

    if call.last("dry-run") == "json":
        from gpulet import codec

        put(f"{codec.dumps(injection.to_data()).decode()}\n")
        return
    from gpulet.launch import cli_plan

    cgroups, devbind = not call.given("no-cgroups"), not call.given("no-devbind")
    put("".join(f"{line}\n" for line in cli_plan.lines(injection, rules, cgroups=cgroups, devbind=devbind)))


def _category(error: InjectionError) -> str:
    step = error.step if isinstance(error, StepFailed) else ""
    if step in ("open namespace", "join", "open root file system"):
        return "container error"
    loader = step in ("confine", "process") or getattr(error, "target", "").startswith("/etc/ld")
    return "ldcache error" if loader else "mount error"


def _loader_program(call: Call) -> Program | None:
    """What is to write the loader's cache; None where it is merged directly. Raises Failure."""
    if call.last("loader-cache", "native") == "native":
        return None
    from gpulet.injection.confine import Program, open_host_program

    path = call.last("ldconfig")
    if not path.startswith("@"):
        return Program(path)
    plain = path[1:].removesuffix(".real")
    for name in (f"{plain}.real", plain):  # Ubuntu's ldconfig is a script, and the program stands beside it
        try:
            return open_host_program(name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Failure("ldcache error", f"open failed: {name}: {(error.strerror or '').lower()}") from error
    raise Failure("ldcache error", f"open failed: {path[1:]}: no such file or directory")


def _pid(call: Call) -> int:
    """The container's process; the one that started us where none is given ("standalone")."""
    text = call.last("pid", "0")
    try:
        number = int(text)
    except ValueError:
        raise Failure("input error", "parse pid failed: invalid argument") from None
    if number >= 1 << 31:
        raise Failure("input error", "parse pid failed: numerical result out of range")
    return number if number > 0 else os.getppid()


def request_of(call: Call) -> Request:
    """What the options ask for. Raises Failure."""
    requirements = tuple(value or "" for name, value in call.options if name == "require")
    if len(requirements) > MOST_REQUIREMENTS:
        raise Failure("input error", "too many requirements")
    for option, choices in CHOICES.items():
        value = call.last(option) or choices[0]
        if value not in choices:
            raise Failure("input error", f"invalid {option}: {value} (one of {', '.join(choices)})")
    return Request(
        "environment",
        tuple(call.joined("device")),
        capabilities=tuple(sorted(name for name in CAPABILITIES if call.given(name))),
        requirements=requirements,
        imex=tuple(channels(call)),
        mig_config=call.last("mig-config"),
        mig_monitor=call.last("mig-monitor"),
        reason="gpulet-container-cli configure",
    )


def layout_of(pid: int, rootfs: str) -> Layout:
    """Where the container's distribution looks for libraries and programs."""
    from gpulet.injection.beneath import Root

    try:
        os.stat(f"/proc/{pid}/root/")
    except OSError as error:
        text = (error.strerror or "").lower()
        raise Failure("container error", f"open failed: /proc/{pid}/root/: {text}") from error
    try:
        with Root(f"/proc/{pid}/root{rootfs}") as root:
            return _layout(root)
    except StepFailed as error:
        raise Failure("container error", error) from error


def _layout(root: Root) -> Layout:
    machine = os.uname().machine
    triplet, triplet32 = TRIPLETS.get(machine, (f"{machine}-linux-gnu", ""))
    if root.exists("/etc/debian_version"):
        return Layout(f"/usr/lib/{triplet}", f"/usr/lib/{triplet32}" if triplet32 else "", "/usr/bin")
    narrow = "/usr/lib32"
    if not root.exists(narrow) and root.exists("/usr/lib") and not _same(root, "/usr/lib", "/usr/lib64"):
        narrow = "/usr/lib"
    return Layout("/usr/lib64", narrow, "/usr/bin")


def _same(root: Root, one: str, other: str) -> bool:
    if not root.exists(other):
        return False
    first, second = root.open(one, os.O_PATH), root.open(other, os.O_PATH)
    try:
        return os.path.sameopenfile(first, second)
    finally:
        os.close(first)
        os.close(second)


def injection_of(call: Call, request: Request, layout: Layout) -> tuple[Injection, tuple[tuple[int, int], ...]]:
    """The injection for a request, and the devices to allow besides its own. Raises Failure."""
    root = call.last("root", "/")
    facts = node_facts(call, request.devices, nvml=_asks_for_arch(request))
    selection = selected(facts, list(request.devices))
    check_mig(call, selection, list(request.devices))
    _require(request, facts, call)
    if not facts.gpus:
        request = request.replace(devices=())
    try:
        files = driver_files(root, call.last("ldcache"), facts.driver, _not_wanted(request.capabilities))
        injection = build(facts, files, request, layout=layout)
    except Failure:
        raise
    except NodeError as error:
        raise Failure("device error", error) from error
    except GpuletError as error:
        raise Failure("detection error", error) from error
    work: RootfsWork = injection.rootfs
    if call.given("no-cntlibs") or call.last("cuda-compat-mode") == "disabled":
        work = work.replace(host_driver="", host_cuda="")
    mounts = tuple(mount for mount in injection.mounts if not dropped(call, mount.path, mount.kind))
    injection = injection.replace(mounts=mounts, rootfs=work, env=(), gids=())
    if (request.mig_config or request.mig_monitor) and (gpus := mig_capable(root, selection)):
        return _managing(injection, root, facts, [minor for gpu in gpus for minor in cap_minors(root, gpu)])
    return injection, ()


def _not_wanted(capabilities: tuple[str, ...]) -> tuple[str, ...]:
    """The kinds of driver files that no capability asked for lets in: looking for them costs time."""
    graphics = () if {"graphics", "display"} & set(capabilities) else ("config", "xorg")
    return (*graphics, *(() if "compat32" in capabilities else ("library32",)))


def _managing(
    injection: Injection, root: str, facts: NodeFacts, minors: list[int]
) -> tuple[Injection, tuple[tuple[int, int], ...]]:
    """For who partitions GPUs: the capabilities and their nodes as whole folders, as instances come and go."""
    proc = below(procfs.proc_root(root), CAPABILITIES_FOLDER)
    mounts = [Mount(proc, CAPABILITIES_FOLDER, ("ro", "nosuid", "nodev", "noexec"), "proc")]
    caps = facts.major("nvidia-caps")
    folder = below(facts.dev_root, CAPS_FOLDER)
    inside = tuple(node for node in injection.devices if node.path.startswith(f"{CAPS_FOLDER}/"))
    if caps < 0 or not os.path.isdir(folder):
        return injection.replace(mounts=(*injection.mounts, *mounts), proc_mig=()), ()
    mounts.append(Mount(folder, CAPS_FOLDER, ("nosuid", "noexec"), "device"))
    others = tuple(node for node in injection.devices if node not in inside)
    rules = (*((node.major, node.minor) for node in inside), *((caps, minor) for minor in minors))
    return injection.replace(devices=others, mounts=(*injection.mounts, *mounts), proc_mig=()), rules


def _asks_for_arch(request: Request) -> bool:
    """Whether a requirement is about what /proc doesn't tell, of a device that is selected."""
    texts = [text.lower() for text in request.requirements]
    return bool(request.devices) and any("arch" in text or "brand" in text for text in texts)


def _require(request: Request, facts: NodeFacts, call: Call) -> None:
    if not request.requirements:
        return
    from gpulet.request import requirements

    selection = selected(facts, list(request.devices))
    gpus = list(selection.gpus) + [gpu for gpu in facts.gpus if gpu.index in {mig.gpu for mig in selection.migs}]
    node = requirements.Subject(facts.cuda or None, facts.driver or None)
    subjects = [node.replace(arch=gpu.arch or None, brand=gpu.brand or None) for gpu in gpus]
    try:
        requirements.check(request.requirements, subjects or [node])
    except RequestError as error:
        raise Failure("requirement error", error) from error


def _open_log(call: Call) -> int:
    """The file of --debug, opened before we are in the container; one that can't be opened is passed over."""
    path = call.last("debug")
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644) if path else -1
    except OSError:
        return -1


def _write_log(log: int, done: tuple[str, ...]) -> None:
    """What was done, in the peer's log format."""
    if log < 0:
        return
    import time

    now = time.time()
    stamp = time.strftime("%m%d %H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}"
    head = "\n-- WARNING, the following logs are for debugging purposes only --\n\n"
    text = head + "".join(f"I{stamp} {os.getpid()} live.py:0] {line}\n" for line in done)
    os.write(log, text.encode(errors="surrogateescape"))
    os.close(log)
