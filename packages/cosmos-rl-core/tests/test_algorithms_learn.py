"""Each algorithm learns a sequence of actions from groups drawn by a policy some steps old."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_rl_core.algorithms.advantages import build_advantage
from cosmos_rl_core.algorithms.config import AlgorithmConfig
from cosmos_rl_core.algorithms.objective import build_objective
from cosmos_rl_core.algorithms.table import TABLE
from cosmos_rl_core.types import PolicyOutputs, TermBatch, TrainBatch

PLACES, ACTIONS, GROUP, STALENESS = 4, 5, 16, 2
WANTED = torch.tensor([3, 1, 4, 0])


def rewards_of(actions):
    """Fraction of the wanted actions in each rollout [G, places] -> [G]."""
    return (actions == WANTED).double().mean(1)


def draw(logits, generator):
    """A group from the policy and its log-probs, both [G, places]."""
    actions = torch.multinomial(logits.softmax(-1), GROUP, replacement=True, generator=generator).T
    return actions, logits.log_softmax(-1).expand(GROUP, -1, -1).gather(2, actions[..., None])[..., 0]


def learn(config, *, steps):
    """Train from groups that are `STALENESS` versions old; return the expected reward before and after."""
    generator = torch.Generator().manual_seed(0)
    objective, advantage = build_objective(config, max_terms=PLACES), build_advantage(config)
    logits = torch.zeros(PLACES, ACTIONS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    versions = [logits.detach().clone()]
    index = torch.arange(GROUP).repeat_interleave(PLACES)
    counts = TrainBatch(microbatches=(), num_terms=GROUP * PLACES, num_rollouts=GROUP)
    for _ in range(steps):
        actions, sampled = draw(versions[-1 - min(STALENESS, len(versions) - 1)], generator)
        advantages = torch.from_numpy(advantage(np.asarray(rewards_of(actions))))
        terms = TermBatch(
            rollout_logprobs=sampled.flatten(),
            advantages=advantages[index],
            loss_mask=torch.ones(GROUP * PLACES, dtype=torch.float64),
            rollout_index=index,
            num_rollouts=GROUP,
        )
        logprobs = logits.log_softmax(-1).expand(GROUP, -1, -1).gather(2, actions[..., None]).flatten()
        losses, _ = objective(PolicyOutputs(logprobs=logprobs), terms)
        weights = objective.term_weights(terms)
        loss = sum(part.coef * (weights * part.values).sum() for part in losses) / objective.normalizer(counts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        versions.append(logits.detach().clone())
    return [v.softmax(-1).gather(1, WANTED[:, None]).mean().item() for v in (versions[0], versions[-1])]


@pytest.mark.parametrize("name", sorted(name for name, row in TABLE.items() if not row.rows and name != "ppo"))
def test_every_algorithm_learns_from_stale_groups(name):
    config = AlgorithmConfig(name=name)
    if name in ("gspo", "luspo"):  # their own 3e-4 and 2e-3 are for fresher rollouts
        config = AlgorithmConfig(name=name, clip_low=0.2, clip_high=0.2)
    before, after = learn(config, steps=100)
    assert before == pytest.approx(1 / ACTIONS)
    assert after > 0.9


def test_the_decoupled_loss_learns_from_stale_groups():
    _, after = learn(AlgorithmConfig(name="dapo", old_logprobs="policy"), steps=100)
    assert after > 0.9
