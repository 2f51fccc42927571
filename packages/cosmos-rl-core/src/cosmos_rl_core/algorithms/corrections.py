"""Corrections for rollouts that another policy made: an older version, or the same one on other kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cosmos_rl_core.algorithms.aggregation import rollout_means
from cosmos_rl_core.algorithms.losses import importance_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import CorrectionName
    from cosmos_rl_core.types import TermBatch


def correction_weight(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    correction: CorrectionName,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Return the weight [T] of each term, without gradient, from w = old / rollout.

    truncate   min(w, cap)                      truncated importance sampling (Yao et al., 2025)
    mask       w where floor <= w <= cap, or 0  masked importance sampling, IcePop; AReaL with floor = 0
    none       1
    """
    if correction == "none":
        return torch.ones_like(rollout_logprobs)
    weight = importance_ratio(old_logprobs.detach(), rollout_logprobs)
    if correction == "truncate":
        return weight.clamp(max=cap)
    return torch.where((weight >= floor) & (weight <= cap), weight, 0.0)


def sequence_mask(logprobs: Tensor, terms: TermBatch, *, delta: float) -> Tensor:
    """Return 0 for the terms to drop, 1 for the others [T]. DeepSeek-V3.2 (arXiv 2512.02556, section 3.1).

    Dropped are terms with A < 0 in rollouts the policy has left behind: mean_t log(rollout / policy) > delta.
    """
    divergence = rollout_means(terms.rollout_logprobs - logprobs.detach(), terms)
    dropped = (terms.advantages < 0) & (divergence > delta)[terms.rollout_index]
    return (~dropped).to(logprobs.dtype)
