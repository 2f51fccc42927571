"""Formulas of other projects' keys, beside the keys that docs/algorithms/same_number_elsewhere.md says are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from cosmos_rl_core.algorithms.advantages import build_advantage, build_batch_advantage
from cosmos_rl_core.algorithms.aggregation import aggregated
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.types import PolicyOutputs, TermBatch, TrainBatch

MAX_TERMS = 8
LENGTHS = (3, 1, 2)
MASK = (1, 1, 0, 1, 1, 1)  # 2, 1 and 2 trained terms
PROMPTS = ([1.0, 0.0, 0.0, 3.0], [5.0, 5.0, 6.0, 6.0])


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def policy():
    return tensor(-0.5, -1.2, -0.3, -0.9, -0.4, -1.1).requires_grad_()


def entropies():
    return tensor(1.1, 0.2, 5.0, 0.8, 0.4, 0.7).requires_grad_()


def batch(*, advantages=(1.0, -2.0, 0.5), ref_logprobs=None):
    """A microbatch that is a whole step, and its counts."""
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    terms = TermBatch(
        rollout_logprobs=tensor(-0.9, -0.8, -2.0, -1.0, -0.1, -1.3),  # log-ratios 0.4 -0.4 . 0.1 -0.3 0.2
        advantages=tensor(*advantages)[index],
        loss_mask=tensor(*MASK),
        rollout_index=index,
        num_rollouts=len(LENGTHS),
        ref_logprobs=ref_logprobs,
    )
    return terms, TrainBatch(microbatches=(), num_terms=sum(MASK), num_rollouts=len(LENGTHS))


def loss_of(which, outputs, terms, counts, **keys):
    """One named loss of the objective, without its coefficient."""
    objective = build_objective(AlgorithmConfig(**keys), max_terms=MAX_TERMS)
    (found,) = [loss for loss in objective(outputs, terms)[0] if loss.name == which]
    return aggregated(found, objective, terms=terms, batch=counts)


def gradient(value, of):
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def rows(values):
    """[T] -> trained values of each rollout."""
    trained = torch.tensor(MASK, dtype=torch.bool).split(LENGTHS)
    return [each[mask] for each, mask in zip(values.split(LENGTHS), trained, strict=True)]


# Advantages


@pytest.mark.parametrize(
    ("keys", "ddof", "epsilon"),
    [
        ({"name": "grpo"}, 0, 1e-6),  # cosmos-rl
        ({"name": "dapo"}, 1, 1e-6),  # verl
        ({"name": "grpo", "std_ddof": 1, "std_epsilon": 1e-4}, 1, 1e-4),  # TRL
    ],
)
def test_the_groups_standard_deviation_has_the_divisor_and_the_epsilon_of_its_source(keys, ddof, epsilon):
    rewards = np.array(PROMPTS[0])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + epsilon)
    np.testing.assert_allclose(build_advantage(AlgorithmConfig(**keys))(rewards), wanted, rtol=1e-13)


@pytest.mark.parametrize("ddof", [0, 1])
def test_global_std_is_that_of_all_rewards_and_pooled_std_that_around_the_groups_own_means(ddof):
    groups = [np.array(prompt) for prompt in PROMPTS]
    everything = np.concatenate(groups)
    # deviations 0 -1 -1 2 and -.5 -.5 .5 .5: squares sum to 6 and 1
    divisors = {"global_std": everything.std(ddof=ddof), "pooled_std": np.sqrt(7 / (8 - 2 * ddof))}
    assert divisors["global_std"] > 2 * divisors["pooled_std"]
    for name, divisor in divisors.items():
        keys = {"advantage": name, "std_ddof": ddof, "std_epsilon": 1e-4}
        found = build_batch_advantage(AlgorithmConfig.model_validate(keys))
        assert found is not None
        wanted = [(rewards - rewards.mean()) / (divisor + 1e-4) for rewards in groups]
        np.testing.assert_allclose(found(groups), wanted, rtol=1e-13)


def test_the_old_name_of_the_pooled_deviation_is_answered_with_both_readings():
    with pytest.raises(ValidationError, match=r'"pooled_std".*"global_std"'):
        AlgorithmConfig.model_validate({"advantage": "batch_std"})


def test_keys_of_a_deviation_that_nothing_divides_by_are_refused():
    with pytest.raises(ValidationError, match=r'std_ddof\n.*"global_std" or "group_std" or "pooled_std"'):
        AlgorithmConfig(name="dr_grpo", std_ddof=1)


# Entropy


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "rloo", "dapo"])
def test_the_entropy_bonus_is_aggregated_as_the_loss_or_is_trls_mean_over_terms(name):
    entropy = entropies()
    outputs = PolicyOutputs(logprobs=policy(), entropy=entropy)
    terms, counts = batch()
    keys = {"name": name, "entropy_coef": 0.01}
    by_rollout = rows(entropy)
    as_the_loss = {
        "grpo": torch.stack([each.mean() for each in by_rollout]).mean(),
        "gspo": torch.stack([each.mean() for each in by_rollout]).mean(),
        "dr_grpo": torch.stack([each.sum() / MAX_TERMS for each in by_rollout]).mean(),
        "rloo": torch.stack([each.sum() for each in by_rollout]).mean(),
        "dapo": torch.cat(by_rollout).mean(),
    }[name]
    mean_over_terms = torch.cat(by_rollout).mean()
    for wanted, found in (
        (as_the_loss, loss_of("entropy", outputs, terms, counts, **keys)),
        (mean_over_terms, loss_of("entropy", outputs, terms, counts, **keys, entropy_aggregation="term_mean")),
    ):
        torch.testing.assert_close(found, -wanted)
        torch.testing.assert_close(gradient(found, entropy), -gradient(wanted, entropy))


def test_the_entropys_aggregation_leaves_the_policy_loss_alone():
    outputs = PolicyOutputs(logprobs=policy(), entropy=entropies())
    terms, counts = batch()
    keys = {"name": "dr_grpo", "entropy_coef": 0.01}
    ours = loss_of("policy", outputs, terms, counts, **keys)
    assert ours == loss_of("policy", outputs, terms, counts, **keys, entropy_aggregation="term_mean")


# Sequence ratios


@pytest.mark.parametrize("loss", ["sequence_clipped", "sequence_clipped_token"])
def test_gspo_with_a_correction_moves_all_terms_alike_or_each_by_its_own_weight(loss):
    logprobs = policy()
    terms, counts = batch()
    weight = (logprobs.detach() - terms.rollout_logprobs).exp().clamp(max=1.1)
    assert any(each.std() > 0.01 for each in rows(weight) if len(each) > 1)
    keys = {"name": "gspo", "loss": loss, "old_logprobs": "policy", "correction_cap": 1.1}
    value = loss_of("policy", PolicyOutputs(logprobs=logprobs), terms, counts, **keys)
    # s = 1: a rollout's loss is -A mean(w); its gradient by each of n log-probs -A mean(w) / n (TRL) or -A w / n (verl)
    weights, advantages = rows(weight), rows(terms.advantages)
    wanted = torch.stack([-(a * w).mean() for a, w in zip(advantages, weights, strict=True)]).mean()
    torch.testing.assert_close(value, wanted)
    per_term = [w.mean().expand(len(w)) if loss == "sequence_clipped" else w for w in weights]
    pulls = [-a * w / len(w) / len(LENGTHS) for a, w in zip(advantages, per_term, strict=True)]
    torch.testing.assert_close(torch.cat(rows(gradient(value, logprobs))), torch.cat(pulls))


def test_without_a_correction_both_sequence_losses_are_one():
    logprobs = policy()
    terms, counts = batch()
    found = []
    for loss in ("sequence_clipped", "sequence_clipped_token"):
        keys = {"name": "gspo", "loss": loss, "clip_low": 0.2, "clip_high": 0.2}
        value = loss_of("policy", PolicyOutputs(logprobs=logprobs), terms, counts, **keys)
        found.append((value, gradient(value, logprobs)))
    torch.testing.assert_close(*found)


def test_luspo_weighs_a_rollouts_loss_by_its_length():
    logprobs = policy()
    terms, counts = batch()
    found = loss_of("policy", PolicyOutputs(logprobs=logprobs), terms, counts, name="luspo", clip_low=1.0, clip_high=9)
    ratios = [each.mean().exp() for each in rows(logprobs - terms.rollout_logprobs)]
    lengths, advantages = (2, 1, 2), (1.0, -2.0, 0.5)
    wanted = -sum(n * s * a for n, s, a in zip(lengths, ratios, advantages, strict=True)) / 3
    torch.testing.assert_close(found, wanted)


def test_terms_with_advantages_of_their_own_want_gspo_token():
    with pytest.raises(ValidationError, match="sequence_clipped_token"):
        AlgorithmConfig(name="ppo", loss="sequence_clipped")
    AlgorithmConfig(name="ppo", loss="sequence_clipped_token")


# Caps and the KL


def test_cispos_upper_bound_is_trls_epsilon_high_minus_one():
    logprobs = policy()
    terms, counts = batch()
    epsilon_high = 1.2
    keys = {"name": "cispo", "clip_high": epsilon_high - 1}
    found = loss_of("policy", PolicyOutputs(logprobs=logprobs), terms, counts, **keys)
    ratio = (logprobs - terms.rollout_logprobs).exp()
    assert (ratio > epsilon_high).any()
    wanted = -(ratio.clamp(max=epsilon_high) * terms.advantages * logprobs * terms.loss_mask).sum() / sum(MASK)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kl_ratio", ["rollout", "old"])
def test_the_unbiased_kl_has_the_ratio_to_the_sampler_or_trls_to_the_old_policy(kl_ratio):
    logprobs, ref = policy(), policy().detach() - 0.3
    terms, counts = batch(ref_logprobs=ref)
    keys = {"name": "dapo", "old_logprobs": "policy", "correction_cap": 1.1, "kl_coef": 0.1, "kl_unbiased": True}
    found = loss_of("kl", PolicyOutputs(logprobs=logprobs), terms, counts, **keys, kl_ratio=kl_ratio)
    ratio = (logprobs - logprobs.detach()).exp()
    if kl_ratio == "rollout":
        ratio = ratio * (logprobs.detach() - terms.rollout_logprobs).exp().clamp(max=1.1)
    d = ref - logprobs
    wanted = (ratio * (d.exp() - 1 - d) * terms.loss_mask).sum() / sum(MASK)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient(found, logprobs), gradient(wanted, logprobs))
