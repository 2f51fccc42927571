"""What an algorithm asks of a scored group: filter -> shape -> advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.algorithms.advantages import build_advantage
from cosmos_rl_core.algorithms.filters import has_signal, soft_overlong
from cosmos_rl_core.errors import UserError

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import AlgorithmConfig
    from cosmos_rl_core.interfaces import AdvantageEstimator

Shaping = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(rewards [G], lengths [G], truncated [G]) -> rewards [G]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Functions of numpy arrays [G], in the order in which they apply."""

    keep: Callable[[np.ndarray], bool] | None = None
    """rewards [G], before shaping -> False where the group carries no signal (dynamic sampling)."""
    shape_reward: Shaping | None = None
    """Penalty on length, before the advantage."""
    advantage: AdvantageEstimator


def group_rules(config: AlgorithmConfig, *, max_terms: int) -> GroupRules:
    """Return the rules of a config. Raises UserError for an overlong buffer longer than `max_terms`."""
    return GroupRules(
        keep=has_signal if config.filter_zero_variance else None,
        shape_reward=_shaping(config, max_terms=max_terms) if config.overlong_buffer_terms else None,
        advantage=build_advantage(config),
    )


def _shaping(config: AlgorithmConfig, *, max_terms: int) -> Shaping:
    buffer, penalty = config.overlong_buffer_terms, config.overlong_penalty
    if buffer > max_terms:
        raise UserError(
            f"algorithm.overlong_buffer_terms = {buffer} is more than the sampling's "
            f"max_terms = {max_terms}; lower it, to a fifth of max_terms for example"
        )

    def shape(rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        return rewards + penalty * soft_overlong(lengths, truncated, max_terms=max_terms, buffer_terms=buffer)

    return shape
