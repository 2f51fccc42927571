"""An algorithm of one's own: rollouts are weighed by a softmax of their rewards, in the spirit of reward-weighted
regression (Peters and Schaal, 2007).

    A_i = G exp(r_i / beta) / sum_j exp(r_j / beta) - 1                    over the group's rollouts j = 1 .. G
    L_t = -min(ratio_t, max_ratio) A_i log pi(term t of rollout i)         the minimum without gradient

The first part says how good a rollout is beside the others; a group of equal rewards has A = 0. The second raises the
log-probability of what was good; ratio = pi / pi_rollout corrects for the age of the weights that drew the term.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core import Algorithm

if TYPE_CHECKING:  # the controller loads this file, and stays free of torch
    from torch import Tensor

    from cosmos_rl_core import AlgorithmConfig, TermBatch

BETA = 0.5
"""Temperature of the weights: small, and only the best rollout counts; large, and all count alike."""


def softmax_weights(rewards: np.ndarray) -> np.ndarray:
    """rewards [G] -> advantages [G], of mean 0 and at least -1."""
    weights = np.exp((rewards - rewards.max()) / BETA)
    return len(rewards) * weights / weights.sum() - 1.0


def weighted_likelihood(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss [T] of each term, and metrics [T]. All tensors are [T]; only `logprobs` has a gradient."""
    ratio = (logprobs.detach() - old_logprobs).clamp(-20.0, 20.0).exp()
    weight = ratio.clamp(max=config.max_ratio)  # [algorithm] max_ratio, as any key of the section
    return -weight * terms.advantages * logprobs, {"ratio_mean": ratio, "weight_mean": weight}


REWARD_WEIGHTED = Algorithm(
    name="reward_weighted",
    title="Reward-weighted likelihood",
    paper="after Peters and Schaal, ICML 2007",
    summary="rollouts weighed by a softmax of their rewards",
    defaults={"aggregation": "sequence_mean_of_means"},
    advantage=softmax_weights,
    loss=weighted_likelihood,
)
