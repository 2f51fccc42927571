"""DiffusionNFT: one update contrasts the trained weights with the old ones on samples of the old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import LossTerm, PolicyOutputs, TermBatch, TrainBatch
from cosmos_rl_wfm.objectives.formulas import nft_loss, nft_losses, nft_preference

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.aggregation import Aggregation
    from cosmos_rl_core.algorithms.config import AlgorithmConfig


class NFTObjective:
    """loss = limit (r l(v+) + (1 - r) l(v-)) / beta, and kl_coef |v - v_ref|^2 (arXiv 2509.16117, section 3.2).

    Metrics [T]: `preference` r, `positive` and `negative` losses, `old_distance` |v - v_old|^2 and, with kl_coef, `kl`.
    """

    needs_entropy = False

    def __init__(self, config: AlgorithmConfig, *, aggregation: Aggregation) -> None:
        self._aggregation = aggregation
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

    def term_weights(self, terms: TermBatch) -> Tensor:
        return self._aggregation.term_weights(terms)

    def normalizer(self, batch: TrainBatch) -> float:
        return self._aggregation.normalizer(batch)


def _distance(velocity: Tensor, other: Tensor) -> Tensor:
    """Mean squared difference [T]."""
    return (velocity - other).square().flatten(1).mean(1)
