"""The advantages of episodes' steps, seen against those of the whole batch; and how good the critic is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cosmos_rl_core.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import AlgorithmConfig

DEVIATION_FLOOR = 1e-5
"""Added to the deviation that divides, so that steps that are all the same do not blow up."""


class StepAdvantages(Protocol):
    """Changes the advantages of all episodes of a step together."""

    def __call__(self, groups: Sequence[RolloutGroup], *, step: int) -> Sequence[RolloutGroup]: ...


def build_step_advantages(config: AlgorithmConfig) -> StepAdvantages | None:
    """Return what is done to the advantages of episodes before a step trains on them; None for other algorithms."""
    if config.advantage != "gae":
        return None

    def seen_together(groups: Sequence[RolloutGroup], *, step: int) -> Sequence[RolloutGroup]:
        shift, scale, limit = 0.0, 1.0, np.inf if config.advantage_clip is None else config.advantage_clip
        if config.normalize_advantages:
            shift, scale = _moments([rollout for group in groups for rollout in group.rollouts])
        if step < config.critic_warmup_steps:
            scale = np.inf
        return [
            replace(group, rollouts=tuple(_scaled(each, shift, scale, limit) for each in group.rollouts))
            for group in groups
        ]

    return seen_together


def critic_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Return `explained_variance` = 1 - var(return - value) / var(return) over steps, and their means; {} without."""
    episodes = [r.episode for r in rollouts if r.episode is not None and r.episode.advantages is not None]
    if not episodes:
        return {}
    values = np.concatenate([episode.values[:-1] for episode in episodes])
    returns = np.concatenate([episode.returns for episode in episodes if episode.returns is not None])
    spread = float(returns.var())
    explained = 1.0 - float((returns - values).var()) / spread if spread > 0 else 0.0
    return {
        "explained_variance": explained,
        "return_mean": float(returns.mean()),
        "value_mean": float(values.mean()),
        "episode_steps_mean": float(np.mean([episode.num_steps for episode in episodes])),
    }


def _moments(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Mean and deviation of the advantages over trained terms."""
    trained = np.concatenate([r.term_advantages[r.loss_mask] for r in rollouts]).astype(np.float64)
    if not len(trained):
        return 0.0, 1.0
    return float(trained.mean()), float(trained.std()) + DEVIATION_FLOOR


def _scaled(rollout: Rollout, shift: float, scale: float, limit: float) -> Rollout:
    """The rollout as it is trained on; its returns stay what they are."""
    assert rollout.episode is not None and rollout.episode.advantages is not None
    advantages = np.clip((rollout.episode.advantages - shift) / scale, -limit, limit).astype(np.float32)
    episode = replace(rollout.episode, advantages=advantages)
    return replace(rollout, episode=episode, advantage=float(advantages.mean()))
