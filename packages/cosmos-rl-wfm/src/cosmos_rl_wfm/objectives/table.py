"""The algorithms of world models, as rows of core's table. Free of torch: the controller loads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from cosmos_rl_core.algorithms.table import Algorithm
from cosmos_rl_core.settings.base import Strict

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.aggregation import Aggregation
    from cosmos_rl_core.algorithms.config import AlgorithmConfig
    from cosmos_rl_core.interfaces import Objective

_COUPLED: Mapping[str, Any] = {
    "std_epsilon": 1e-4,
    "advantage_clip": 5.0,
    "loss": "clipped",
    "clip_low": 1e-4,  # log-ratios are means over latent elements, so ratios stay close to 1
    "clip_high": 1e-4,
    "aggregation": "term_mean",
}


class DDRLOptions(Strict):
    """[algorithm.options] of ddrl."""

    exponential: bool = False
    """Weigh rollouts by -exp(-A), DDRL's lambda, instead of their advantage A."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides A in the exponent."""


class NFTOptions(Strict):
    """[algorithm.options] of nft."""

    beta: float = Field(default=1.0, gt=0)
    """Distance of the two implicit policies from the old one; a smaller value is a larger step."""
    self_normalised: bool = True
    """Divide each error by its own size instead of weighing times."""


def ddrl_shaping(advantages: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return -exp(-A / temperature) with [algorithm.options] exponential, else A. DDRL's lambda.

    max E[lambda(A)] - KL(data || policy) with lambda(u) = -exp(-u) has the optimum data(x) exp(r(x)). All values are
    below 0: only the data term raises likelihoods. `advantage_clip` bounds the returned values, as in cosmos-rl. A
    group of equal rewards has no signal, and its likelihood would only be lowered; it keeps A = 0.
    """
    if not config.options["exponential"] or not advantages.any():
        return advantages
    return -np.exp(-advantages / config.options["temperature"])


def nft_objective(config: AlgorithmConfig, *, aggregation: Aggregation) -> Objective:
    """Make nft's objective."""
    from cosmos_rl_wfm.objectives.formulas import NFTObjective

    return NFTObjective(config, aggregation=aggregation)


FLOW_GRPO = Algorithm(
    name="flow_grpo",
    title="GRPO of flow matching models",
    paper="Flow-GRPO, 2025, arXiv 2505.05470",
    summary="stochastic denoising steps have Gaussian log-probabilities: GRPO's clipped ratio over them",
    # as its code (flow_grpo), of which 0.04 is the coefficient for images
    defaults={**_COUPLED, "advantage": "global_std", "kl_coef": 0.04, "kl_estimator": "exact_dt"},
)
DDRL = Algorithm(
    name="ddrl",
    title="Data-regularised diffusion reinforcement learning",
    paper="DDRL, 2025, arXiv 2512.04332",
    summary="FlowGRPO's reward term, held to real data by the loss of [data_regularization] instead of a reference",
    defaults={**_COUPLED, "advantage": "group_std", "std_ddof": 1},  # as its code, cosmos-rl's world model trainer
    shaping=ddrl_shaping,
    Options=DDRLOptions,
)
NFT = Algorithm(
    name="nft",
    title="Diffusion negative-aware fine-tuning",
    paper="DiffusionNFT, 2025, arXiv 2509.16117",
    summary="clean samples alone: flow matching towards good ones and away from bad ones, around the old weights",
    defaults={
        "advantage": "global_std",  # as its code's configurations
        "std_epsilon": 1e-4,
        "advantage_clip": 5.0,
        "aggregation": "term_mean",
        "kl_coef": 1e-4,
    },
    objective=nft_objective,
    Options=NFTOptions,
)
