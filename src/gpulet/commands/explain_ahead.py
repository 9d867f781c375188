"""What `gpulet explain` foresees of the runtime's work: which of its ways round it will have to take, and where the
programs are that it names. Nothing is changed: what can't be known without trying is taken to go well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpulet.errors import UsageError
from gpulet.injection.model import RootfsWork
from gpulet.launch import beside, carry, programs, read_only
from gpulet.launch.beside import Laid
from gpulet.launch.plan import Bundle, Plan, by_hook
from gpulet.settings import Settings

RUNTIME = "gpulet-runtime"
_MARK = b"gpulet.launch.start"  # what a launcher imports and a console script doesn't
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # open(2): the file system has no O_TMPFILE


def foreseen(bundle: Bundle, settings: Settings) -> tuple[Plan, tuple[str, ...]]:
    """The plan that will stand once the runtime has tried what it does outside config.json, as this user; and what will
    have made it take another way. A root file system that isn't there says nothing: a stopped container's is gone.
    Raises what planning raises."""
    plan, notes = bundle.plan(settings), []
    if not all(map(can_lie, plan.laid)):
        plan = bundle.plan(settings, aside=False)
        notes.append(f"the state folder {settings.state_dir} can't be written: what would lie there is left to a hook")
    root = bundle.container.root
    if plan.work.empty() or not os.path.isdir(root):
        return plan, tuple(notes)
    carry.refuse_the_hosts(root)
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        notes.append("the root file system is read-only: the loader's cache is mounted, or else left to a hook")
        plan = _read_only(bundle, plan, settings)
    elif not all(os.access(folder, os.W_OK | os.X_OK, effective_ids=True) for folder in _folders(root)):
        notes.append("the root file system can't be written by this user: its part is left to a hook")
        plan = by_hook(plan)
    return plan, tuple(notes)


def _read_only(bundle: Bundle, plan: Plan, settings: Settings) -> Plan:
    laid = read_only.cache_beside(bundle, plan, carry.libraries(plan)[0], settings)
    if laid is None or not can_lie(laid):
        return by_hook(plan)
    plan = read_only.with_cache(plan, laid)
    plan.laid, plan.work = (*plan.laid, laid), RootfsWork()
    return plan


def _folders(root: str) -> list[str]:
    """The root, and the folder in it that every kind of work writes to, where the image has one of its own."""
    etc = os.path.join(root, "etc")
    return [root, etc] if os.path.isdir(etc) and not os.path.islink(etc) else [root]


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
