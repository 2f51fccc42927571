"""Losses, one value a term: of the policy and the critic, corrections for other weights, divergence and entropy.

`ratio` is policy / old, and A the advantage.

    clipped                  -min(ratio A, clip(ratio) A)                 no gradient once clipped
    sequence_clipped         the same, with one ratio a rollout           a rollout's loss moves all its terms alike
    sequence_clipped_token   the same values                              a term's loss moves that term alone
    truncated                -detach(min(ratio, max_ratio)) A log(policy) every term keeps a gradient
    cispo                    -detach(clip(ratio)) A log(policy)           every term keeps a gradient
    sapo                     -(4 / tau) sigmoid(tau (ratio - 1)) A        the gradient fades away from ratio 1
    vespo                    -detach(phi(w)) A log(policy)                w: the product of a rollout's ratios
    dppo                     -ratio A                                     none where the probability moved too far

Where policy = old all have REINFORCE's gradient, -A grad log(policy), of a rollout with one advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from cosmos_rl_core.algorithms.aggregation import rollout_means, rollout_sums
from cosmos_rl_core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import AlgorithmConfig, CorrectionLevel, CorrectionName, KLName
    from cosmos_rl_core.types import TermBatch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut at plus and minus this before exp: e^20 = 4.9e8 is finite in float32 and in its square.

A term that far away has no gradient through its ratio; `truncated` and `cispo` keep that of log(policy).
"""


LossFn = Callable[[Tensor, Tensor, "TermBatch", "AlgorithmConfig"], tuple[Tensor, Mapping[str, Tensor]]]
"""A policy loss: (logprobs, old_logprobs, terms, config) -> the loss [T] of each term and metrics [T].

    logprobs      [T] with gradient, under the policy
    old_logprobs  [T] without, the denominator of the ratio
    terms         advantages, mask and rollout of each term; masked values are 0

An `Algorithm` of your own may bring one.
"""


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return policy / old for each term [T], with gradient."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch) -> Tensor:
    """Return each rollout's s = exp(mean_t log(policy / old)) on its terms [T]. GSPO (arXiv 2507.18071, equation 7).

    Each has the gradient s mean_t grad log(policy_t): the weight of one term's loss moves all terms of its rollout.
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
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    values, clipped = torch.maximum(free, bounded), bounded > free
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


def sapo(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Weigh by a sigmoid around ratio 1 in place of a clip. SAPO (arXiv 2511.20347, equation 6).

    loss = -(4 / tau) sigmoid(tau (ratio - 1)) A: at ratio 1 its gradient is that of -ratio A, for every tau.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    tau = torch.full_like(ratio, config.sapo_temperature)
    tau[terms.advantages <= 0] = config.sapo_temperature_negative
    gate = (4 / tau) * torch.sigmoid(tau * (ratio - 1))
    return -gate * terms.advantages, {"ratio_mean": ratio.detach()}


VESPO_LEAST = math.log(1e-8)
"""Lowest log-weight of a rollout, as in VESPO's code."""


def vespo(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Weigh REINFORCE by a soft window over each rollout's weight. VESPO (arXiv 2602.10693).

    w = prod_t policy / old over the rollout,   phi(w) = w^k e^(lambda (1 - w)),   loss = -phi A log(policy)

    phi is 1 at w = 1 and falls to 0 on both sides; k and lambda differ with the sign of A.
    """
    log_ratio = (logprobs.detach() - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_weight = rollout_sums(log_ratio, terms).clamp(VESPO_LEAST, LOG_RATIO_LIMIT)[terms.rollout_index]
    good, bad = (
        (k * log_weight + scale * (1 - log_weight.exp())).exp()
        for k, scale in (
            (config.vespo_k, config.vespo_lambda),
            (config.vespo_k_negative, config.vespo_lambda_negative),
        )
    )
    weight = torch.where(terms.advantages >= 0, good, bad)
    return -weight * terms.advantages * logprobs, {"ratio_mean": log_ratio.exp(), "sequence_weight": weight}


def dppo(
    logprobs: Tensor, old_logprobs: Tensor, terms: TermBatch, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Drop terms by the change of their probability instead of the ratio. DPPO, binary TV (arXiv 2602.04879).

    loss = -ratio A, or 0 where p_policy - p_old > clip_high with A > 0, or < -clip_low with A < 0.
    """
    ratio = importance_ratio(logprobs, old_logprobs)
    change = (logprobs.exp() - old_logprobs.exp()).detach()
    too_far = torch.where(terms.advantages > 0, change > config.clip_high, change < -config.clip_low)
    return torch.where(too_far, 0.0, -ratio * terms.advantages), _metrics(ratio, too_far)


LOSSES: Mapping[str, LossFn] = {
    "clipped": clipped,
    "sequence_clipped": sequence_clipped,
    "sequence_clipped_token": sequence_clipped_token,
    "truncated": truncated,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo": dppo,
}


def _weighted(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, low: float, high: float
) -> tuple[Tensor, Mapping[str, Tensor]]:
    ratio = importance_ratio(logprobs.detach(), old_logprobs)
    weight = ratio.clamp(low, high)
    return -weight * advantages * logprobs, _metrics(ratio, weight != ratio)


def _metrics(ratio: Tensor, clipped: Tensor) -> Mapping[str, Tensor]:
    return {"ratio_mean": ratio.detach(), "clip_fraction": clipped.to(ratio.dtype)}


def correction_weight(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    *,
    correction: CorrectionName,
    cap: float,
    floor: float = 0.0,
    level: CorrectionLevel = "term",
    terms: TermBatch | None = None,
) -> Tensor:
    """Return the weight [T] of each term, without gradient, from w = old / rollout.

    level: "sequence" takes the product of w over the rollout, "geometric" their geometric mean; both need `terms`.

    truncate   min(w, cap)                      truncated importance sampling (Yao et al., 2025)
    mask       w where floor <= w <= cap, or 0  masked importance sampling, IcePop; AReaL with floor = 0
    none       1
    """
    if correction == "none":
        return torch.ones_like(rollout_logprobs)
    log_weight = old_logprobs.detach() - rollout_logprobs
    if level != "term":
        assert terms is not None, "a weight of whole rollouts needs their terms"
        reduced = rollout_sums if level == "sequence" else rollout_means
        log_weight = reduced(log_weight, terms)[terms.rollout_index]
    weight = log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
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


def value_loss(
    values: Tensor, *, old_values: Tensor, returns: Tensor, clip: float | None, huber_delta: float | None
) -> Tensor:
    """Return the loss [T] of estimates: the worse of the free one and the one kept near the rollout's. PPO2's clip.

    loss = max(h(R - V), h(R - V_clip)),   V_clip = V_old + clamp(V - V_old, -clip, clip)

    where h(x) = x^2 / 2, beyond huber_delta going on as a straight line. None switches either off.

        values      [T] with gradient
        old_values  [T] of the critic that the rollout was made with
        returns     [T] advantage + old value
    """
    free = _half_square(values, returns, huber_delta)
    if clip is None:
        return free
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(free, _half_square(clipped_values, returns, huber_delta))


def _half_square(values: Tensor, returns: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return 0.5 * (values - returns) ** 2
    return F.huber_loss(values, returns, delta=huber_delta, reduction="none")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLName) -> Tensor:
    """Estimate KL(policy || reference) from each sampled term [T], with gradient (Schulman's note, 2020).

    With d = log(reference / policy):

        k1   -d            unbiased, may be negative; on average, its own gradient is 0
        k2   d^2 / 2       biased, never negative; on average, its gradient is that of the KL
        k3   e^d - 1 - d   unbiased, never negative; on average, its gradient is KL(reference || policy)'s

    "On average" is over terms sampled from the policy itself. d is cut at `LOG_RATIO_LIMIT` before exp.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio


def gaussian_kl(
    tensors: Mapping[str, Tensor], ref_tensors: Mapping[str, Tensor], *, estimator: KLName = "exact"
) -> Tensor:
    """Return KL(policy || reference) of each term [T], exactly, where terms are Gaussians of equal deviation.

    exact      half the squared distance of `whitened` [T, D]: Flow-GRPO (arXiv 2505.05470, section 4.2)
    exact_dt   that times `dt` [T], the length of a denoising step: flow_grpo's scripts for images, which divide
               the squared distance of the means by 2 sigma^2 where the step's variance is sigma^2 dt
    """
    if "whitened" not in tensors or "whitened" not in ref_tensors:
        raise UserError('kl_estimator = "exact" is for policies whose terms are Gaussians; take "k3"')
    exact = (tensors["whitened"] - ref_tensors["whitened"]).square().sum(-1) / 2
    if estimator == "exact":
        return exact
    if "dt" not in tensors:
        raise UserError('kl_estimator = "exact_dt" is for denoising steps, which have a length in time; take "exact"')
    return exact * tensors["dt"]


def unbiased_kl(estimate: Tensor, ratio: Tensor) -> Tensor:
    """Multiply an estimate [T] by the ratio [T] policy / sampler, both with gradient. DeepSeek-V3.2.

    E_sampler[ratio k] = E_policy[k] holds for every policy, so the gradients agree too. With k1 or k3, the
    value and the gradient are those of KL(policy || reference), whatever policy the terms were sampled from.
    """
    return ratio * estimate


def entropy_loss(entropy: Tensor) -> Tensor:
    """Return minus the entropy [T], with gradient: minimising it keeps the policy broad."""
    return -entropy
