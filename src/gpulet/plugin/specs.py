"""The CDI specs behind the cdi-* strategies: written before the answers that name their devices.

The gpu class comes from injection/cdi.py, the small classes (IMEX channels, GDRCopy, GDS, MOFED) from the device nodes
that exist. One file a class, each replaced at once; a class that has nothing isn't written, and its old file goes.
"""

from __future__ import annotations

import glob
import os
from typing import Any

from gpulet.injection import cdi
from gpulet.node import driver
from gpulet.node.gpu import NodeFacts
from gpulet.plugin.allocate import CDI_VENDOR
from gpulet.plugin.config import Config

_NODES = {
    "gdrcopy": ("/dev/gdrdrv",),
    "gds": ("/dev/nvidia-fs*",),
    "mofed": ("/dev/infiniband/uverbs*", "/dev/infiniband/rdma_cm"),
}
_GDS_MOUNTS = ("/run/udev", "/etc/cufile.json")


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
    found = []
    for name, wanted in enabled.items():
        edits = _edits(config, name) if wanted else {}
        if edits:
            cdi.write_spec(_class_spec(name, edits), _path(config, name))
            found.append(name)
        else:
            _remove(config, name)
    return tuple(found)


def _gpu_spec(config: Config, facts: NodeFacts) -> None:
    if not facts.gpus:
        _remove(config, "gpu")
        return
    spec = cdi.make_spec(
        facts,
        driver.find(config.lookup_root, version=facts.driver),
        vendor=CDI_VENDOR,
        cls="gpu",
        names=(config.device_id_strategy,),
        hook_path=config.cdi_hook_path,
        all_device=False,
        host_root=config.driver_root,
        host_dev_root=config.dev_root,
        gids="no-additional-gids-for-device-nodes" not in config.cdi_feature_flags,
        sockets="disable-ipc-discoverer" not in config.cdi_feature_flags,
    )
    _drop_hooks(spec, config.cdi_disable_hooks)
    cdi.write_spec(spec, _path(config, "gpu"))


# A hook's name (cdi-disable-hooks) -> the options of our one hook that do the same; true where a value follows.
_HOOK_OPTIONS = {
    "create-symlinks": {"--link": True},
    "update-ldcache": {"--folder": True},
    "enable-cuda-compat": {"--host-driver-version": True, "--host-cuda-version": True, "--compat-folder": True},
    "disable-device-node-modification": {"--freeze-device-nodes": False},
    "update-application-profile": {"--application-profile": False},
}


def _drop_hooks(spec: dict[str, Any], names: tuple[str, ...]) -> None:
    """Take the named parts out of our hooks; a hook with nothing left to do goes, with "all" each one does."""
    for edits in [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]:
        kept = []
        for hook in edits.pop("hooks", ()):
            args = _without(hook["args"], names)
            if "all" not in names and len(args) > 2:  # more than the program's name and "prepare"
                kept.append({**hook, "args": args})
        if kept:
            edits["hooks"] = kept


def _without(args: list[str], names: tuple[str, ...]) -> list[str]:
    dropped = {option: value for name in names for option, value in _HOOK_OPTIONS.get(name, {}).items()}
    kept, rest = [], list(args)
    while rest:
        word = rest.pop(0)
        if word not in dropped:
            kept.append(word)
        elif dropped[word]:
            rest.pop(0)
    return kept


def _path(config: Config, cls: str) -> str:
    return os.path.join(config.cdi_spec_dir, f"{CDI_VENDOR}-{cls}.json")


def _node(config: Config, path: str) -> dict[str, Any]:
    return {"path": path, "hostPath": os.path.join(config.dev_root, path.lstrip("/"))}


def _edits(config: Config, cls: str) -> dict[str, Any]:
    root = config.lookup_dev_root.rstrip("/")
    found = sorted(path for pattern in _NODES[cls] for path in glob.glob(root + pattern))
    if not found:
        return {}
    edits: dict[str, Any] = {"deviceNodes": [_node(config, path.removeprefix(root)) for path in found]}
    if cls == "gds":
        host = config.lookup_root.rstrip("/")
        edits["mounts"] = [
            {"hostPath": config.driver_root.rstrip("/") + path, "containerPath": path,
             "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"]}
            for path in _GDS_MOUNTS
            if os.path.exists(host + path)
        ]  # fmt: skip
    return edits


def _class_spec(cls: str, edits: dict[str, Any]) -> dict[str, Any]:
    devices = [{"name": "all", "containerEdits": edits}]
    return {"cdiVersion": "0.5.0", "kind": f"{CDI_VENDOR}/{cls}", "devices": devices}


def _remove(config: Config, cls: str) -> None:
    """An earlier generation's spec must not name devices that are no longer offered."""
    try:
        os.unlink(_path(config, cls))
    except FileNotFoundError:
        pass
