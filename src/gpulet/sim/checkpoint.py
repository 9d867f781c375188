"""The kubelet's ledger of devices, `kubelet_internal_checkpoint`, in its own JSON form.

    {"Data": {"PodDeviceEntries": [{"PodUID", "ContainerName", "ResourceName", "DeviceIDs": {"<NUMA node>": [id]},
                                    "AllocResp": "<base64 of ContainerAllocateResponse>"}],
              "RegisteredDevices": {"<resource>": [id]}},
     "Checksum": <number>}

The kubelet's checksum hashes a dump of its Go structures, so nobody else can check it; ours is FNV-1a over `Data`.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What one container holds of one resource. devices: NUMA node as text ("-1" unknown) -> ids; answer: the
    serialized ContainerAllocateResponse."""

    pod_uid: str
    container: str
    resource: str
    devices: Mapping[str, Sequence[str]]
    answer: bytes = b""

    def ids(self) -> tuple[str, ...]:
        """All its device ids, each once."""
        return tuple(dict.fromkeys(device_id for ids in self.devices.values() for device_id in ids))


@dataclass
class Checkpoint:
    """The file and what is in it."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    registered: dict[str, list[str]] = field(default_factory=dict)

    def read(self) -> None:
        """Take over the file's content; a missing or torn file counts as empty, as after a node's first boot."""
        try:
            data = json.loads(self.path.read_bytes())["Data"]
            self.entries = [
                Entry(item["PodUID"], item["ContainerName"], item["ResourceName"], item["DeviceIDs"] or {},
                      base64.b64decode(item.get("AllocResp") or ""))
                for item in data.get("PodDeviceEntries") or []
            ]  # fmt: skip
            self.registered = dict(data.get("RegisteredDevices") or {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.entries, self.registered = [], {}

    def write(self) -> None:
        """Replace the file at once: a reader sees the old or the new, never half."""
        entries = [
            {
                "PodUID": entry.pod_uid,
                "ContainerName": entry.container,
                "ResourceName": entry.resource,
                "DeviceIDs": {node: list(ids) for node, ids in entry.devices.items()},
                "AllocResp": base64.b64encode(entry.answer).decode(),
            }
            for entry in self.entries
        ]
        data = {"PodDeviceEntries": entries or None, "RegisteredDevices": self.registered}
        text = json.dumps(data, separators=(",", ":"))
        aside = self.path.with_name(f".{self.path.name}.new")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f'{{"Data":{text},"Checksum":{_fnv1a(text.encode())}}}')
        os.replace(aside, self.path)


def _fnv1a(data: bytes) -> int:
    value = 0x811C9DC5
    for byte in data:
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value
