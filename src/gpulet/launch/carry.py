"""Carries out what a plan asks for outside config.json: things in the state folder, work beneath the root; and the ways
round where one of them can't be done from here. Loaded by the programs in launch/.
"""

from __future__ import annotations

import os

from gpulet.errors import BundleError, StepFailed
from gpulet.injection import loader, rootfs
from gpulet.injection.beneath import Root
from gpulet.injection.held import EROFS
from gpulet.launch.plan import by_hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulet.launch.plan import Bundle, Plan
    from gpulet.settings import Settings

NOT_FROM_HERE = (1, 13, 75)  # EPERM, EACCES, EOVERFLOW (an owner without a place in an idmapped mount): errno(3)


def carry_out(bundle: Bundle, plan: Plan, settings: Settings) -> Plan:
    """Does a plan's work; answers the plan that stands then, whose config.json is to be written. Raises GpuletError."""
    if plan.laid:
        from gpulet.launch import beside

        try:
            beside.lay(plan.laid)
        except OSError:  # a state folder that isn't ours to write: rootless, or a full disk
            plan = bundle.plan(settings, aside=False)
    if plan.work.empty():
        _remember(plan, {})
        return plan
    refuse_the_hosts(bundle.container.root)
    found, sonames = libraries(plan)
    try:
        with Root(bundle.container.root) as held:
            rootfs.carry_out(held, plan.work, found)
    except StepFailed as error:
        if error.errno == EROFS:
            from gpulet.launch import read_only

            return read_only.prepare(bundle, plan, found, settings)
        if error.errno not in NOT_FROM_HERE:
            raise
        return by_hook(plan)
    _remember(plan, sonames)
    return plan


def refuse_the_hosts(root: str) -> None:
    """A container on the host's own root (podman run --rootfs /) has the driver; its loader's cache isn't ours to
    write."""
    try:
        same = os.path.samefile(root, "/")
    except OSError:
        return  # opening it says why
    if same:
        raise BundleError(
            "the container's root is the host's own",
            seen=root,
            wanted="a folder other than /",
            remedy="start it without asking for GPUs: the driver's files are there",
        )


def libraries(plan: Plan) -> tuple[list[loader.Library], dict[str, tuple[str, int]]]:
    """The libraries for the loader's cache, and all that is known of each: remembered, or read from the host's file."""
    known = plan.memory.sonames if plan.memory else {}
    unknown = [mount for mount in plan.mounts if mount.path not in known]
    read = loader.libraries_of(unknown) if unknown else []
    sonames = known | {mount.path: ("", 0) for mount in unknown}  # what a loader could do nothing with stays so
    for item in read:
        sonames[f"{item.folder}/{item.name}"] = (item.soname, item.flags)
    found = []
    for mount in plan.mounts:
        if sonames[mount.path][1]:
            folder, _, name = mount.path.rpartition("/")
            found.append(loader.Library(folder, name, *sonames[mount.path]))
    return found, sonames


def _remember(plan: Plan, sonames: dict[str, tuple[str, int]]) -> None:
    if plan.memory:
        own = {mount.path for mount in plan.injection.mounts}
        plan.memory.keep(plan.injection, {path: it for path, it in sonames.items() if path in own})
