"""The formulas of the objectives, as functions of tensors: B samples or T terms, one value each; and nft's objective.

    decoupled    nft, on clean latents only       NFTObjective, nft_losses, nft_loss, OLD_WEIGHT_DECAYS
    supervised   sft, and the data term of ddrl   flow_matching_loss, flow_weight
    shaping      of advantages                    nft_preference; table.ddrl_shaping

Ratios, clipping, group advantages and the divergence between steps are the core's. Squares are averaged over latent
elements, never summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.interfaces import Objective
from cosmos_rl_core.types import LossTerm, PolicyOutputs, TermBatch
from cosmos_rl_wfm.samplers.steps import spread

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.aggregation import Aggregation
    from cosmos_rl_core.algorithms.config import AlgorithmConfig

Weighting = Literal["uniform", "edm"]


def noisy(clean: Tensor, noise: Tensor, *, t: Tensor) -> Tensor:
    """Return x_t = (1 - t) clean + t noise [B, ...], for times t [B]."""
    t = spread(t, clean)
    return (1 - t) * clean + t * noise


def flow_matching_loss(v: Tensor, *, clean: Tensor, noise: Tensor) -> Tensor:
    """Return mean |v - (noise - clean)|^2 [B], with gradient (arXiv 2210.02747; 2209.03003)."""
    return (v.float() - (noise - clean)).square().flatten(1).mean(1)


def flow_weight(t: Tensor, weighting: Weighting) -> Tensor:
    """Return the weight of that loss at times t, of its shape.

    uniform   1
    edm       t^2 + (1 - t)^2: the weight (sigma^2 + 1) / sigma^2 on the clean estimate's error, as Cosmos and DDRL
              compute it: that error is t^2 |v - ...|^2 and sigma = t / (1 - t)
    """
    return torch.ones_like(t) if weighting == "uniform" else t.square() + (1 - t).square()


def nft_preference(advantages: Tensor, *, advantage_limit: float) -> Tensor:
    """Return r = 1/2 + clip(A / limit, -1, 1) / 2, in [0, 1]: the weight of a rollout as a positive sample.

    DiffusionNFT's optimality probability (arXiv 2509.16117, section 3.3).
    """
    return 0.5 + 0.5 * (advantages / advantage_limit).clamp(-1, 1)


def nft_losses(
    v: Tensor, old_v: Tensor, *, x: Tensor, t: Tensor, clean: Tensor, beta: float, self_normalised: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the losses [B] of the implicit positive and of the implicit negative policy, with v's gradient.

    v+ = (1 - beta) old_v + beta v and v- = (1 + beta) old_v - beta v; the loss of each is the square of its error on
    the clean latents, x - t v+ - clean. DiffusionNFT (arXiv 2509.16117, section 3.2), divided by the detached mean
    absolute error (section 3.3), which takes the place of a weighting in time.

    x [B, ...] is the noisy state at t [B], old_v [B, ...] the velocity of the old weights, without gradient.
    """
    old_v = old_v.detach()
    step = beta * (v - old_v)
    positive = _clean_error(old_v + step, x=x, t=t, clean=clean, self_normalised=self_normalised)
    return positive, _clean_error(old_v - step, x=x, t=t, clean=clean, self_normalised=self_normalised)


def nft_loss(
    positive: Tensor, negative: Tensor, *, preference: Tensor, beta: float, advantage_limit: float = 1.0
) -> Tensor:
    """Return limit (r positive + (1 - r) negative) / beta [B]. DiffusionNFT (arXiv 2509.16117, section 3.2).

    Let u = noise - clean of single samples, with old_v their mean: without self-normalisation the optimum is
    old_v + (2 / beta) E[r (u - old_v)]. At v = old_v the gradient is A times that of `positive` per unit of v, whatever
    limit and beta are.
    """
    return advantage_limit / beta * (preference * positive + (1 - preference) * negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldWeightDecay:
    """old <- decay old + (1 - decay) new after each update. DiffusionNFT (arXiv 2509.16117, section 3.3)."""

    flat: int
    """Updates with decay 0, where the old weights are the new ones: on-policy."""
    rate: float
    """Increase of the decay per update after those."""
    most: float
    """Maximum of the decay."""

    def at(self, update: int) -> float:
        """Return the decay after `update` updates."""
        return min(max(update - self.flat, 0) * self.rate, self.most)


OLD_WEIGHT_DECAYS: Mapping[str, OldWeightDecay] = {
    "none": OldWeightDecay(flat=0, rate=0.0, most=0.0),
    "slow": OldWeightDecay(flat=0, rate=0.001, most=0.5),
    "late": OldWeightDecay(flat=75, rate=0.0075, most=0.999),
}
"""Schedules by name; those of DiffusionNFT's code, in its order."""

SMALLEST_ERROR = 1e-5
"""Smallest divisor of a self-normalised loss."""


def _clean_error(v: Tensor, *, x: Tensor, t: Tensor, clean: Tensor, self_normalised: bool) -> Tensor:
    error = (x - spread(t, x) * v - clean).float().flatten(1)
    squares = error.square().mean(1)
    if not self_normalised:
        return squares
    return squares / error.detach().abs().mean(1).clamp_min(SMALLEST_ERROR)


class NFTObjective(Objective):
    """Contrasts the trained weights with the old ones, on samples of the old ones.

    loss = limit (r l(v+) + (1 - r) l(v-)) / beta, and kl_coef |v - v_ref|^2 (arXiv 2509.16117, section 3.2).

    Metrics [T]: `preference` r, `positive` and `negative` losses, `old_distance` |v - v_old|^2 and, with kl_coef, `kl`.
    """

    def __init__(self, config: AlgorithmConfig, *, aggregation: Aggregation) -> None:
        self.aggregation = aggregation
        self._kl_coef = config.kl_coef
        self._limit = config.advantage_clip or 1.0
        self._beta: float = config.options["beta"]
        self._self_normalised: bool = config.options["self_normalised"]
        self.needs_reference = config.kl_coef > 0

    def __call__(self, outputs: PolicyOutputs, terms: TermBatch) -> tuple[list[LossTerm], Mapping[str, Tensor]]:
        tensors = outputs.tensors
        if "old_velocity" not in tensors:
            raise UserError(
                "nft needs rollouts that follow the ODE, and old weights: set [rollout.sampling] rule = "
                '"ode" and old_decay'
            )
        velocity, old = tensors["velocity"], tensors["old_velocity"]
        positive, negative = nft_losses(
            velocity,
            old,
            x=tensors["states"],
            t=tensors["times"],
            clean=tensors["clean"],
            beta=self._beta,
            self_normalised=self._self_normalised,
        )
        preference = nft_preference(terms.advantages, advantage_limit=self._limit)
        values = nft_loss(positive, negative, preference=preference, beta=self._beta, advantage_limit=self._limit)
        losses = [LossTerm(name="policy", values=values)]
        metrics = {
            "preference": preference,
            "positive": positive.detach(),
            "negative": negative.detach(),
            "old_distance": _distance(velocity.detach(), old),
        }
        if self.needs_reference:
            kl = _distance(velocity, terms.ref_tensors["velocity"])
            losses.append(LossTerm(name="kl", values=kl, coef=self._kl_coef))
            metrics["kl"] = kl.detach()
        return losses, metrics


def _distance(velocity: Tensor, other: Tensor) -> Tensor:
    """Mean squared difference [T]."""
    return (velocity - other).square().flatten(1).mean(1)
