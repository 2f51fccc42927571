import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import ParallelSection
from cosmos_rl_core.parallel.dims import AXES, ParallelDims

sizes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES})


@given(sizes)
def test_every_rank_has_a_place_of_its_own(sizes):
    dims = ParallelDims(**sizes)
    places = [tuple(dims.coordinates(rank).values()) for rank in range(dims.world_size)]
    assert len(set(places)) == dims.world_size
    assert places == sorted(places)  # ranks count along the innermost axis first
    assert all(place[i] < size for place in places for i, size in enumerate(dims.shape))


@given(sizes)
def test_shares_are_dealt_to_all_data_parallel_ranks_evenly(sizes):
    dims = ParallelDims(**sizes)
    held = [dims.share(rank).index for rank in range(dims.world_size)]
    assert {held.count(index) for index in range(dims.num_shares)} == {dims.pp * dims.cp * dims.tp}


def test_dp_shard_takes_what_is_left():
    dims = ParallelDims.of(ParallelSection(pp=2, tp=2), world_size=16)
    assert dims.dp_shard == 4
    assert ParallelDims.of(ParallelSection(pp=2, tp=2), world_size=None).world_size == 4


def test_ranks_that_cannot_be_shared_out_are_named():
    with pytest.raises(UserError, match=r"cp 1 x tp 3 = 3 does not divide the replica's 8 ranks"):
        ParallelDims.of(ParallelSection(tp=3), world_size=8)


def test_a_product_that_is_not_the_number_of_ranks_is_named():
    with pytest.raises(UserError, match=r"tp 2 x dp_shard 2 = 4 ranks, but the replica has 8"):
        ParallelDims.of(ParallelSection(tp=2, dp_shard=2), world_size=8)


def test_experts_borrow_ranks_that_are_there():
    with pytest.raises(UserError, match=r"ep = 4 does not divide dp_shard x cp = 3 x 2 = 6"):
        ParallelDims(dp_shard=3, cp=2, ep=4)


def test_axes_in_use_are_described():
    assert ParallelDims(pp=2, dp_shard=4, ep=2).describe() == "pp 2 x dp_shard 4 x (ep 2)"
    assert ParallelDims().describe() == "one rank"
