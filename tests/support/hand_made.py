"""Node facts made by hand, for tests that need GPUs and no node."""

from __future__ import annotations

from gpulet.node.gpu import Gpu, Link, MigDevice, NodeFacts


def gpu_uuid(index: int) -> str:
    return f"GPU-01000100-0000-0000-0000-{index:012d}"


def gpu(index: int, **fields) -> Gpu:
    values = {"minor": index, "uuid": gpu_uuid(index), "bus_id": f"00000000:{index + 16:02x}:00.0"}
    values |= {"name": "NVIDIA H100 80GB HBM3", "arch": "9.0", "memory": 80 << 30}
    return Gpu(index=index, **{**values, **fields})


def mig_gpu(index: int, *profiles: str, **fields) -> Gpu:
    """A GPU in MIG mode with one MIG device a profile, slots and instances in order."""
    devices = tuple(
        MigDevice(
            uuid=f"MIG-02000200-0000-0000-{index:04d}-{slot:012d}",
            gpu=index,
            gpu_minor=index,
            slot=slot,
            gi=slot + 7,
            ci=0,
            profile=profile,
            memory=10 << 30,
            gi_minor=100 * index + 2 * slot + 3,
            ci_minor=100 * index + 2 * slot + 4,
        )
        for slot, profile in enumerate(profiles)
    )
    return gpu(index, mig_capable=True, mig_enabled=True, mig=devices, **fields)


def _far(one: Gpu, gpus: list[Gpu]) -> tuple[Link, ...]:
    return tuple(Link(other.index, "system") for other in gpus if other is not one)


def facts(*gpus: Gpu | int, **fields) -> NodeFacts:
    """facts(8) for eight plain GPUs, or facts(gpu(0), mig_gpu(1, "1g.10gb")); each as near to one as to the other."""
    made = [one for item in gpus for one in ([item] if isinstance(item, Gpu) else map(gpu, range(item)))]
    made = [one if one.links else one.replace(links=_far(one, made)) for one in made]
    return NodeFacts(gpus=tuple(made), source="nvml", driver="570.86.15", cuda="12.8", **fields)
