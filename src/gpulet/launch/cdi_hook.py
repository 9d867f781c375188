"""gpulet-cdi-hook: the hook of CDI specifications, called at createContainer.

It runs in the container's mount namespace before the root is changed, with the container's state on standard input.
`prepare` does all of a container's steps in one process; the names of NVIDIA's nvidia-cdi-hook work too, one step each.
An unknown name is a warning and no failure, so that a newer specification can be used with an older program.
"""

from __future__ import annotations

import os
import sys

from gpulet.errors import BundleError, GpuletError, StepFailed, UsageError
from gpulet.injection.model import RootfsWork, SymLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gpulet.injection.beneath import Root

EROFS, EPERM = 30, 1
SWITCHES = ("debug", "quiet", "help")
# hook -> its flags; those in SWITCHED take no value
FLAGS = {
    "prepare": (
        "link", "device-link", "folder", "host-driver-version", "host-cuda-version", "cuda-compat-container-root",
        "freeze-device-nodes", "application-profile",
    ),
    "create-symlinks": ("link",),
    "update-ldcache": ("folder", "ldconfig-path"),
    "chmod": ("mode", "path"),
    "enable-cuda-compat": ("host-driver-version", "host-cuda-version", "cuda-compat-container-root"),
    "disable-device-node-modification": (),
    "update-application-profile": (),
    "noop": (),
}  # fmt: skip
SWITCHED = ("freeze-device-nodes", "application-profile", "no-pivot")
UNFOUND = (
    "no links and no loader's cache lead to the driver's libraries: make the root writable, or start the container "
    "with gpulet-runtime, which mounts what can't be written"
)
USAGE = f"usage: gpulet-cdi-hook [--debug|--quiet] HOOK [FLAGS] < state.json\nhooks: {', '.join(FLAGS)}\n"


class Options:
    """The values given for each flag, in order."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}

    def add(self, name: str, value: str) -> None:
        """One more value."""
        self.values.setdefault(name, []).append(value)

    def all(self, name: str) -> list[str]:
        """Every value of a flag."""
        return self.values.get(name, [])

    def last(self, name: str, default: str = "") -> str:
        """The last value of a flag, which counts."""
        return self.all(name)[-1] if self.all(name) else default

    def on(self, name: str) -> bool:
        """Whether a switch is on."""
        return self.last(name, "false") not in ("false", "0")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program. argv: without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    early = []
    while arguments and (arguments[0].startswith("-") or arguments[0] == "hook"):  # as in `nvidia-ctk hook NAME`
        early.append(arguments.pop(0))
    if "--help" in early or "-h" in early:
        sys.stdout.write(USAGE)
        return 0
    name = arguments.pop(0) if arguments else ""
    if name not in FLAGS:
        _warn(f"Unsupported CDI hook: {name}" if name else "No CDI hook specified")
        return 0
    try:
        options = parse(name, arguments)
        if options.on("help"):
            sys.stdout.write(USAGE)
        elif name != "noop":
            run(name, options, container_root(options.last("container-spec")))
    except GpuletError as error:
        print(f"gpulet-cdi-hook: {name}: {error}", file=sys.stderr)
        return 1
    return 0


def parse(hook: str, arguments: Sequence[str]) -> Options:
    """Reads a hook's flags: --name VALUE or --name=VALUE, with one dash or two. Raises UsageError."""
    options = Options()
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.lstrip("-").partition("=")
        flag = {"d": "debug", "q": "quiet", "h": "help"}.get(flag, flag)
        known = (*FLAGS[hook], *SWITCHES, "container-spec", "no-pivot")
        if not argument.startswith("-") or flag not in known:
            raise UsageError("flag", seen=argument, wanted=", ".join(f"--{name}" for name in FLAGS[hook]) or "none")
        if flag in SWITCHED or flag in SWITCHES:
            value = value if equals else "true"
        elif not equals:
            following = next(rest, None)
            if following is None:
                raise UsageError(f"flag --{flag}", seen="no value", wanted="a value")
            value = following
        options.add(flag, value)
    return options


def run(hook: str, options: Options, root: str) -> None:
    """Does a hook's work in the container whose root file system is the folder `root`."""
    from gpulet.injection import frozen, rootfs
    from gpulet.injection.beneath import Root

    work = work_of(options)
    with Root(root) as held:
        present = tuple(link for link in work.device_links if held.exists(link.leads_to()))
        work = work.replace(links=work.links + present, device_links=())
        _unless_read_only(lambda: rootfs.carry_out(held, work))
        if hook == "update-application-profile" or options.on("application-profile"):
            minors = rootfs.visible_minors(held)
            if minors:
                _unless_read_only(lambda: rootfs.write_profile(held, minors))
        if hook == "chmod":
            change_modes(held, options.last("mode"), options.all("path"))
        if hook == "disable-device-node-modification" or options.on("freeze-device-nodes"):
            params = frozen.params()
            if params is not None:
                frozen.cover(held, params)
        for path in held.left:
            _warn(f"{path}: something is mounted there, and left as it is")
        if options.on("debug"):
            for line in held.done:
                print(line, file=sys.stderr)


def work_of(options: Options) -> RootfsWork:
    """The work that flags ask for. Raises UsageError."""
    return RootfsWork(
        _links(options, "link"),
        tuple(dict.fromkeys(folder for value in options.all("folder") for folder in value.split(",") if folder)),
        options.last("host-driver-version"),
        options.last("host-cuda-version"),
        options.last("cuda-compat-container-root", RootfsWork.compat_folder),
        device_links=_links(options, "device-link"),
    )


def _links(options: Options, flag: str) -> tuple[SymLink, ...]:
    links = []
    for value in options.all(flag):
        parts = value.split("::")
        if len(parts) != 2 or not all(parts):
            raise UsageError(f"flag --{flag}", seen=value, wanted="TARGET::LINK")
        links.append(SymLink(parts[0], parts[1]))
    return tuple(links)


def change_modes(root: Root, mode: str, paths: Sequence[str]) -> None:
    """The peer's chmod, beneath the root: what is missing is passed over, and so is what may not be changed."""
    try:
        bits = int(mode, 8)
    except ValueError:
        raise UsageError("flag --mode", seen=mode, wanted="an octal number") from None
    for path in paths:
        try:
            fd = root.open(path, os.O_PATH)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_mode & 0o7777 != bits:
                os.chmod(f"/proc/self/fd/{fd}", bits)
        except OSError as error:
            if error.errno != EPERM:
                raise StepFailed("chmod", path, error.errno or 0, error.strerror or "") from error
        finally:
            os.close(fd)


def container_root(spec: str = "") -> str:
    """The container's root file system from its state: `root` where the runtime gives it, else from the bundle."""
    from gpulet.request.bundle import State

    try:
        if spec:
            with open(spec, "rb") as file:
                state = State.parse(file.read(), process=False)
        else:
            state = State.parse(sys.stdin.buffer.read(), process=False)
    except OSError as error:
        raise BundleError("container state", seen=f"{spec}: {error.strerror}", wanted="a file") from None
    if not os.path.isabs(state.root or state.bundle) and not os.path.isabs(state.bundle):
        # from where we stand, which is in an image, whatever lies there would be read, and links lead out of it
        raise BundleError("container state: bundle", seen=state.bundle or "none", wanted="an absolute path")
    path = os.path.join(state.bundle, state.root) if state.root else _root_of(state.bundle)
    if not path or (os.path.exists(path) and os.path.samefile(path, "/")):  # by whatever mount or link
        raise BundleError("container root", seen=path or "none", wanted="a folder other than /")
    return path


def _root_of(bundle: str) -> str:
    """The root that config.json names, "" where it names none. A user namespace's processes often may not read that
    file; then it is the folder where runc has put them."""
    from gpulet.request.bundle import read_config

    try:
        part = read_config(os.path.join(bundle, "config.json")).get("root")
    except BundleError as error:
        if isinstance(error.__context__, PermissionError) and _stands_in_root():
            return "."  # never by its path, which leads elsewhere where something is mounted over it
        raise
    root: object = part.get("path") if isinstance(part, dict) else ""
    return os.path.join(bundle, root) if isinstance(root, str) and root else ""


def _stands_in_root() -> bool:
    """Whether the current folder is the root of the container of our user namespace. The machine's own user namespace
    has none, and elsewhere the folder must be what only a container's root is: a mount point with a proc in it. So no
    folder of the host's is taken for it, wherever a runtime other than runc may start its hooks."""
    from gpulet.injection.cgroup import plain

    try:
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return False
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.rstrip("\n").split(" ") for line in file]
        here = os.getcwd()
    except OSError:
        return False
    kinds = {plain(fields[4]): fields[fields.index("-") + 1] for fields in mounts}
    return here in kinds and kinds.get(f"{here}/proc") == "proc"


def _unless_read_only(step: Callable[[], None]) -> None:
    """A root that can't be written must not keep a container from starting: its libraries are mounted all the same."""
    try:
        step()
    except StepFailed as error:
        if error.errno != EROFS:
            raise
        _warn(f"{error.what}: {error.reason}; {UNFOUND}")


def _warn(text: str) -> None:
    print(f"gpulet-cdi-hook: warning: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
