"""What `gpulet-container-cli configure --dry-run` prints: the injection that would be carried out, one item a line."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gpulet.injection.model import Injection

    Rule = tuple[int, int]


def lines(injection: Injection, rules: Sequence[Rule], *, cgroups: bool, devbind: bool) -> Iterator[str]:
    """The plan in words, in the order in which it would be carried out.

    rules: devices to allow besides the injection's; cgroups, devbind: whether rules are set and nodes mounted.
    """
    nodes = [(node.major, node.minor) for node in injection.devices]
    for major, minor in dict.fromkeys((*nodes, *rules)) if cgroups else ():
        yield f"allow   c {major}:{minor} rw"
    for mount in injection.mounts:
        options = ",".join(option for option in mount.options if option not in ("rbind", "rprivate"))
        yield f"mount   {mount.path} <- {mount.source} ({options}){_why(mount.why)}"
    for node in injection.devices if devbind else ():
        yield f"device  {node.path} <- {node.host_path} (c {node.major}:{node.minor}){_why(node.why)}"
    for bus_id in injection.proc_gpus:
        yield f"proc    /proc/driver/nvidia/gpus/{bus_id}"
    for path in injection.proc_mig:
        yield f"proc    {path}"
    work = injection.rootfs
    for link in work.links:
        yield f"link    {link.path} -> {link.target}{_why(link.why)}"
    for folder in work.folders:
        yield f"loader  {folder}"
    if work.host_driver:
        yield f"compat  {work.compat_folder}, where it is newer than driver {work.host_driver}"
    if work.profile_minors:
        yield f"profile of GPU minors {', '.join(map(str, work.profile_minors))}"


def _why(text: str) -> str:
    return f"  # {text}" if text else ""
