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

    Raises CdiError or OSError's translation where the gpu spec can't be made or written.
    """
    files = driver.find(config.lookup_root)
    spec = cdi.make_spec(
        facts,
        files,
        vendor=CDI_VENDOR,
        cls="gpu",
        names=(config.device_id_strategy,),
        hook_path=config.cdi_hook_path,
    )
    cdi.write_spec(_as_on_host(spec, config), _path(config, "gpu"))
    _write_or_remove(config, "imex-channel", [
        (str(channel), {"deviceNodes": [_node(config, f"/dev/nvidia-caps-imex-channels/channel{channel}")]})
        for channel in imex
    ])  # fmt: skip
    enabled = {"gdrcopy": config.gdrcopy_enabled, "gds": config.gds_enabled, "mofed": config.mofed_enabled}
    found = []
    for name, wanted in enabled.items():
        edits = _edits(config, name) if wanted else {}
        _write_or_remove(config, name, [("all", edits)] if edits else [])
        if edits:
            found.append(name)
    return tuple(found)


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


def _write_or_remove(config: Config, cls: str, devices: list[tuple[str, dict[str, Any]]]) -> None:
    path = _path(config, cls)
    if devices:
        spec = {
            "cdiVersion": "0.5.0",
            "kind": f"{CDI_VENDOR}/{cls}",
            "devices": [{"name": name, "containerEdits": edits} for name, edits in devices],
        }
        cdi.write_spec(spec, path)
    elif os.path.exists(path):
        os.unlink(path)


def _as_on_host(spec: dict[str, Any], config: Config) -> dict[str, Any]:
    """Host paths found beneath the driver root's mount in this process's container, as the host's engine sees them."""
    inside, outside = config.lookup_root.rstrip("/"), config.driver_root.rstrip("/")
    if inside == outside:
        return spec

    def moved(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: moved(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        if key == "hostPath" and isinstance(value, str) and value.startswith(inside + "/"):
            return outside + value.removeprefix(inside)
        return value

    return {name: moved(item, name) for name, item in spec.items()}
