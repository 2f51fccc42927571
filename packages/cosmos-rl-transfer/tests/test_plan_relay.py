"""Striped chains: each byte leaves the trainers once, and every member still gets everything."""

import pytest
from transfer_oracle import wrong_parts

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES
from cosmos_rl_transfer.planning.plan import plan
from cosmos_rl_transfer.planning.relay import predecessor, rings, successor
from cosmos_rl_transfer.planning.topology import Port, Topology

SPECS = [WeightSpec(name=f"layers.{i}.up_proj.weight", shape=(64, 48), dtype="bfloat16") for i in range(12)]
TRAINERS = spread.mesh(SPECS, dp_shard=2)
FLEET = spread.replicas(spread.mesh(SPECS, tp=2), 3)


def made(source=TRAINERS, target=FLEET, relay="on", **options):
    return plan(source, target, relay=relay, bucket_bytes=4096, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_bucket_visits_every_member_once_starting_at_the_trainer(size):
    for bucket in range(2 * size):
        path = [next(i for i in range(size) if predecessor(bucket, i, size) is None)]
        while (after := successor(bucket, path[-1], size)) is not None:
            assert predecessor(bucket, after, size) == path[-1]
            path.append(after)
        assert path[0] == bucket % size
        assert sorted(path) == list(range(size))


def test_ranks_that_want_the_same_boxes_are_a_ring():
    assert rings(FLEET) == [(0, 2, 4), (1, 3, 5)]


def test_ranks_that_share_only_some_boxes_are_not():
    specs = [
        WeightSpec(name="layers.0.k_proj.weight", shape=(8, 4), dtype="bfloat16"),
        WeightSpec(name="layers.0.q_proj.weight", shape=(8, 4), dtype="bfloat16"),
    ]
    assert rings(spread.mesh(specs, tp=4, kv_heads=2)) == [(0,), (1,), (2,), (3,)]


def test_the_trainers_send_each_byte_once():
    one_copy = sum(ITEM_BYTES["bfloat16"] * 64 * 48 for _ in SPECS)
    relayed, direct = made(), made(relay="off")
    assert sum(relayed.bytes_out.values()) == one_copy
    assert sum(direct.bytes_out.values()) == 3 * one_copy
    assert relayed.total_bytes == direct.total_bytes == relayed.lower_bound == 3 * one_copy
    assert relayed.ratio == direct.ratio == 1.0


def test_no_member_sends_more_than_it_receives():
    found = made()
    assert sum(found.relay_bytes_out.values()) == found.total_bytes - sum(found.bytes_out.values())
    assert all(found.relay_bytes_out[rank] <= size for rank, size in found.bytes_in.items())
    spread = found.relay_bytes_out.values()
    assert max(spread) - min(spread) <= 2 * 2 * 4096  # a bucket or two of each source


def test_members_of_a_ring_have_the_same_buckets():
    found = made()
    for rank in FLEET.ranks:
        ring = found.ring(rank)
        assert rank in ring
        for source in TRAINERS.ranks:
            mine, first = found.stream(source, rank), found.stream(source, ring[0])
            assert [(b.index, b.pieces, b.num_bytes) for b in mine] == [(b.index, b.pieces, b.num_bytes) for b in first]
            assert all(b.target == rank for b in mine)
    assert wrong_parts(found, TRAINERS, FLEET) == []


@pytest.mark.parametrize(("trainers", "relays"), [(2, True), (5, True), (6, False), (8, False)])
def test_ranks_relay_by_themselves_only_where_rollout_nics_outnumber_trainer_nics(trainers, relays):
    found = made(spread.mesh(SPECS, dp_shard=trainers), relay="auto")
    assert found.relay is relays
    assert ("would not be faster" in found.relay_reason) is not relays


def test_slow_rollout_nics_count_for_less():
    slow = Topology(targets={rank: Port(ingress=10**9) for rank in FLEET.ranks})
    assert made(relay="auto").relay
    assert not made(relay="auto", topology=slow).relay


def test_nothing_is_relayed_where_no_two_ranks_want_the_same():
    found = made(target=spread.mesh(SPECS, tp=4), relay="on")
    assert not found.relay
    assert found.bytes_out == made(target=spread.mesh(SPECS, tp=4), relay="off").bytes_out
