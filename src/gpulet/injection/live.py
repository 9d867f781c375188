"""Carrying out an injection in a container that has its namespaces but hasn't started its program.

Sources are opened in the host, as detached mounts with their flags set; a child then joins the container's mount
namespace and moves each onto a target that was opened beneath the container's root. No path is resolved twice, and
none of the container's by the host's rules. A failing step takes back those before it.
"""

from __future__ import annotations

import os
import stat

from gpulet import linux, mount_api
from gpulet.errors import InjectionError, StepFailed
from gpulet.injection import cgroup, frozen, loader, rootfs
from gpulet.injection.beneath import Root
from gpulet.injection.detached import NODEV, NOEXEC, NOSUID, RO, Sources
from gpulet.injection.held import failed
from gpulet.injection.model import DeviceNode, Injection
from gpulet.node.paths import below
from gpulet.node.procfs import DRIVER, proc_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from gpulet.injection.confine import Program

PROFILES = rootfs.PROFILE.rpartition("/")[0]
LDCONFIG = "/sbin/ldconfig"


def apply(
    injection: Injection,
    pid: int,
    root: str,
    *,
    cgroups: bool = True,
    devbind: bool = True,
    driver_root: str = "/",
    rules: Sequence[cgroup.Rule] = (),
    ldconfig: Program | None = None,
    pivot: bool = True,
    fork: bool = True,
) -> tuple[str, ...]:
    """Carries the injection out in the container of process `pid`, whose root file system is the folder `root` there.

    cgroups: allow the devices in the container's cgroup, and those of `rules`; devbind: mount device nodes;
    driver_root: whose proc/driver/nvidia the container is to see a part of; ldconfig: run this to write the loader's
    cache, in place of merging it; pivot: see confine.run; fork: work in a child. Without, this process itself stays in
    the container's namespaces, which saves 2 ms to a program that has nothing else to do.
    Answers what was done, in words. Raises StepFailed, and then nothing stays changed.
    """
    with _Namespaces(pid) as namespaces:
        sources = Sources(injection, below(proc_root(driver_root), DRIVER), devbind)
        change = None
        try:
            nodes = [(node.major, node.minor) for node in injection.devices if node.type == "c"]
            allowed = dict.fromkeys((*nodes, *rules)) if cgroups else {}
            if allowed:
                change = cgroup.allow(cgroup.find(pid), tuple(allowed))

            def work() -> tuple[str, ...]:
                return _in_container(injection, namespaces, root, sources, ldconfig, pivot)

            try:
                # Of a user namespace's processes none may take device rules back.
                done = in_child(work) if fork or namespaces.user >= 0 else work()
            except BaseException:
                if change is not None:
                    change.undo()
                raise
        finally:
            if change is not None:
                change.close()
            sources.close()
    return (*(f"allow c {major}:{minor} rw" for major, minor in allowed), *done)


# -- in the host


class _Namespaces:
    """The container's mount namespace, and its user namespace where that isn't ours, held by descriptor."""

    def __init__(self, pid: int) -> None:
        self.mount = self.user = -1
        path = f"/proc/{pid}/ns/mnt"
        try:
            self.mount = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            path = f"/proc/{pid}/ns/user"
            user = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self.__exit__()
            raise failed("open namespace", path, error) from error
        if os.path.sameopenfile(user, (own := os.open("/proc/self/ns/user", os.O_RDONLY))):
            os.close(user)
        else:
            self.user = user
        os.close(own)

    def __enter__(self) -> _Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.mount, self.user):
            if fd >= 0:
                os.close(fd)

    def join(self, root: str) -> Root:
        """Makes this process one of the container's, and opens its root.

        The root is opened between the two, as the way to it need not be open for the container's identities; what is
        made afterwards belongs to them.
        """
        try:
            linux.setns(self.mount, linux.CLONE_NEWNS, "mount namespace")
        except OSError as error:
            raise failed("join", "mount namespace", error) from error
        os.umask(0)  # every mode is given whole
        if self.user < 0:
            return Root(root)
        try:
            held = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise failed("open root file system", root, error) from error
        try:
            linux.setns(self.user, linux.CLONE_NEWUSER, "user namespace")
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        except OSError as error:
            raise failed("join", "user namespace", error) from error
        return Root(root, held)


# -- in the container


def _in_container(
    injection: Injection,
    namespaces: _Namespaces,
    path: str,
    sources: Sources,
    ldconfig: Program | None,
    pivot: bool,
) -> tuple[str, ...]:
    descriptors = os.open("/proc/self/fd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with namespaces.join(path) as root:
        seals = []
        shown = root.exists(DRIVER)  # a kernel without the driver has no such folder, and none can be made
        if shown:
            seals.append(_cover_driver(root, sources.texts, descriptors))
        if injection.rootfs.profile_minors:
            seals.append(_cover(root, PROFILES, descriptors))
        for step in sources.steps:
            if shown or not step.path.startswith(f"{DRIVER}/"):
                _attach(root, step.tree, step.path, step.directory, step.name, descriptors)
        for node in sources.missing:
            _make_node(root, node)
        program = _loader_program(root, ldconfig, pivot) if ldconfig is not None else None
        rootfs.carry_out(root, injection.rootfs, sources.libraries, program)
        for tree in seals:
            _seal(tree)
        return (*root.done, *(f"leave {path}: something is mounted there" for path in root.left))


def _loader_program(root: Root, program: Program, pivot: bool) -> Callable[[Sequence[str]], bool]:
    from gpulet.injection import confine

    if not program.path:  # the container's own; distributions with a script of that name keep the program beside it
        real = f"{LDCONFIG}.real"
        program = confine.Program(real if root.exists(real) else LDCONFIG)

    def run(folders: Sequence[str]) -> bool:
        root.keep(loader.CACHE, f"run {program.path}")
        try:
            confine.run(root.fd, program, ["-f", loader.CONF, "-C", loader.CACHE, *folders], root.owner, pivot=pivot)
        except StepFailed as error:
            if error.errno != confine.ENOENT:
                raise
            root.record(f"{program.path} isn't there: the cache is merged directly", lambda: None)
            return False
        return True

    return run


def _attach(root: Root, tree: int, path: str, directory: bool, name: str, descriptors: int) -> None:
    target = root.place(path, directory)
    try:
        mount_api.move_mount(tree, target, path)
    except OSError as error:
        raise failed(f"mount {name}", path, error) from error
    finally:
        os.close(target)
    root.record(f"mount {name} {path}", lambda: mount_api.detach(tree, descriptors))
    if directory:
        root.forget(path)


def _cover(root: Root, path: str, descriptors: int, fill: Callable[[int], None] | None = None) -> int:
    """Puts a small file system of our own over a folder; what is put there goes with the container."""
    try:
        tree = mount_api.new_file_system("tmpfs", (("mode", "0555"), ("size", "1m")), NOSUID | NODEV | NOEXEC)
        if fill is not None:
            fill(tree)
    except OSError as error:
        raise failed("make file system for", path, error) from error
    _attach(root, tree, path, True, "tmpfs", descriptors)
    return tree


def _cover_driver(root: Root, texts: dict[str, bytes], descriptors: int) -> int:
    """Hides the other GPUs' folders, and keeps the driver from making device nodes of its own in the container."""

    def fill(tree: int) -> None:
        for name, data in texts.items():
            if name == "params":
                data = data.replace(frozen.MODIFY.encode(), frozen.FROZEN.encode(), 1)
            frozen.place(tree, name, data)

    return _cover(root, DRIVER, descriptors, fill)


def _seal(tree: int) -> None:
    try:
        mount_api.mount_setattr(tree, RO)
    except OSError as error:
        raise failed("make read-only", "tmpfs", error) from error


def _make_node(root: Root, node: DeviceNode) -> None:
    """Makes a device node, where the host has none that could be shown."""
    parent, name = root.split(node.path)
    try:
        os.mknod(name, stat.S_IFCHR | node.mode, os.makedev(node.major, node.minor), dir_fd=parent)
    except FileExistsError:
        seen = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISCHR(seen.st_mode) and seen.st_rdev == os.makedev(node.major, node.minor):
            return
        raise StepFailed("make device", node.path, 17, "something else is there") from None
    except OSError as error:
        raise failed("make device", node.path, error) from error
    root.record(f"make device {node.path}", lambda: os.unlink(name, dir_fd=parent))
    os.chown(name, node.uid, node.gid, dir_fd=parent, follow_symlinks=False)


# -- the child


def in_child(work: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Does the work in a child process, which may join namespaces; its answer or its StepFailed reaches us whole."""
    import marshal  # both ends are this program

    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer: tuple[Any, ...] = (True, work())
        except StepFailed as error:
            answer = (False, error.step, error.target, error.errno, error.reason, error.remedy)
        except BaseException as error:  # a fault of ours: its text must not be lost with the process
            answer = (False, "carry out the injection", "", 0, f"{type(error).__name__}: {error}", "report this")
        try:
            with open(writing, "wb") as pipe:
                pipe.write(marshal.dumps(answer))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if not data:
        signal = os.waitstatus_to_exitcode(status)
        raise InjectionError("the process that works in the container ended", seen=f"exit code {signal}")
    good, *rest = marshal.loads(data)
    if not good:
        raise StepFailed(*rest)
    done: tuple[str, ...] = rest[0]
    return done
