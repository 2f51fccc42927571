"""Algorithms by name: the paper, and where its parts differ from the defaults of `AlgorithmConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cosmos_rl_core.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from pydantic import BaseModel

GROUP = "cosmos_rl.algorithms"
"""Entry point group in which a package may offer an `Algorithm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: a named choice of advantage, loss, aggregation and filters."""

    name: str
    title: str
    paper: str
    """Its source: authors or report, year, arXiv number."""
    summary: str
    """Its main idea, in one line."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of [algorithm] whose default differs here; the recipe's own keys come last."""
    advantage: Callable[[np.ndarray], np.ndarray] | None = None
    """Replaces the named advantage: rewards [G] float64 -> advantages [G] float64."""
    shaping: Callable[..., np.ndarray] | None = None
    """Transforms a group's advantages [G] before advantage_clip: (advantages, config) -> advantages."""
    loss: Callable[..., Any] | None = None
    """Replaces the named loss: a `losses.LossFn`. Import torch inside it: the controller loads this row."""
    objective: Callable[..., Any] | None = None
    """Replaces the whole objective: (config, *, aggregation) -> `interfaces.Objective`. Import torch inside it."""
    Options: type[BaseModel] | None = None
    """Strict model of [algorithm.options]; None: there are none."""


_ROWS = (
    Algorithm(
        name="grpo",
        title="Group Relative Policy Optimization",
        paper="DeepSeekMath, 2024, arXiv 2402.03300",
        summary="rewards standardised in their group, PPO's clipped ratio, every rollout weighs the same",
        defaults={"advantage": "group_std", "loss": "clipped", "aggregation": "sequence_mean_of_means"},
    ),
    Algorithm(
        name="dr_grpo",
        title="GRPO done right",
        paper="Liu et al., 2025, arXiv 2503.20783",
        summary="GRPO without division by the group's deviation and by the rollout's length",
        defaults={"advantage": "group_mean", "loss": "clipped", "aggregation": "constant"},
    ),
    Algorithm(
        name="dapo",
        title="Decoupled clip and dynamic sampling",
        paper="Yu et al., 2025, arXiv 2503.14476",
        summary="GRPO with a wider upper clip, a mean over terms, and no groups without signal",
        defaults={
            "advantage": "group_std",
            "std_ddof": 1,  # as its code, verl's
            "loss": "clipped",
            "clip_high": 0.28,
            "aggregation": "term_mean",
            "filter_zero_variance": True,
        },
    ),
    Algorithm(
        name="gspo",
        title="Group Sequence Policy Optimization",
        paper="Zheng et al., 2025, arXiv 2507.18071",
        summary="one ratio a rollout, the geometric mean over its terms, clipped as a whole",
        defaults={
            "advantage": "group_std",
            "loss": "sequence_clipped",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean_of_means",
        },
    ),
    Algorithm(
        name="luspo",
        title="Length-Unbiased Sequence Policy Optimization",
        paper="2026, arXiv 2602.05261",
        summary="GSPO with every rollout weighed by its length: terms count the same in long and in short ones",
        defaults={
            "advantage": "group_std",
            "loss": "sequence_clipped",
            "clip_low": 2e-3,
            "clip_high": 2.5e-3,
            "aggregation": "sequence_mean_of_sums",
        },
    ),
    Algorithm(
        name="rloo",
        title="REINFORCE leave-one-out",
        paper="Ahmadian et al., 2024, arXiv 2402.14740",
        summary="REINFORCE on whole rollouts; the baseline is the mean reward of the others",
        defaults={"advantage": "leave_one_out", "loss": "truncated", "aggregation": "sequence_mean_of_sums"},
    ),
    Algorithm(
        name="aipo",
        title="Asynchronous importance-weighted policy optimization",
        paper="LlamaRL, 2025, arXiv 2505.24034",
        summary="REINFORCE weighted by the ratio to the rollout policy, cut above at max_ratio",
        defaults={"advantage": "group_std", "loss": "truncated", "aggregation": "term_mean"},
    ),
    Algorithm(
        name="cispo",
        title="Clipped importance-sampling policy optimization",
        paper="MiniMax-M1, 2025, arXiv 2506.13585",
        summary="the ratio is clipped as a weight, so that no term loses its gradient",
        defaults={
            "advantage": "group_std",
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 4.0,
            "aggregation": "term_mean",
        },
    ),
    Algorithm(
        name="ppo",
        title="Proximal Policy Optimization",
        paper="Schulman et al., 2017, arXiv 1707.06347; GAE, arXiv 1506.02438",
        summary="advantages of single steps from a critic that is trained beside the policy, clipped ratio and value",
        defaults={"advantage": "gae", "loss": "clipped", "aggregation": "term_mean"},
    ),
    Algorithm(
        name="sft",
        title="Supervised fine-tuning",
        paper="maximum likelihood",
        summary="minus the log-probability of the wanted terms",
        defaults={"loss": "supervised", "aggregation": "term_mean"},
    ),
)

TABLE: Mapping[str, Algorithm] = {row.name: row for row in _ROWS}


def find_algorithm(name: str) -> Algorithm:
    """Return the row called `name`: one of ours, an installed one, or "module:attribute".

    Raises UserError for an unknown name and for a plug-in that is not an `Algorithm`.
    """
    if name in TABLE:
        return TABLE[name]
    from cosmos_rl_core import plugins  # reads installed metadata: only when the name is not ours

    plugins.locate(GROUP, name, beside=tuple(TABLE))  # names those of the table among the known ones
    algorithm = plugins.load(GROUP, name)
    if not isinstance(algorithm, Algorithm):
        raise UserError(f"algorithm {name!r} is a {type(algorithm).__name__}; it has to be a cosmos_rl_core.Algorithm")
    return algorithm
