"""The objective of an algorithm beside the code of TRL's GRPOTrainer, called for real: equal in value and gradient."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.train.learner import smallest_of_share
from cosmos_rl_core.types import PolicyOutputs, TermBatch, TrainBatch

trl = pytest.importorskip("trl", reason="trl is not installed")
pytestmark = [  # while it is imported
    pytest.mark.filterwarnings("ignore:TRL currently supports vLLM"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LENGTHS = (5, 1, 3, 7, 2, 4)
LONGEST = max(LENGTHS)


class OneProcess:
    num_processes, sync_gradients = 1, True

    def gather(self, values):
        return values

    def gather_for_metrics(self, values):
        return values

    def reduce(self, values, reduction):
        return values

    def pad_across_processes(self, values, dim, pad_index):
        return values


def peer_loss(logprobs, inputs, *, entropies, **options):
    """TRL's loss of padded rows [B, LONGEST]."""
    args = SimpleNamespace(
        delta=None,
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.25,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
    )
    trainer = object.__new__(trl.GRPOTrainer)
    given = {
        "args": args,
        "model": SimpleNamespace(training=True),
        "accelerator": OneProcess(),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": "importance_sampling_ratio" in inputs,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LONGEST,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "_metrics": {"train": defaultdict(list)},
        "_get_per_token_logps_and_entropies": lambda *a, **k: (logprobs, entropies, None),
        **options,
    }
    trainer.__dict__.update(given)
    trainer.args.steps_per_generation = 1
    return trainer._compute_loss(None, inputs)


def padded(values):
    rows = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.float64)
    for row, part in enumerate(values.split(LENGTHS)):
        rows[row, : len(part)] = part
    return rows


def compared(keys, options, *, seed, ratio=None, share=None):
    """(our loss, our gradient, TRL's loss, TRL's gradient) of the same random terms."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    policy = -3 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.05
    rollout = policy + torch.randn(count, generator=generator, dtype=torch.float64) / 3
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    entropy = torch.rand(count, generator=generator, dtype=torch.float64)
    policy.requires_grad_()
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    terms = TermBatch(
        rollout_logprobs=rollout,
        advantages=advantages[index],
        loss_mask=torch.ones(count, dtype=torch.float64),
        rollout_index=index,
        num_rollouts=len(LENGTHS),
    )
    if share is not None:
        least = smallest_of_share(entropy.float(), share, sum_counts=lambda counts: counts)
        terms = replace(terms, high_entropy=(entropy.float() >= least).double())
        entropy = entropy.float().double()  # the peer compares in float32
    config = AlgorithmConfig(**keys)
    objective = build_objective(config, max_terms=LONGEST)
    losses, _ = objective(PolicyOutputs(logprobs=policy, entropy=entropy), terms)
    counts = TrainBatch(microbatches=(), num_terms=count, num_rollouts=len(LENGTHS))
    weights = objective.term_weights(terms)
    ours = sum(part.coef * (weights * part.values).sum() for part in losses) / objective.normalizer(counts)
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long),
        "completion_mask": padded(torch.ones(count, dtype=torch.float64)).long(),
        "advantages": advantages,
        "num_items_in_batch": torch.tensor(float(count), dtype=torch.float64),
    }
    if ratio is None:
        inputs["old_per_token_logps"] = padded(rollout)
    else:
        inputs["old_per_token_logps"] = padded(policy.detach())
        inputs["importance_sampling_ratio"] = ratio(padded(policy.detach() - rollout))
    theirs = peer_loss(padded(policy), inputs, entropies=padded(entropy), **options)
    return ours, *torch.autograd.grad(ours, policy), theirs, *torch.autograd.grad(theirs, policy)


def assert_equal(ours, our_gradient, theirs, their_gradient):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-9, atol=1e-12)
    assert our_gradient.abs().max() > 1e-3


every_seed = pytest.mark.parametrize("seed", range(5))


@every_seed
def test_sapo(seed):
    keys = {"name": "sapo", "sapo_temperature_negative": 1.25}  # 1.05 is rounded to float32 there
    assert_equal(*compared(keys, {"loss_type": "sapo"}, seed=seed))


@every_seed
def test_vespo(seed):
    assert_equal(*compared({"name": "vespo"}, {"loss_type": "vespo"}, seed=seed))


@every_seed
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_corrections_of_whole_rollouts(correction, seed):
    keys = {"name": "dapo", "old_logprobs": "policy", "correction": correction, "correction_level": "sequence"}

    def ratio(log_weights):
        weight = log_weights.sum(1, keepdim=True).exp()
        return weight.clamp(max=2.0) if correction == "truncate" else weight.masked_fill(weight > 2.0, 0.0)

    assert_equal(*compared(keys, {"loss_type": "dapo"}, seed=seed, ratio=ratio))


@every_seed
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_top_entropy(share, seed):
    keys = {"name": "dapo", "clip_high": 0.2, "top_entropy": share}
    assert_equal(*compared(keys, {"loss_type": "dapo", "top_entropy_quantile": share}, seed=seed, share=share))
