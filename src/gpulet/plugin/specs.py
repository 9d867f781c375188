"""The CDI specs behind the cdi-* strategies: written before the answers that name their devices.

The gpu class comes from injection/cdi.py, the small classes (IMEX channels, GDRCopy, GDS, MOFED) from the device nodes
that exist. One file a class, each replaced at once; a class that has nothing isn't written, and its old file goes.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from gpulet.errors import CdiError
from gpulet.injection import cdi, cdi_modes, csv_files
from gpulet.injection.cdi_calls import HookCalls
from gpulet.injection.cdi_spec import HostPaths
from gpulet.node import driver
from gpulet.node.devices import choose_dev_root
from gpulet.node.gpu import NodeFacts
from gpulet.plugin.allocate import CDI_VENDOR
from gpulet.plugin.config import Config
from gpulet.plugin.resources import TEGRA

log = logging.getLogger(__name__)

_GATED = ("gdrcopy", "gds", "mofed")


def publish(config: Config, facts: NodeFacts, imex: tuple[int, ...]) -> tuple[str, ...]:
    """Write the specs. Returns the optional classes that have something in them, in the order of an answer's names.

    Raises CdiError where a spec can't be made or written, DriverNotFound where there is no driver.
    """
    _gpu_spec(config, facts)
    if imex:
        offered = facts.replace(imex=imex)
        spec = cdi.channel_spec(offered, vendor=CDI_VENDOR, cls="imex-channel", host_dev_root=config.dev_root)
        cdi.write_spec(spec, _path(config, "imex-channel"))
    else:
        _remove(config, "imex-channel")
    enabled = {"gdrcopy": config.gdrcopy_enabled, "gds": config.gds_enabled, "mofed": config.mofed_enabled}
    return tuple(name for name in _GATED if _gated_spec(config, facts, name, enabled[name]))


def _gated_spec(config: Config, facts: NodeFacts, name: str, enabled: bool) -> bool:
    """Whether the class is enabled and has something in it; then its spec is written."""
    try:
        if enabled:
            spec = cdi_modes.gated_spec(
                facts, name, vendor=CDI_VENDOR, root=config.lookup_root, host_dev_root=config.dev_root
            )
            for device in spec["devices"]:
                _keep_mounts_that_exist(device["containerEdits"], config)
            cdi.write_spec(spec, _path(config, name))
            return True
    except CdiError as error:
        log.warning("not offered: %s", error)
    _remove(config, name)
    return False


def _keep_mounts_that_exist(edits: dict[str, Any], config: Config) -> None:
    """A mount of a file that isn't there would keep the container from starting; the rest as the host sees it."""
    inside, outside = config.lookup_root.rstrip("/"), config.driver_root.rstrip("/")
    mounts = [mount for mount in edits.pop("mounts", ()) if os.path.exists(mount["hostPath"])]
    if mounts:
        edits["mounts"] = [{**mount, "hostPath": outside + mount["hostPath"].removeprefix(inside)} for mount in mounts]


def _gpu_spec(config: Config, facts: NodeFacts) -> None:
    if not facts.gpus:
        _remove(config, "gpu")
        return
    if facts.source == "tegra":
        _tegra_spec(config)
        return
    files = driver.find(config.lookup_root, version=facts.driver)
    if facts.source == "wsl":
        spec = cdi_modes.wsl_spec(facts, files, vendor=CDI_VENDOR, calls=_calls(config))
        cdi.write_spec(spec, _path(config, "gpu"))
        return
    spec = cdi.make_spec(
        facts,
        files,
        vendor=CDI_VENDOR,
        cls="gpu",
        names=(config.device_id_strategy,),
        calls=_calls(config),
        host_root=config.driver_root,
        host_dev_root=config.dev_root,
        gids="no-additional-gids-for-device-nodes" not in config.cdi_feature_flags,
        sockets="disable-ipc-discoverer" not in config.cdi_feature_flags,
    )
    cdi.write_spec(spec, _path(config, "gpu"))


def _calls(config: Config) -> HookCalls:
    """The path is the host's, and this program's files are an image's mostly: only the name can be gone by."""
    return HookCalls(config.cdi_hook_path, config.cdi_disable_hooks)


def _tegra_spec(config: Config) -> None:
    """JetPack's lists as one device, under the name that answers have for it."""
    lists = csv_files.read(config.lookup_root)
    found = csv_files.injection(lists, config.lookup_root)
    dev_root = choose_dev_root(config.lookup_root)
    paths = HostPaths(config.lookup_root, config.driver_root, dev_root, config.dev_root)
    spec = csv_files.spec(found, vendor=CDI_VENDOR, cls="gpu", calls=_calls(config), all_device=False, paths=paths)
    name = "0" if config.device_id_strategy == "index" else TEGRA
    spec["devices"] = [{**device, "name": name} for device in spec["devices"]]
    cdi.write_spec(spec, _path(config, "gpu"))


def _path(config: Config, cls: str) -> str:
    return os.path.join(config.cdi_spec_dir, f"{CDI_VENDOR}-{cls}.json")


def _remove(config: Config, cls: str) -> None:
    """An earlier generation's spec must not name devices that are no longer offered."""
    try:
        os.unlink(_path(config, cls))
    except FileNotFoundError:
        pass
