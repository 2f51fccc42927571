"""Joining and leaving change nothing for the others."""

import pytest
from transfer_oracle import wrong_parts

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout import spread
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import plan

SPECS = [
    WeightSpec(name="embed_tokens.weight", shape=(100, 24), dtype="float32"),
    *(WeightSpec(name=f"layers.{i}.up_proj.weight", shape=(64, 24), dtype="bfloat16") for i in range(9)),
]
TRAINERS = spread.mesh(SPECS, dp_replicate=3, dp_shard=2)
FLEET = spread.replicas(spread.mesh(SPECS, tp=2), 3)


def fleet_plan():
    return plan(TRAINERS, FLEET, relay="off", bucket_bytes=2048)


def test_a_join_leaves_all_other_streams_the_same_objects():
    before = fleet_plan()
    streams = dict(before.streams)
    newcomer = spread.mesh(SPECS, tp=4, first_rank=100)
    after = before.join(newcomer)
    assert all(after.streams[pair] is stream for pair, stream in streams.items())
    assert {target for _, target in after.pairs} == {*FLEET.ranks, 100, 101, 102, 103}
    assert wrong_parts(after, TRAINERS, Manifest.merge([FLEET, newcomer])) == []
    assert after.digest != before.digest


def test_a_leave_leaves_all_other_streams_the_same_objects():
    before = fleet_plan()
    streams = dict(before.streams)
    after = before.leave([2, 3])
    assert dict(after.streams) == {pair: stream for pair, stream in streams.items() if pair[1] not in (2, 3)}
    assert all(after.streams[pair] is streams[pair] for pair in after.pairs)
    assert after.stream(0, 2) == ()
    assert after.total_bytes == after.lower_bound == before.total_bytes * 2 // 3


def test_one_rank_of_a_replica_may_leave():
    after = fleet_plan().leave([3])
    assert 3 not in after.bytes_in
    assert after.total_bytes == sum(after.bytes_out.values()) == after.lower_bound


def test_a_fleet_that_grew_is_planned_as_if_it_had_been_there():
    grown = plan(TRAINERS, FLEET.only([0, 1]), relay="off", bucket_bytes=2048)
    for ranks in ([2, 3], [4, 5]):
        grown = grown.join(FLEET.only(ranks))
    assert grown.digest == fleet_plan().digest
    assert grown.bytes_out == fleet_plan().bytes_out


def test_the_last_replica_may_leave():
    empty = fleet_plan().leave(FLEET.ranks)
    assert empty.pairs == () and empty.total_bytes == empty.lower_bound == 0
    assert set(empty.bytes_out.values()) == {0}
    assert empty.join(FLEET.only([0, 1])).total_bytes == fleet_plan().total_bytes // 3


def test_who_joins_brings_new_ranks():
    with pytest.raises(LayoutError, match=r"target ranks \[0, 1\] are in the plan"):
        fleet_plan().join(FLEET.only([0, 1]))


def test_who_leaves_is_known():
    with pytest.raises(LayoutError, match=r"target ranks \[9\] are not in the plan"):
        fleet_plan().leave([0, 9])


def test_who_joins_wants_the_same_tensors():
    with pytest.raises(LayoutError, match=r"the target lacks embed_tokens\.weight"):
        fleet_plan().join(spread.mesh(SPECS[1:], tp=2, first_rank=10))
