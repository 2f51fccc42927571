"""Divergences from a teacher by hand, against exact sums, and the objective with a teacher's part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cosmos_rl_core.algorithms.config import AlgorithmConfig, TeacherSection
from cosmos_rl_core.algorithms.distill import TaughtObjective, discounted, divergence
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.recipe.load import load_config
from cosmos_rl_core.settings.base import ConfigError
from cosmos_rl_core.types import PolicyOutputs, TermBatch

every_beta = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
INDEX = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = (1.0, 1.0, 0.0, 1.0, 1.0, 1.0)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_logits(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        # p = (1/2, 1/2), q = (1/4, 3/4); m = (3/8, 5/8) for beta = 1/2
        (0.0, 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
        (1.0, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        (
            0.5,
            0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5))
            + 0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)),
        ),
    ],
)
def test_divergences_by_hand(beta, expected):
    found = divergence(tensor(0.5, 0.5).log(), tensor(0.25, 0.75).log(), beta=beta)
    assert found.item() == pytest.approx(expected, rel=1e-12)


@every_beta
def test_a_divergence_is_zero_where_both_are_equal_and_positive_elsewhere(beta):
    policy, teacher = (random_logits(seed, 50, 9).log_softmax(-1) for seed in (0, 1))
    assert divergence(policy, policy, beta=beta).abs().max() < 1e-14
    assert divergence(policy, teacher, beta=beta).min() > 1e-3


@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
def test_discounted_sums_end_with_their_rollout(discount):
    values = random_logits(3, len(INDEX))
    expected = [
        sum(discount ** (k - t) * values[k] for k in range(t, len(INDEX)) if INDEX[k] == INDEX[t])
        for t in range(len(INDEX))
    ]
    torch.testing.assert_close(discounted(values, INDEX, discount=discount), torch.stack(expected))


def sequence_gradients(advantage):
    """Gradient of E[sum_t A_t log p_t], by an exact sum over both tokens of all sequences of two, and of -KL.

    The second token's distribution depends on the first.
    """
    logits = random_logits(5, 4, 3).requires_grad_()
    policy, teacher = logits.log_softmax(-1), random_logits(6, 4, 3).log_softmax(-1)
    surrogate = kl = tensor(0.0).sum()
    for first in range(3):
        for second in range(3):
            logprobs = torch.stack([policy[0, first], policy[1 + first, second]])
            of_teacher = torch.stack([teacher[0, first], teacher[1 + first, second]])
            probability = logprobs.sum().exp()
            advantages = advantage(policy, teacher, logprobs.detach(), of_teacher, first=first)
            surrogate = surrogate + probability.detach() * (advantages * logprobs).sum()
            kl = kl + probability * (logprobs - of_teacher).sum()
    gradients = torch.autograd.grad(surrogate, logits, retain_graph=True)[0], torch.autograd.grad(-kl, logits)[0]
    return gradients


def test_the_advantage_has_the_gradient_of_the_sequence_kl():
    def advantage(policy, teacher, logprobs, of_teacher, *, first):
        return -discounted(logprobs - of_teacher, torch.zeros(2), discount=1.0)

    found, expected = sequence_gradients(advantage)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected)


def test_a_detached_divergence_as_advantage_teaches_nothing():
    def advantage(policy, teacher, logprobs, of_teacher, *, first):
        states = torch.tensor([0, 1 + first])
        return -divergence(policy[states].detach(), teacher[states], beta=0.5)

    found, _ = sequence_gradients(advantage)
    assert found.abs().max() < 1e-15


def terms(**changes):
    size = len(INDEX)
    batch = TermBatch(
        rollout_logprobs=random_logits(7, size) - 2,
        advantages=tensor(1, 1, 1, -1, -1, 2),
        loss_mask=tensor(*MASK),
        rollout_index=INDEX,
        num_rollouts=3,
    )
    return replace(batch, **changes)


def outputs(**changes):
    logprobs = (random_logits(8, len(INDEX)) - 2).requires_grad_()
    return PolicyOutputs(logprobs=logprobs, entropy=torch.zeros(len(INDEX), dtype=torch.float64), **changes)


def taught(algorithm="grpo", **keys):
    task = build_objective(AlgorithmConfig.model_validate({"name": algorithm}), max_terms=4)
    return task, TaughtObjective(task, TeacherSection(path="teacher", **keys))


def test_a_divergence_is_a_loss_beside_the_tasks():
    task, objective = taught(coef=0.5, task_coef=2.0)
    values = torch.full((len(INDEX),), torch.nan, dtype=torch.float64).masked_fill(tensor(*MASK) > 0, 3.0)
    losses, _ = objective(outputs(tensors={"teacher": values}), terms())
    expected, _ = task(outputs(), terms())
    assert [(loss.name, loss.coef) for loss in losses] == [("policy", 2.0), ("teacher", 0.5)]
    torch.testing.assert_close(losses[0].values, expected[0].values)
    assert losses[1].values.tolist() == [3, 3, 0, 3, 3, 3]


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_alone_it_is_the_only_loss(algorithm):
    _, objective = taught(algorithm, task_coef=0.0)
    losses, _ = objective(outputs(tensors={"teacher": torch.ones(len(INDEX))}), terms())
    assert [loss.name for loss in losses] == ["teacher"]


def test_an_advantage_is_that_of_the_task_less_the_kl_of_sampled_tokens():
    task, objective = taught(loss="advantage", coef=0.5, task_coef=2.0)
    of_teacher = random_logits(9, len(INDEX)) - 2
    batch = terms(teacher={"logprobs": of_teacher, "agreement": tensor(1, 0, 1, 0, 1, 1)})
    found, metrics = objective(outputs(), batch)
    kl = (batch.rollout_logprobs - of_teacher) * batch.loss_mask
    expected, _ = task(outputs(), replace(batch, advantages=2 * batch.advantages - 0.5 * kl))
    torch.testing.assert_close(found[0].values, expected[0].values)
    torch.testing.assert_close(metrics["teacher_kl"], kl)
    assert metrics["teacher_agreement"].tolist() == [1, 0, 1, 0, 1, 1]


def recipe(**changes):
    tables = {
        "run": {"domain": "cosmos_rl_core.testing.tiny:TINY", "name": "taught", "max_steps": 1},
        "reward": {"functions": [{"name": "hits"}]},
        "teacher": {"path": "teacher"},
    }
    return {**tables, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": {"path": "t", "discount": 0.5}}, 'loss = "divergence" does not read discount'),
        ({"teacher": {"path": "t", "loss": "advantage", "top_k": 4}}, 'loss = "advantage" does not read top_k'),
        ({"reward": {}}, "task_coef = 0"),
        ({"teacher": {"path": "t", "loss": "advantage"}, "algorithm": {"name": "sft"}, "reward": None}, "teacher.loss"),
        (
            {"teacher": {"path": "t", "task_coef": 0.0}, "reward": {}, "algorithm": {"filter_zero_variance": True}},
            "no rewards to compare",
        ),
        ({"teacher": {}}, "path"),
    ],
)
def test_keys_that_do_not_fit_are_refused(changes, message):
    tables = {name: table for name, table in recipe(**changes).items() if table is not None}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        load_config(tables)


def test_alone_it_needs_no_reward_and_no_group():
    config = load_config(recipe(teacher={"path": "t", "task_coef": 0.0}, reward={}, rollout={"group_size": 1}))
    assert config.is_taught_alone
