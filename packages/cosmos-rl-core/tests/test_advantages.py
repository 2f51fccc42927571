from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_rl_core.algorithms.advantages import (
    ADVANTAGES,
    build_advantage,
    build_batch_advantage,
    group_mean,
    group_std,
    leave_one_out,
)
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.rules import group_rules, has_signal, soft_overlong
from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.errors import UserError

REWARDS = np.array([1.0, 0.0, 0.0, 3.0])  # mean 1, deviations 0 -1 -1 2, variance (0 + 1 + 1 + 4) / 4 = 1.5

groups = st.lists(st.floats(-100, 100), min_size=2, max_size=16).map(np.array)
every_advantage = pytest.mark.parametrize("name", sorted(ADVANTAGES))


def test_group_mean_by_hand():
    assert group_mean(REWARDS).tolist() == [0.0, -1.0, -1.0, 2.0]


def test_group_std_by_hand():
    deviation = np.sqrt(1.5) + 1e-6
    np.testing.assert_allclose(group_std(REWARDS), [0, -1 / deviation, -1 / deviation, 2 / deviation], rtol=1e-15)


def test_leave_one_out_by_hand():
    # the others' means are 3/3, 4/3, 4/3, 1/3
    np.testing.assert_allclose(leave_one_out(REWARDS), [0, -4 / 3, -4 / 3, 8 / 3], rtol=1e-14)


@given(rewards=groups)
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards):
    others = [np.delete(rewards, i).mean() for i in range(len(rewards))]
    np.testing.assert_allclose(leave_one_out(rewards), rewards - others, atol=1e-10)


@every_advantage
@given(rewards=groups)
def test_advantages_of_a_group_sum_to_zero(name, rewards):
    assert abs(ADVANTAGES[name](rewards).sum()) < 1e-8


@every_advantage
@given(rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=16), shift=st.integers(-1000, 1000))
def test_a_constant_added_to_all_rewards_changes_nothing(name, rewards, shift):
    rewards = np.array(rewards, dtype=np.float64)
    np.testing.assert_allclose(ADVANTAGES[name](rewards + shift), ADVANTAGES[name](rewards), atol=1e-12)


@given(rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=16), scale=st.integers(1, 1000))
def test_group_std_does_not_see_the_scale_of_rewards(rewards, scale):
    rewards = np.array(rewards, dtype=np.float64)
    np.testing.assert_allclose(group_std(rewards * scale), group_std(rewards), atol=2e-5)


@every_advantage
@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 16))
def test_equal_rewards_have_advantages_of_exactly_zero(name, reward, size):
    assert not ADVANTAGES[name](np.full(size, reward)).any()


@every_advantage
def test_a_group_of_one_is_an_error_that_names_the_key(name):
    with pytest.raises(UserError, match="group_size"):
        ADVANTAGES[name](np.array([1.0]))


def test_advantage_clip_limits_both_sides():
    advantage = build_advantage(AlgorithmConfig(name="dr_grpo", advantage_clip=1.5))
    assert advantage(REWARDS).tolist() == [0.0, -1.0, -1.0, 1.5]


@pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if not row.rows and name != "ppo"))
def test_every_algorithm_of_the_table_prefers_the_better_rollout(name):
    advantages = build_advantage(AlgorithmConfig(name=name))(REWARDS)
    assert advantages.argmax() == 3 and advantages.dtype == np.float64


MY_ALGORITHMS = """
from cosmos_rl_core.algorithms.table import Algorithm

TWICE = Algorithm(name="twice", title="", paper="", summary="", advantage=lambda rewards: 2 * rewards)
TOTAL = Algorithm(name="total", title="", paper="", summary="", advantage=lambda rewards: rewards.sum())
"""


@pytest.fixture
def my_advantages(tmp_path, monkeypatch):
    (tmp_path / "my_advantages.py").write_text(MY_ALGORITHMS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_advantages")
def test_an_advantage_of_your_own_replaces_the_named_one():
    advantage = build_advantage(AlgorithmConfig(name="my_advantages:TWICE"))
    assert advantage(REWARDS).tolist() == [2.0, 0.0, 0.0, 6.0]


@pytest.mark.usefixtures("my_advantages")
def test_an_advantage_of_the_wrong_shape_is_an_error():
    with pytest.raises(UserError, match="4 finite numbers"):
        build_advantage(AlgorithmConfig(name="my_advantages:TOTAL"))(REWARDS)


def test_soft_overlong_by_hand():
    # max_terms 10, buffer 4: 0 up to 6 terms, then -1/4 a term
    lengths, whole = np.array([3, 6, 7, 9, 10]), np.zeros(5, dtype=bool)
    penalties = soft_overlong(lengths, whole, max_terms=10, buffer_terms=4)
    assert penalties.tolist() == [0.0, 0.0, -0.25, -0.75, -1.0]


def test_a_rollout_cut_by_any_limit_gets_the_whole_penalty():
    # cut at 3 terms because the context was full
    assert soft_overlong(np.array([3]), np.array([True]), max_terms=10, buffer_terms=4).tolist() == [-1.0]


def test_has_signal_only_where_rewards_differ():
    assert has_signal(REWARDS)
    assert not has_signal(np.array([0.1 + 0.2, 0.3]))  # the same reward but for rounding


def test_rules_of_dapo_filter_and_shape():
    rules = group_rules(AlgorithmConfig(name="dapo", overlong_buffer_terms=4, overlong_penalty=2.0), max_terms=10)
    assert rules.keep is has_signal
    assert rules.shape_reward is not None
    shaped = rules.shape_reward(np.array([1.0, 1.0]), np.array([5, 8]), np.array([False, False]))
    assert shaped.tolist() == [1.0, 0.0]  # 8 terms are half into the buffer: 1 - 2 * 0.5


def test_rules_of_grpo_leave_rewards_and_groups_alone():
    rules = group_rules(AlgorithmConfig(name="grpo"), max_terms=10)
    assert rules.keep is None and rules.shape_reward is None


def test_an_overlong_buffer_longer_than_the_answer_is_an_error():
    with pytest.raises(UserError, match=r"overlong_buffer_terms = 20 .* max_terms = 10"):
        group_rules(AlgorithmConfig(name="dapo", overlong_buffer_terms=20), max_terms=10)


def test_the_pooled_deviation_divides_all_groups_alike_by_hand():
    seen_together = build_batch_advantage(AlgorithmConfig(name="grpo", advantage="pooled_std", advantage_clip=1.5))
    assert seen_together is not None
    groups = [np.array(rewards) for rewards in ([0.0, 2.0], [5.0, 5.0], [1.0, 7.0])]
    deviation = np.sqrt((1 + 1 + 0 + 0 + 9 + 9) / 6)
    wanted = [[-1 / deviation, 1 / deviation], [0, 0], [-1.5, 1.5]]
    np.testing.assert_allclose(seen_together(groups), wanted, atol=1e-5)


def test_other_advantages_need_nothing_but_their_group():
    assert build_batch_advantage(AlgorithmConfig(name="grpo")) is None


@pytest.mark.parametrize(
    ("options", "weights"),
    [({}, [0, 0, 0, 1]), ({"above": 1.0}, [1, 0, 0, 1]), ({"above": 9.0}, [0, 0, 0, 0])],
)
def test_raft_selects_the_best_or_all_above_a_bar(options, weights):
    assert build_advantage(AlgorithmConfig(name="raft", options=options))(REWARDS).tolist() == weights


def test_of_equal_rewards_raft_takes_the_first():
    assert build_advantage(AlgorithmConfig(name="raft"))(np.ones(3)).tolist() == [1, 0, 0]


def test_raft_takes_filters_and_refuses_keys_of_ratios():
    assert AlgorithmConfig(name="raft", filter_zero_variance=True).loss == "supervised"
    with pytest.raises(ValueError, match="does not read it"):
        AlgorithmConfig(name="raft", clip_low=0.1)
