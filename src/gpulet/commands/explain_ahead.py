"""What `gpulet explain` foresees of the runtime's work: which of its ways round it will have to take, what it will
refuse, and where the programs are that it names. Nothing is changed: what can't be known without trying is taken to go
well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpulet.commands.explain_root import LookedAt, refuse_config
from gpulet.errors import CdiError, GpuletError, NodeError, StepFailed, UsageError
from gpulet.injection import rootfs
from gpulet.injection.loader import Library
from gpulet.injection.model import RootfsWork
from gpulet.injection.nodes import NO_UVM, UVM
from gpulet.launch import beside, carry, kmods, programs, read_only
from gpulet.launch.beside import Laid
from gpulet.launch.plan import Bundle, Plan, by_hook
from gpulet.settings import Settings

RUNTIME = "gpulet-runtime"
LOAD_KMODS = "loads the driver's modules and makes its device nodes where they are missing (load-kmods)"
_MARK = b"gpulet.launch.start"  # what a launcher imports and a console script doesn't
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # open(2): the file system has no O_TMPFILE


class Ahead:
    """What the runtime will do. plan: the one that will stand, None where none could be made; notes: why it takes
    another way than the usual one; refusal: why it starts nothing, and then config.json stays as it is."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.notes: list[str] = []
        self.refusal: GpuletError | None = None


def foreseen(bundle: Bundle, settings: Settings) -> Ahead:
    """Goes through what the runtime does, as this user. The first refusal counts, and a plan is told in spite of it."""
    ahead = Ahead()
    for step in (_low_level, _plan, _work, _write):
        try:
            step(ahead, bundle, settings)
        except GpuletError as error:
            ahead.refusal = ahead.refusal or error
    return ahead


def _low_level(_ahead: Ahead, _bundle: Bundle, settings: Settings) -> None:
    programs.low_level_runtime(settings.runtimes)


def _plan(ahead: Ahead, bundle: Bundle, settings: Settings) -> None:
    loads = settings.cli_load_kmods and kmods.able(settings.driver_root())
    try:
        ahead.plan = bundle.plan(settings)
    except (NodeError, CdiError):
        if loads:
            ahead.notes.append(f"the runtime first {LOAD_KMODS}, and then looks again")
        raise
    memory = ahead.plan.memory
    if memory and memory.unready and memory.found is None and loads:
        ahead.notes.append(f"this node isn't ready ({', '.join(memory.unready)}): the runtime first {LOAD_KMODS}")
    elif memory and UVM in memory.unready:
        ahead.notes.append(NO_UVM)
    if not all(map(can_lie, ahead.plan.laid)):
        ahead.notes.append(
            f"the state folder {settings.state_dir} can't be written: what would lie there is left to a hook"
        )
        ahead.plan = bundle.plan(settings, aside=False)


def _work(ahead: Ahead, bundle: Bundle, settings: Settings) -> None:
    """As carry.carry_out beneath the root."""
    plan = ahead.plan
    if plan is None or plan.work.empty():
        return
    root = bundle.container.root
    carry.refuse_the_hosts(root)
    found = carry.libraries(plan)[0]
    try:
        with LookedAt(root) as held:
            rootfs.carry_out(held, plan.work, found)
    except StepFailed as error:
        if error.errno == errno.EROFS:
            mounted = _mount_cache(ahead, bundle, plan, found, settings)
        elif error.errno in carry.NOT_FROM_HERE:
            mounted = False
        else:
            raise
        if not mounted:
            ahead.plan = by_hook(plan)
        way = "a cache for the loader is mounted" if mounted else "the work beneath the root is left to a hook"
        ahead.notes.append(f"{error.step} {error.target}: {error.reason}: {way}")


def _mount_cache(ahead: Ahead, bundle: Bundle, plan: Plan, found: list[Library], settings: Settings) -> bool:
    """As read_only.prepare; whether it can be done."""
    laid = read_only.cache_beside(bundle, plan, found, settings)
    if laid is None or not can_lie(laid):
        return False
    ahead.plan = read_only.with_cache(plan, laid)
    ahead.plan.laid, ahead.plan.work = (*plan.laid, laid), RootfsWork()
    return True


def _write(ahead: Ahead, bundle: Bundle, _settings: Settings) -> None:
    if ahead.plan is not None:
        refuse_config(bundle, ahead.plan)


def can_lie(thing: Laid) -> bool:
    """Whether something lies in the state folder already, or could be laid there by this user."""
    if beside.lies(thing):
        return True
    if thing.links and os.path.lexists(thing.path):
        return False  # a folder of something else, which isn't replaced
    folder = os.path.dirname(thing.path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return False
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))  # a file without a name
    except OSError as error:  # else a file system of the kernel's own, such as /proc, has no blocks
        return error.errno in _NO_UNNAMED_FILES and os.statvfs(folder).f_blocks > 0
    return True


@contextlib.contextmanager
def in_place_of(runtime: Path | None) -> Iterator[None]:
    """Has the programs be looked for as by the runtime that engines start, which names those beside itself. runtime:
    None for the first launcher in PATH and the usual folders; where there is none, this program's own folder counts.
    Raises UsageError for a path that is no program."""
    if runtime is not None and not programs.is_program(str(runtime)):
        raise UsageError("--runtime", seen=runtime, wanted=f"the {RUNTIME} that the engine starts")
    before = sys.argv[0]
    sys.argv[0] = str(runtime.absolute()) if runtime else installed() or before
    try:
        yield
    finally:
        sys.argv[0] = before


def installed() -> str:
    """The first launcher of the runtime in PATH and the usual folders, "" where there is none."""
    places = (os.path.join(folder, RUNTIME) for folder in programs.search_path())
    return next((path for path in places if programs.is_program(path) and _is_launcher(path)), "")


def _is_launcher(path: str) -> bool:
    try:
        return _MARK in Path(path).read_bytes()
    except OSError:
        return False
