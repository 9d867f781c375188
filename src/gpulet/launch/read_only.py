"""The way round a root file system that is read-only on disk, where no link or file can be made: the loader's cache is
laid in the state folder and mounted over the image's, with every library by its own file's name. Loaded by the programs
in launch/.
"""

from __future__ import annotations

from gpulet.injection import loader, oci
from gpulet.injection.beneath import Root
from gpulet.injection.model import Injection, Mount
from gpulet.launch import beside
from gpulet.launch.plan import by_hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpulet.launch.plan import Bundle, Plan
    from gpulet.settings import Settings


def prepare(bundle: Bundle, plan: Plan, found: list[loader.Library], settings: Settings) -> Plan:
    """The plan that stands then: with that cache mounted, or with all work left to a hook. Raises GpuletError."""
    laid = cache_beside(bundle, plan, found, settings)
    if laid is None:
        return by_hook(plan)
    try:
        beside.lay([laid])
    except OSError:
        return by_hook(plan)
    return with_cache(plan, laid)


def cache_beside(bundle: Bundle, plan: Plan, found: list[loader.Library], settings: Settings) -> beside.Laid | None:
    """The loader's cache to be mounted over the image's, with the libraries where they lie, as no link can be made. An
    image without a cache has no place for it: None, and that is left to the hook."""
    with Root(bundle.container.root) as held:
        data = loader.cache_without_links(held, plan.work, found) if held.exists(loader.CACHE) else b""
    return beside.Laid(beside.named(settings.state_dir, "caches", data), data) if data else None


def with_cache(plan: Plan, laid: beside.Laid) -> Plan:
    """The plan with that cache mounted."""
    mount = Mount(laid.path, loader.CACHE, beside.OPTIONS, why="the root is read-only: the loader's cache")
    plan.config = oci.apply(plan.config, Injection(mounts=(mount,)))
    return plan
