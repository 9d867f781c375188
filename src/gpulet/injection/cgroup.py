"""Device rules of a container that has its cgroup already: files in v1, eBPF programs in v2.

Only the live way needs this; the runtime writes rules into config.json, where the cgroup's manager keeps them.
Facts: kernel documentation, admin-guide/cgroup-v1/devices.rst and cgroup-v2.rst ("Device controller"), linux/bpf.h.
"""

from __future__ import annotations

import os

from gpulet.errors import InjectionError, StepFailed
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Rule = tuple[int, int]  # a character device's major and minor; reading and writing it is to be allowed
FORBIDDEN = (1, 13, 30)  # EPERM, EACCES, EROFS
WITHOUT = "nvidia-container-cli.no-cgroups = true in config.toml, or --no-cgroups"


class Cgroup(Value):
    """Where a process's device rules are kept: hierarchy version 1 or 2, and the folder."""

    version: int
    folder: str


def find(pid: int, proc: str = "/proc") -> Cgroup:
    """The cgroup that holds the device rules of a process.

    Where the devices controller is in a v1 hierarchy (also on hybrid machines) that is it, else the v2 hierarchy; also
    where the v1 one isn't mounted, since then no runtime can have used it.
    """
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split(" ") for line in file]
    except OSError as error:
        raise StepFailed("find cgroup of process", str(pid), error.errno or 0, error.strerror or "") from error
    paths = {names: path for _, names, path in (line for line in lines if len(line) == 3)}
    candidates = [(1, "cgroup", "devices", path) for names, path in paths.items() if "devices" in names.split(",")]
    candidates += [(2, "cgroup2", "", paths[""])] if "" in paths else []
    for version, kind, controller, path in candidates:
        folder = _folder(mounts, kind, path, controller)
        if folder:
            return Cgroup(version, folder)
    raise InjectionError(
        f"process {pid} has no cgroup for device rules that is mounted here",
        seen=", ".join(f"{names or 'v2'} {path}" for names, path in sorted(paths.items())) or "none",
        wanted="a devices controller or cgroup v2",
        remedy=f"mount the cgroup file system, or set {WITHOUT}",
    )


def _folder(mounts: list[list[str]], kind: str, path: str, controller: str) -> str:
    """The folder of a cgroup, "" where none of the hierarchy's mounts shows it (proc_pid_mountinfo(5))."""
    for fields in mounts:
        dash = fields.index("-")
        root, point = fields[3], fields[4]
        if fields[dash + 1] != kind or (controller and controller not in fields[dash + 3].strip().split(",")):
            continue
        if root == "/":
            return plain(point) + path.rstrip("/")
        if path == root or path.startswith(f"{root}/"):
            return plain(point) + path[len(root) :]
    return ""


def plain(path: str) -> str:
    """A path of mountinfo without its escapes."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


class Change:
    """What was done to a cgroup. It holds descriptors, so that it can be undone from another mount namespace too."""

    def __init__(self, undo: Callable[[], None], held: Sequence[int]) -> None:
        self._undo = undo
        self._held = held

    def undo(self) -> None:
        """Takes the rules back, as far as it goes: a failure here must not hide the one that led here."""
        try:
            self._undo()
        except OSError:
            pass

    def close(self) -> None:
        """Gives the descriptors back; call it once, at the end."""
        for fd in self._held:
            os.close(fd)


def allow(cgroup: Cgroup, rules: Sequence[Rule]) -> Change:
    """Lets the cgroup's processes read and write the devices. Raises StepFailed, and then nothing is changed."""
    try:
        if cgroup.version == 2:
            from gpulet.injection import cgroup_bpf

            return Change(*cgroup_bpf.allow(cgroup.folder, rules))
        return _allow_v1(cgroup.folder, rules)
    except StepFailed as error:
        if error.errno in FORBIDDEN and not error.remedy:
            error.remedy = f"where no rules keep the container from its devices, as without root, set {WITHOUT}"
        raise


def _allow_v1(folder: str, rules: Sequence[Rule]) -> Change:
    before = _rules_v1(folder)
    done: list[Rule] = []
    held: list[int] = []

    def undo() -> None:
        for rule in done:
            os.write(held[1], _line(rule).encode())

    change = Change(undo, held)
    what = folder
    try:
        for name in ("devices.allow", "devices.deny"):
            what = f"{folder}/{name}"
            held.append(os.open(what, os.O_WRONLY | os.O_CLOEXEC))
        for rule in dict.fromkeys(rules):
            what = f"{_line(rule)} in {folder}/devices.allow"
            os.write(held[0], _line(rule).encode())
            if "a *:* rwm" not in before and not any(line.startswith(f"c {rule[0]}:{rule[1]} ") for line in before):
                done.append(rule)
    except OSError as error:
        change.undo()
        change.close()
        # Without root a container has no cgroup of its own: it is in its caller's, mostly one that allows everything.
        if error.errno in FORBIDDEN and all(lets(before, rule) for rule in rules):
            return Change(lambda: None, ())
        raise StepFailed("allow device", what, error.errno or 0, error.strerror or "") from error
    return change


def _rules_v1(folder: str) -> list[str]:
    try:
        with open(f"{folder}/devices.list", encoding="utf-8") as file:
            return [line.strip() for line in file]
    except OSError:
        return []


def lets(lines: Iterable[str], rule: Rule) -> bool:
    """Whether devices.list lets a device be read and written: one line has to cover the whole question. A cgroup that
    allows all but some tells "a *:* rwm" alone. Raises ValueError for lines of another form."""
    for line in lines:
        kind, numbers, access = line.split()
        pairs = zip(numbers.split(":"), rule, strict=True)
        if kind in "ac" and {"r", "w"} <= set(access) and all(text in ("*", str(number)) for text, number in pairs):
            return True
    return False


def _line(rule: Rule) -> str:
    return f"c {rule[0]}:{rule[1]} rw"
