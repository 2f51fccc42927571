"""What is added to the policy loss: the divergence from a reference, and the entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cosmos_rl_core.algorithms.losses import LOG_RATIO_LIMIT
from cosmos_rl_core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_core.algorithms.config import KLName


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: KLName) -> Tensor:
    """Estimate KL(policy || reference) from each sampled term [T], with gradient (Schulman's note, 2020).

    With d = log(reference / policy):

        k1   -d            unbiased, may be negative; on average, its own gradient is 0
        k2   d^2 / 2       biased, never negative; on average, its gradient is that of the KL
        k3   e^d - 1 - d   unbiased, never negative; on average, its gradient is KL(reference || policy)'s

    "On average" is over terms drawn from the policy itself. d is cut at `LOG_RATIO_LIMIT` before exp.
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
    value and the gradient are those of KL(policy || reference), whatever policy the terms were drawn from.
    """
    return ratio * estimate


def entropy_loss(entropy: Tensor) -> Tensor:
    """Return minus the entropy [T], with gradient: minimising it keeps the policy broad."""
    return -entropy
