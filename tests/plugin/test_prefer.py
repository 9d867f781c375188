from __future__ import annotations

import time

import pytest

from gpulet.node.gpu import Link
from gpulet.plugin.config import Config
from gpulet.plugin.prefer import pair_scores, preference
from gpulet.plugin.resources import inventory
from gpulet.plugin.sharing import Shared, Sharing
from support.hand_made import facts, gpu, gpu_uuid, mig_gpu

TWO, EIGHT = facts(2), facts(8)


def shared(node, replicas: int):
    config = Config(time_slicing=Sharing((Shared("nvidia.com/gpu", replicas),)))
    return inventory(node, config).resources[0]


def counts(ids):
    bases = [one.partition("::")[0] for one in ids]
    return sorted((bases.count(base) for base in set(bases)), reverse=True)


@pytest.mark.parametrize(
    ("policy", "size", "wanted"),
    [
        ("distributed", 2, [1, 1]),
        ("distributed", 4, [2, 2]),
        ("packed", 2, [2]),
        ("packed", 4, [4]),
        ("packed", 5, [4, 1]),
        ("spread", 2, [1, 1]),
        ("spread", 5, [3, 2]),
    ],
)
def test_replicas_by_policy(policy, size, wanted):
    resource = shared(TWO, 4)
    ids = [device.id for device in resource.devices]
    assert counts(preference(resource, TWO, policy)(ids, [], size)) == wanted


def test_distributed_looks_at_what_is_taken_already():
    resource = shared(TWO, 4)
    free = [device.id for device in resource.devices if device.id != f"{gpu_uuid(1)}::0"]
    assert counts(preference(resource, TWO, "distributed")(free, [], 2)) == [1, 1]
    assert counts(preference(resource, TWO, "packed")(free, [], 2)) == [2]
    assert preference(resource, TWO, "packed")(free, [], 1)[0].startswith(gpu_uuid(1))


def test_spread_takes_one_of_each_whatever_is_free():
    resource = shared(TWO, 8)
    taken = {f"{gpu_uuid(0)}::{n}" for n in range(5)} | {f"{gpu_uuid(1)}::{n}" for n in range(3)}
    free = [device.id for device in resource.devices if device.id not in taken]
    assert counts(preference(resource, TWO, "spread")(free, [], 2)) == [1, 1]


def test_required_replicas_come_first_and_count():
    resource = shared(TWO, 2)
    ids = [device.id for device in resource.devices]
    must = [f"{gpu_uuid(0)}::1"]
    assert preference(resource, TWO, "distributed")(ids, must, 2) == [*must, f"{gpu_uuid(1)}::0"]


def test_what_cannot_be_preferred_is_left_to_the_kubelet():
    resource = shared(TWO, 2)
    ids = [device.id for device in resource.devices]
    prefer = preference(resource, TWO, "distributed")
    assert prefer(ids, [], 5) == []
    assert prefer(ids, ids[:2], 1) == []
    assert prefer(["GPU-of-another-node::0", *ids], [], 1) == [ids[0]]


def test_mig_devices_are_packed_by_their_gpu():
    node = facts(mig_gpu(0, "1g.10gb", "1g.10gb"), mig_gpu(1, "1g.10gb", "1g.10gb"))
    (resource,) = inventory(node, Config(mig_strategy="mixed")).resources
    ids = [device.id for device in resource.devices]
    assert preference(resource, node, "packed")(ids[:1] + ids[2:], [], 1) == ids[:1]
    assert preference(resource, node, "distributed")(ids[:1] + ids[2:], [], 1) == [ids[2]]


def test_whole_gpus_go_by_their_links():
    links = {0: 3, 3: 0, 1: 2, 2: 1}
    node = facts(
        *(
            gpu(
                index,
                links=tuple(Link(peer, "numa", 2 if links[index] == peer else 0) for peer in links if peer != index),
            )
            for index in range(4)
        )
    )
    (resource,) = inventory(node, Config()).resources
    ids = [device.id for device in resource.devices]
    prefer = preference(resource, node, "packed")
    assert prefer(ids[::-1], [], 2) == [ids[0], ids[3]]
    assert prefer(ids, [ids[2]], 2) == [ids[1], ids[2]]
    assert prefer([*ids, ids[0]], [], 4) == ids


def test_pair_scores():
    nvlinks = [gpu(0, links=(Link(1, "switch", 4),)), gpu(1, links=(Link(0, "switch", 3),)), gpu(2)]
    assert pair_scores(nvlinks) == [[0, 350, 0], [350, 0, 0], [0, 0, 0]]  # the lower end counts
    many = [gpu(0, links=(Link(1, "system", 36),)), gpu(1, links=(Link(0, "system", 36),))]
    assert pair_scores(many)[0][1] == 1810


def test_no_links_known_means_the_lowest_indices():
    (resource,) = inventory(EIGHT, Config()).resources
    ids = [device.id for device in resource.devices]
    assert preference(resource, EIGHT, "distributed")(ids[::-1], [], 3) == ids[:3]


def test_more_gpus_than_the_exact_answer_takes():
    node = facts(40)
    (resource,) = inventory(node, Config()).resources
    ids = [device.id for device in resource.devices]
    chosen = preference(resource, node, "distributed")(ids, ids[7:8], 5)
    assert len(set(chosen)) == 5
    assert ids[7] in chosen


@pytest.mark.parametrize("policy", ["distributed", "packed", "spread"])
def test_thousands_of_replicas_take_milliseconds(policy):
    resource = shared(EIGHT, 1000)
    ids = [device.id for device in resource.devices]
    prefer = preference(resource, EIGHT, policy)
    began = time.process_time()
    assert len(set(prefer(ids, [], 1000))) == 1000
    assert time.process_time() - began < 0.5  # a look at every replica for each that is taken: more than 5 s


def test_odd_requests_are_answered():
    resource = shared(TWO, 4)
    ids = [device.id for device in resource.devices]
    prefer = preference(resource, TWO, "distributed")
    for size in (-1, 0, 9, 2**31 - 1, -(2**31)):
        assert prefer(ids, [], size) == []
    assert prefer(ids * 3, ["unknown"], 8) and len(set(prefer(ids * 3, [], 8))) == 8
    assert prefer([], [], 1) == []
