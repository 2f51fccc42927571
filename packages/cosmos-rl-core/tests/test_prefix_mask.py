"""Tokens that rollouts of different reward share are masked, by a formula written a second way."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.algorithms.rules import mask_prefixes


def masked(tokens, rewards, *, at_least=1, masks=None):
    """Number of first terms of each rollout that are masked."""
    masks = masks or [np.ones(len(each), bool) for each in tokens]
    kept = mask_prefixes([np.array(each, np.int32) for each in tokens], masks, np.array(rewards), at_least=at_least)
    return [int(mask.sum() - after.sum()) for mask, after in zip(masks, kept, strict=True)]


@pytest.mark.parametrize(
    ("tokens", "rewards", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4]], [1, 0], [2, 2]),
        ([[1, 2, 3], [1, 2, 4]], [1, 1], [0, 0]),  # equal rewards: the prefix is no contradiction
        ([[1, 2], [3, 4]], [1, 0], [0, 0]),
        ([[1, 2], [1, 2, 3]], [1, 0], [0, 2]),  # the first would have no term left
        ([[1, 2], [1, 2]], [1, 0], [0, 0]),
        ([[1, 2, 3], [1, 2, 4], [1, 5, 6]], [1, 0, 0], [2, 2, 0]),  # the third shares a prefix that goes on for two
        ([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7]], [1, 0, 1, 1], [2, 2, 0, 0]),
        ([[1, 2], [1, 3], [1, 4]], [0.5, 0.5, 0.25], [1, 1, 1]),
    ],
)
def test_by_hand(tokens, rewards, expected):
    assert masked(tokens, rewards) == expected


def test_shorter_prefixes_than_the_minimum_are_trained_on():
    tokens = [[1, 2, 3], [1, 2, 4]]
    assert masked(tokens, [1, 0], at_least=2) == [2, 2]
    assert masked(tokens, [1, 0], at_least=3) == [0, 0]


def test_terms_that_were_masked_before_stay_masked():
    masks = [np.array([0, 1, 1, 0], bool), np.array([0, 1, 0, 0], bool)]
    kept = mask_prefixes([np.arange(4), np.array([0, 1, 9, 9])], masks, np.array([1.0, 0.0]), at_least=1)
    assert kept[0].tolist() == [False, False, True, False]
    assert kept[1].tolist() == [False, True, False, False]  # it would have no term left


def same_until(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def formula(tokens, rewards, at_least):
    """For rollout i: n_i = max_j lcp(i, j); its first n_i terms are masked if n_i >= at_least, no two of those that
    share them share more, their rewards differ, and T_i > n_i.
    """
    found = []
    for own in range(len(tokens)):
        others = [other for other in range(len(tokens)) if other != own]
        length = max((same_until(tokens[own], tokens[other]) for other in others), default=0)
        members = [
            each for each in range(len(tokens)) if each == own or same_until(tokens[own], tokens[each]) >= length
        ]
        longest = max((same_until(tokens[a], tokens[b]) for a, b in combinations(members, 2)), default=0)
        differ = len({rewards[each] for each in members}) > 1
        valid = length >= at_least and longest == length and differ and len(tokens[own]) > length
        found.append(length if valid else 0)
    return found


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.sampled_from([0.0, 1.0])),
        min_size=1,
        max_size=7,
    ),
    st.integers(1, 3),
)
def test_the_mask_is_the_formula(rollouts, at_least):
    tokens, rewards = [list(each) for each in zip(*rollouts, strict=True)]
    assert masked(tokens, rewards, at_least=at_least) == formula(tokens, rewards, at_least)
