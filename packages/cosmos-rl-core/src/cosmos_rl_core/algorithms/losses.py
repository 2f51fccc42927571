"""Policy losses, one value a term. `ratio` is policy / old, and A the advantage.

    clipped                  -min(ratio A, clip(ratio) A)                 no gradient once clipped
    sequence_clipped         the same, with one ratio a rollout           a rollout's loss moves all its terms alike
    sequence_clipped_token   the same values                              a term's loss moves that term alone
    truncated                -detach(min(ratio, max_ratio)) A log(policy) every term keeps a gradient
    cispo                    -detach(clip(ratio)) A log(policy)           every term keeps a gradient

Where policy = old all have REINFORCE's gradient, -A grad log(policy), of a rollout with one advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cosmos_rl_core.algorithms.aggregation import rollout_means

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import AlgorithmConfig
    from cosmos_rl_core.types import TermBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut at plus and minus this before exp: e^20 = 4.9e8 is finite in float32 and in its square.

A term that far away has no gradient through its ratio; `truncated` and `cispo` keep that of log(policy).
"""


class LossFn(Protocol):
    """A policy loss. An `Algorithm` of your own may bring one."""

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss [T] of each term and metrics [T].

        logprobs      [T] with gradient, under the policy
        old_logprobs  [T] without, under what the ratio divides by
        terms         advantages, mask and rollout of each term; what the mask leaves out is set to 0
        """
        ...


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return policy / old for each term [T], with gradient."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch) -> Tensor:
    """Return each rollout's s = exp(mean_t log(policy / old)) on its terms [T]. GSPO (arXiv 2507.18071, equation 7).

    Each has the gradient s mean_t grad log(policy_t): what weighs one term's loss moves all terms of its rollout alike.
    """
    means = rollout_means(logprobs - old_logprobs, terms).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return means.exp()[terms.rollout_index]


def sequence_token_ratio(logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch) -> Tensor:
    """Return the same values [T] with the gradient s grad log(policy_t). GSPO-token (arXiv 2507.18071, equation 14).

    Averaged over a rollout whose terms have one advantage and one weight, that is GSPO's gradient. Where those differ
    by term, each reaches its own term alone.
    """
    means = rollout_means(logprobs.detach() - old_logprobs, terms).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    one_with_gradient = (logprobs - logprobs.detach()).exp()
    return means.exp()[terms.rollout_index] * one_with_gradient


def surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return PPO's pessimistic loss [T], with separate bounds (DAPO) and the dual clip (arXiv 1912.09729).

    loss = max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A), and at most -dual_clip A where A < 0.
    """
    free = -ratio * advantages
    held = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    values, clipped = torch.maximum(free, held), held > free
    if dual_clip is not None:
        most = -dual_clip * advantages
        cut = (advantages < 0) & (values > most)
        values, clipped = torch.where(cut, most, values), clipped | cut
    return values, _metrics(ratio, clipped)


def clipped(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Clip each term's ratio. PPO, GRPO, Dr.GRPO, DAPO."""
    return surrogate(
        importance_ratio(logprobs, old_logprobs),
        terms.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def sequence_clipped(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Clip each rollout's ratio. GSPO."""
    ratio = sequence_ratio(logprobs, old_logprobs, terms)
    return surrogate(ratio, terms.advantages, clip_low=config.clip_low, clip_high=config.clip_high)


def sequence_clipped_token(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Clip each rollout's ratio, with a gradient of each term's own. GSPO-token."""
    ratio = sequence_token_ratio(logprobs, old_logprobs, terms)
    return surrogate(ratio, terms.advantages, clip_low=config.clip_low, clip_high=config.clip_high)


def truncated(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Weigh REINFORCE by the ratio, cut above. AIPO (LlamaRL, arXiv 2505.24034); RLOO off-policy."""
    return _weighted(logprobs, old_logprobs, terms.advantages, low=0.0, high=config.max_ratio)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Weigh REINFORCE by the clipped ratio. CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1)."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    return _weighted(logprobs, old_logprobs, terms.advantages, low=low, high=high)


LOSSES: Mapping[str, LossFn] = {
    "clipped": clipped,
    "sequence_clipped": sequence_clipped,
    "sequence_clipped_token": sequence_clipped_token,
    "truncated": truncated,
    "cispo": cispo,
}


def _weighted(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    ratio = importance_ratio(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(low, high)
    return -weight * advantages * logprobs, _metrics(ratio, weight != ratio)


def _metrics(ratio: Tensor, clipped: Tensor) -> Mapping[str, Tensor]:
    return {"ratio_mean": ratio.detach(), "clip_fraction": clipped.to(ratio.dtype)}
