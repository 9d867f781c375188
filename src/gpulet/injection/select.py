"""Which GPUs and MIG devices a list of ids names. Loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.errors import UnknownDevice
from gpulet.node.gpu import Gpu, MigDevice, NodeFacts
from gpulet.node.paths import below
from gpulet.node.procfs import nvml_bus_id
from gpulet.value import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NOTHING = ("", "none", "void")


class Selection(Value):
    """What was selected, each once, in the order asked for: whole GPUs, and MIG devices."""

    gpus: tuple[Gpu, ...] = ()
    migs: tuple[MigDevice, ...] = ()

    def bus_ids(self, facts: NodeFacts) -> tuple[str, ...]:
        """PCI bus ids of the GPUs and of the MIG devices' parents."""
        of = {gpu.index: gpu.bus_id for gpu in facts.gpus}
        ids = [gpu.bus_id for gpu in self.gpus] + [of[mig.gpu] for mig in self.migs if mig.gpu in of]
        return tuple(dict.fromkeys(ids))


def _migs(facts: NodeFacts) -> list[MigDevice]:
    return [mig for gpu in facts.gpus for mig in gpu.mig]


def _pci_address(text: str) -> str:
    """ "1:0:0", "0000:01:00.0" and the like in NVML's form; "" where it is no PCI address."""
    parts = text.lower().removesuffix(".0").split(":")
    if len(parts) != 3 or not all(part and all(c in "0123456789abcdef" for c in part) for part in parts):
        return ""
    domain, bus, slot = (int(part, 16) for part in parts)
    return f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def _unknown(facts: NodeFacts, name: str, why: str = "") -> UnknownDevice:
    there = [f"{gpu.index} ({gpu.uuid or gpu.bus_id})" for gpu in facts.gpus]
    there += [f"{mig.gpu}:{mig.slot} ({mig.uuid})" for mig in _migs(facts) if mig.slot >= 0]
    if facts.withheld and not why:
        why = f"and other GPUs of this machine ({len(facts.withheld)}) have no node in {below(facts.dev_root, '/dev')}"
    there += [f"lost: {lost.index} ({lost.reason})" for lost in facts.lost]
    return UnknownDevice(
        "unknown device",
        seen=f"{name[:100]!r}{'...' if len(name) > 100 else ''}{', ' + why if why else ''}",
        wanted="one of " + ", ".join(there) if there else "no id at all, since there is no GPU here",
        remedy="see: gpulet node",
    )


def _by_uuid(facts: NodeFacts, name: str) -> Gpu | MigDevice:
    """A whole UUID, or the beginning of one if it fits one device alone. Case doesn't matter, as for NVML."""
    wanted = name.lower()
    candidates: list[Gpu | MigDevice] = [*_migs(facts)] if wanted.startswith("mig-") else [*facts.gpus]
    matches = [device for device in candidates if device.uuid.lower().startswith(wanted)]
    exact = [device for device in matches if len(device.uuid) == len(wanted)]
    if len(exact) == 1 or len(matches) == 1:
        return (exact or matches)[0]
    if not matches and wanted.startswith("mig-gpu-"):
        return _by_instances(facts, name)
    raise _unknown(facts, name, f"the beginning of {len(matches)} UUIDs" if matches else "")


def _by_instances(facts: NodeFacts, name: str) -> MigDevice:
    """The old-style MIG UUID "MIG-<GPU uuid>/<GPU instance>/<compute instance>"."""
    uuid, _, instances = name[len("MIG-") :].partition("/")
    gi, _, ci = instances.partition("/")
    for gpu in facts.gpus:
        for mig in gpu.mig:
            if gpu.uuid.lower() == uuid.lower() and (str(mig.gi), str(mig.ci)) == (gi, ci):
                return mig
    raise _unknown(facts, name)


def find_device(facts: NodeFacts, name: str) -> Gpu | MigDevice:
    """The device that one id names: index "3", "0:1" (GPU index, MIG slot), UUID or the beginning of one, PCI address.

    Raises UnknownDevice, which lists what there is.
    """
    if name[:4].upper() in ("GPU-", "MIG-"):
        return _by_uuid(facts, name)
    if name.isascii() and name.isdigit() and len(name) < 20:
        found = [gpu for gpu in facts.gpus if gpu.index == int(name)]
        lost = [gone for gone in facts.lost if gone.index == int(name)]
        if found:
            return found[0]
        raise _unknown(facts, name, lost[0].reason if lost else "")
    parent, colon, slot = name.partition(":")
    if colon and name.isascii() and parent.isdigit() and slot.isdigit() and len(name) < 20:
        for mig in _migs(facts):
            if (mig.gpu, mig.slot) == (int(parent), int(slot)):
                return mig
        raise _unknown(facts, name, "MIG slots are known to NVML alone" if facts.source == "procfs" else "")
    bus_id = _pci_address(name)
    for gpu in facts.gpus:
        if bus_id and nvml_bus_id(gpu.bus_id) == bus_id:
            return gpu
    raise _unknown(facts, name)


def select(facts: NodeFacts, ids: Iterable[str]) -> Selection:
    """The devices that `ids` name, each once. "all" is every GPU and every MIG device; "none", "void" and "" are
    nothing. A MIG device doesn't select its parent. Raises UnknownDevice.
    """
    names = [name.strip() for name in ids]
    if any(name.lower() == "all" for name in names):
        return Selection(facts.gpus, tuple(_migs(facts)))
    found = dict.fromkeys(find_device(facts, name) for name in names if name.lower() not in NOTHING)
    return Selection(
        tuple(device for device in found if isinstance(device, Gpu)),
        tuple(device for device in found if isinstance(device, MigDevice)),
    )
