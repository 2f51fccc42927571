"""PPO: advantages of steps, the critic's loss, minibatches and epochs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from cosmos_rl_core.algorithms.advantages import build_step_advantages, critic_metrics, generalized
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.losses import value_loss
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.rules import group_rules
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.train.batcher import deal_minibatches
from cosmos_rl_core.train.optimizers.build import build_optimizer
from cosmos_rl_core.types import Episode, Exchange, PolicyOutputs, Prompt, Rollout, RolloutGroup, TermBatch, TrainBatch


def array(*values):
    return np.array(values, np.float32)


def episode_rollout(rewards, values, *, terms_per_step=2, loss_mask=None):
    """A rollout of len(rewards) steps with as many terms each."""
    num_terms = len(rewards) * terms_per_step
    return Rollout(
        arrays={},
        rollout_logprobs=np.zeros(num_terms, np.float32),
        versions=np.zeros(num_terms, np.int32),
        loss_mask=np.ones(num_terms, bool) if loss_mask is None else np.array(loss_mask, bool),
        episode=Episode(
            term_steps=np.repeat(np.arange(len(rewards), dtype=np.int32), terms_per_step),
            values=array(*values),
            rewards=array(*rewards),
        ),
    )


def group_of(*rollouts, sample_id=0):
    return RolloutGroup(prompt=Prompt(sample_id=sample_id, row={}), rollouts=rollouts)


def estimated(rollout, **keys):
    rules = group_rules(AlgorithmConfig(name="ppo", **keys), max_terms=100)
    return replace(rollout, episode=rules.of_steps(rollout.episode))


def test_generalized_advantages_by_hand():
    # gamma = 1/2, lambda = 1/2; the limit cut the episode off at an estimate of 4:
    # deltas    1 + 2/2 - 1 = 1,   0 + 3/2 - 2 = -1/2,   2 + 4/2 - 3 = 1
    # A_2 = 1,  A_1 = -1/2 + 1/4 = -1/4,  A_0 = 1 - 1/16 = 15/16
    advantages = generalized(array(1, 0, 2), array(1, 2, 3, 4), gamma=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [0.9375, -0.25, 1.0]


@given(
    st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=12),
    st.floats(0, 1, width=32),
    st.integers(0, 2**31),
)
@settings(max_examples=50, deadline=None)
def test_with_lambda_one_the_return_is_the_discounted_sum(rewards, gamma, seed):
    values = np.random.default_rng(seed).normal(size=len(rewards) + 1).astype(np.float32)
    rollout = estimated(episode_rollout(rewards, values), gamma=gamma, gae_lambda=1.0)
    wanted = float(values[-1])
    for step in reversed(range(len(rewards))):
        wanted = rewards[step] + gamma * wanted
        assert rollout.episode.returns[step] == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_the_value_loss_by_hand():
    # V_old = 0, clip 0.2. R = 1: V = 0.5 is held at 0.2, error 0.8. R = -1: V = 0.5, the free error 1.5 is worse.
    # huber_delta = 1: h(0.8) = 0.32, h(1.5) = 1.5 - 0.5 = 1
    values = torch.tensor([0.5, 0.5], requires_grad=True)
    loss = value_loss(values, old_values=torch.zeros(2), returns=torch.tensor([1.0, -1.0]), clip=0.2, huber_delta=1.0)
    torch.testing.assert_close(loss, torch.tensor([0.32, 1.0]))
    loss.sum().backward()
    assert values.grad.tolist() == [0.0, 1.0]  # what is held has no gradient


def test_the_whole_objective_has_a_value_term():
    terms = TermBatch(
        rollout_logprobs=torch.zeros(2),
        advantages=torch.tensor([1.0, -1.0]),
        loss_mask=torch.ones(2),
        rollout_index=torch.zeros(2, dtype=torch.int64),
        num_rollouts=1,
        values=torch.zeros(2),
        returns=torch.tensor([1.0, 3.0]),
    )
    objective = build_objective(
        AlgorithmConfig(name="ppo", value_coef=0.5, value_clip=None, value_huber_delta=None), max_terms=2
    )
    losses, _ = objective(PolicyOutputs(logprobs=torch.zeros(2), values=torch.tensor([0.0, 1.0])), terms)
    (value,) = [loss for loss in losses if loss.name == "value"]
    assert value.coef == 0.5 and value.values.tolist() == [0.5, 2.0]


def test_a_model_without_a_critic_is_told_so():
    terms = TermBatch(
        rollout_logprobs=torch.zeros(1),
        advantages=torch.zeros(1),
        loss_mask=torch.ones(1),
        rollout_index=torch.zeros(1, dtype=torch.int64),
        num_rollouts=1,
    )
    with pytest.raises(UserError, match=r"trains a critic.*grpo"):
        build_objective(AlgorithmConfig(name="ppo"), max_terms=1)(PolicyOutputs(logprobs=torch.zeros(1)), terms)


def test_advantages_are_normalised_over_trained_terms_and_returns_stay():
    # the second rollout trains only its first step: the moments are those of terms 1, 1, 3, 3 and 5, 5
    groups = [
        group_of(estimated(episode_rollout([1, 3], [0, 0, 0]), gamma=0.0)),
        group_of(estimated(episode_rollout([5, 100], [0, 0, 0], loss_mask=[1, 1, 0, 0]), gamma=0.0)),
    ]
    together = build_step_advantages(AlgorithmConfig(name="ppo"))(groups, 0)
    deviation = np.std([1, 3, 5]) + 1e-5
    np.testing.assert_allclose(
        together[0].rollouts[0].episode.advantages, [(1 - 3) / deviation, 0.0], rtol=1e-6, atol=1e-6
    )
    assert together[1].rollouts[0].episode.returns.tolist() == [5.0, 100.0]


def test_while_the_critic_warms_up_the_policy_is_left_alone():
    groups = [group_of(estimated(episode_rollout([1, 3], [0, 0, 0])))]
    seen_together = build_step_advantages(AlgorithmConfig(name="ppo", critic_warmup_steps=2))
    assert not seen_together(groups, 1)[0].rollouts[0].term_advantages.any()
    assert seen_together(groups, 2)[0].rollouts[0].term_advantages.any()


def test_explained_variance_is_one_for_a_critic_that_knows():
    perfect = estimated(episode_rollout([1, 2], [3, 2, 0]), gamma=1.0, gae_lambda=1.0)
    blind = estimated(episode_rollout([1, 2], [0, 0, 0]), gamma=1.0, gae_lambda=1.0)
    assert critic_metrics([perfect])["explained_variance"] == pytest.approx(1.0)
    assert critic_metrics([blind])["explained_variance"] == pytest.approx(0.0)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=6), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_every_step_is_dealt_into_exactly_one_minibatch(lengths, count, seed):
    if sum(lengths) < count:
        lengths = [*lengths, count]
    groups = [
        group_of(episode_rollout([0.0] * length, [0.0] * (length + 1)), sample_id=i) for i, length in enumerate(lengths)
    ]
    dealt = deal_minibatches(groups, count=count, random=np.random.default_rng(seed))
    total = {i: np.zeros(2 * length, int) for i, length in enumerate(lengths)}
    sizes = []
    for minibatch in dealt:
        sizes.append(sum(int(group.rollouts[0].loss_mask.sum()) // 2 for group in minibatch))
        for group in minibatch:
            total[group.prompt.sample_id] += group.rollouts[0].loss_mask
    assert all((counts == 1).all() for counts in total.values())
    assert max(sizes) - min(sizes) <= 1 and len(dealt) == count


def test_episodes_in_turns_are_dealt_whole():
    turns = (Exchange(text="one"), Exchange(text="two"))
    groups = [group_of(replace(episode_rollout([0, 1], [0, 0, 0]), exchanges=turns), sample_id=i) for i in range(4)]
    dealt = deal_minibatches(groups, count=2, random=np.random.default_rng(0))
    assert [len(minibatch) for minibatch in dealt] == [2, 2]
    assert sorted(group.prompt.sample_id for minibatch in dealt for group in minibatch) == [0, 1, 2, 3]
    assert all(group.rollouts[0].loss_mask.all() for minibatch in dealt for group in minibatch)


def test_without_a_critic_the_objective_has_no_value_term():
    terms = TermBatch(
        rollout_logprobs=torch.zeros(2),
        advantages=torch.tensor([1.0, -1.0]),
        loss_mask=torch.ones(2),
        rollout_index=torch.zeros(2, dtype=torch.int64),
        num_rollouts=1,
    )
    objective = build_objective(AlgorithmConfig(name="ppo", value_coef=0), max_terms=2)
    losses, metrics = objective(PolicyOutputs(logprobs=torch.zeros(2)), terms)
    assert [loss.name for loss in losses] == ["policy"] and "value" not in metrics
    with pytest.raises(ValidationError, match="value_coef = 0 is for models without a critic"):
        AlgorithmConfig(name="ppo", value_coef=0, critic_warmup_steps=3)


def test_more_minibatches_than_there_is_to_deal_name_the_key():
    group = group_of(episode_rollout([0.0, 0.0], [0.0, 0.0, 0.0]))
    with pytest.raises(UserError, match=r"minibatches = 3.* only 2 .*prompts_per_step"):
        deal_minibatches([group], count=3, random=np.random.default_rng(0))


def test_the_decoupled_ratio_divides_by_the_policy_of_the_steps_start():
    terms = TermBatch(
        rollout_logprobs=torch.tensor([-2.0]),
        advantages=torch.tensor([1.0]),
        loss_mask=torch.ones(1),
        rollout_index=torch.zeros(1, dtype=torch.int64),
        num_rollouts=1,
        old_logprobs=torch.tensor([-1.5]),
    )
    objective = build_objective(AlgorithmConfig(name="grpo", old_logprobs="policy", correction_cap=10.0), max_terms=1)
    _, metrics = objective(PolicyOutputs(logprobs=torch.tensor([-1.4])), terms)
    assert metrics["ratio_mean"].item() == pytest.approx(np.exp(0.1))  # policy / start
    assert metrics["correction_weight"].item() == pytest.approx(np.exp(0.5))  # start / rollout


def test_groups_outside_the_bounds_of_success_are_set_aside():
    rules = group_rules(AlgorithmConfig(name="grpo", filter_low=0.1, filter_high=0.9), max_terms=4)
    kept = [rules.keep(np.array(rewards)) for rewards in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])]
    assert kept == [False, True, False]


def test_parameters_have_rates_of_their_own_by_name():
    module = nn.ModuleDict({"trunk": nn.Linear(2, 2), "value_head": nn.Linear(2, 1)})
    keys = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = build_optimizer("adamw", module, learning_rate=1e-4, rates={"value_head.*": 1e-2}, **keys)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: rates[id(p)] for name, p in module.named_parameters()} == {
        "trunk.weight": 1e-4,
        "trunk.bias": 1e-4,
        "value_head.weight": 1e-2,
        "value_head.bias": 1e-2,
    }
    with pytest.raises(UserError, match=r"critic\.\*.*trunk"):
        build_optimizer("adamw", module, learning_rate=1e-4, rates={"critic.*": 1e-2}, **keys)


class Corridor:
    """States 0 .. 3 in a row; right goes on, left ends the episode. Only the far end pays."""

    def __init__(self):
        self.logits = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
        self.values = torch.zeros(4, dtype=torch.float64, requires_grad=True)

    def episode(self, random):
        states, actions = [], []
        probabilities = self.logits.detach().softmax(-1).numpy()
        for state in range(4):
            action = int(random.random() < probabilities[state, 1])
            states.append(state)
            actions.append(action)
            if not action:
                break
        rewards = np.zeros(len(states), np.float32)
        rewards[-1] = float(len(states) == 4 and actions[-1])
        values = np.append(self.values.detach().numpy()[states], 0.0).astype(np.float32)
        return states, actions, episode_rollout(rewards, values, terms_per_step=1)


def test_ppo_learns_a_corridor_whose_end_alone_pays():
    config = AlgorithmConfig(name="ppo", value_huber_delta=None)
    rules, objective = group_rules(config, max_terms=4), build_objective(config, max_terms=4)
    seen_together = build_step_advantages(config)
    world, random = Corridor(), np.random.default_rng(0)
    optimizer = torch.optim.Adam([world.logits, world.values], lr=0.05)
    for step in range(40):
        episodes = [world.episode(random) for _ in range(16)]
        rollouts = [replace(r, episode=rules.of_steps(r.episode)) for _, _, r in episodes]
        rollouts = [group.rollouts[0] for group in seen_together([group_of(r) for r in rollouts], step)]
        states = torch.tensor([s for each, _, _ in episodes for s in each])
        actions = torch.tensor([a for _, each, _ in episodes for a in each])
        old = world.logits.detach().log_softmax(-1)[states, actions]
        terms = TermBatch(
            rollout_logprobs=old,
            advantages=torch.tensor(np.concatenate([r.term_advantages for r in rollouts])).double(),
            loss_mask=torch.ones(len(states), dtype=torch.float64),
            rollout_index=torch.zeros(len(states), dtype=torch.int64),
            num_rollouts=1,
            values=torch.tensor(np.concatenate([r.episode.values[:-1] for r in rollouts])).double(),
            returns=torch.tensor(np.concatenate([r.episode.returns for r in rollouts])).double(),
        )
        counts = TrainBatch(microbatches=(), num_terms=len(states), num_rollouts=16)
        for _ in range(4):
            logprobs = world.logits.log_softmax(-1)[states, actions]
            losses, _ = objective(PolicyOutputs(logprobs=logprobs, values=world.values[states]), terms)
            weights, normalizer = objective.term_weights(terms), objective.normalizer(counts)
            loss = sum(each.coef * (weights * each.values).sum() / normalizer for each in losses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    reached = world.logits.softmax(-1)[:, 1].prod().item()
    assert reached > 0.8  # 1/16 at first
    assert world.values[0].item() == pytest.approx(reached, abs=0.25)
