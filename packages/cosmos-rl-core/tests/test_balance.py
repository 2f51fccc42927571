"""Sequences dealt to ranks and microbatches."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.train.balance import QUADRATIC_LENGTH, deal, divide
from cosmos_rl_core.types import Share

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def deal_all(lengths, *, count, multiple=1, **keys):
    """The microbatches of every share."""
    return [deal(lengths, share=Share(index=i, count=count, multiple=multiple), **keys) for i in range(count)]


def costs_of_shares(lengths, shares):
    costs = [length + length**2 / QUADRATIC_LENGTH for length in lengths]
    return [sum(costs[index] for microbatch in share for index in microbatch) for share in shares]


@given(LENGTHS, st.integers(1, 100))
def test_an_undivided_batch_keeps_its_order(lengths, capacity):
    bins = deal(lengths, capacity=capacity, share=Share())
    assert [index for members in bins for index in members] == list(range(len(lengths)))
    for members, following in pairwise(bins):  # each bin is as full as it can be
        assert sum(lengths[index] for index in [*members, following[0]]) > capacity


@given(LENGTHS, st.integers(1, 100), st.integers(1, 5), st.integers(1, 3), st.integers(1, 6))
def test_every_sequence_is_in_one_microbatch_and_all_shares_have_as_many(lengths, capacity, count, multiple, group):
    groups = [index // group for index in range(len(lengths))]
    shares = deal_all(lengths, capacity=capacity, count=count, multiple=multiple, groups=groups)
    dealt = [index for share in shares for microbatch in share for index in microbatch]
    assert sorted(dealt) == list(range(len(lengths)))
    assert len({len(share) for share in shares}) == 1
    if (count, multiple) != (1, 1):
        assert len(shares[0]) % multiple == 0
    for microbatch in (microbatch for share in shares for microbatch in share):
        assert sum(lengths[index] for index in microbatch) <= capacity or len(microbatch) == 1
        assert microbatch == sorted(microbatch)


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 8))
def test_sums_of_parts_differ_by_at_most_the_costliest_item(costs, parts):
    divided = divide(costs, parts)
    assert sorted(index for part in divided for index in part) == list(range(len(costs)))
    sums = [sum(costs[index] for index in part) for part in divided]
    assert max(sums) - min(sums) <= max(costs, default=0.0) + 1e-9


def test_four_parts_of_nine_items_by_hand():
    # 9 | 8 | 7 6 | ...: the total is 40, and parts of 10 exist.
    parts = divide([9, 8, 7, 6, 4, 3, 2, 1, 0], 4)
    assert sorted(sum([9, 8, 7, 6, 4, 3, 2, 1, 0][index] for index in part) for part in parts) == [10, 10, 10, 10]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ragged_lengths_are_even_over_shares_to_three_percent(count):
    draw = random.Random(0)
    for _ in range(5):
        lengths = [min(8192, 1 + int(draw.lognormvariate(6.5, 0.9))) for _ in range(32 * count)]
        costs = costs_of_shares(lengths, deal_all(lengths, capacity=8192, count=count))
        assert max(costs) * count / sum(costs) <= 1.03


def test_groups_stay_on_one_share_where_that_is_even():
    groups = [index // 8 for index in range(128)]
    shares = deal_all([10] * 128, capacity=1000, count=4, groups=groups)
    homes = [{groups[index] for microbatch in share for index in microbatch} for share in shares]
    assert [len(home) for home in homes] == [4, 4, 4, 4]
    assert len(set.union(*homes)) == 16


def test_groups_are_cut_where_whole_ones_are_not_even():
    groups = [index // 8 for index in range(24)]  # three groups for two shares
    shares = deal_all([10] * 24, capacity=1000, count=2, groups=groups)
    assert [sum(map(len, share)) for share in shares] == [12, 12]


def test_a_group_lies_in_one_microbatch_where_it_fits():
    groups = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    for share in deal_all([10] * 16, capacity=40, count=2, groups=groups):
        assert [{groups[index] for index in microbatch} for microbatch in share] == [{groups[m[0]]} for m in share]


def test_an_undivided_batch_keeps_its_groups_whole_where_they_fit():
    groups = [0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]
    found = deal([10] * len(groups), capacity=50, share=Share(), groups=groups)
    assert found == [[0, 1, 2, 6, 12], [3, 4, 5], [7, 8, 9, 10, 11]]  # the last group is longer than a microbatch


def test_a_pipeline_gets_microbatches_of_equal_cost():
    microbatches = deal([100] * 8, capacity=800, share=Share(multiple=4))
    assert [len(microbatch) for microbatch in microbatches] == [2, 2, 2, 2]


def test_fewer_sequences_than_ranks_leave_microbatches_empty():
    assert deal_all([5, 7], capacity=10, count=4) == [[[1]], [[0]], [[]], [[]]]


def test_a_batch_of_nothing_has_no_microbatches():
    assert deal_all([], capacity=10, count=2) == [[], []]


def test_costs_may_be_given():
    shares = deal_all([10, 10, 10, 10], capacity=100, count=2, costs=[9.0, 3.0, 3.0, 3.0])
    assert shares == [[[0]], [[1, 2, 3]]]
