"""Groups of a step -> what the trainer takes, with what a person wants to know about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cosmos_rl_core.algorithms.advantages import BatchAdvantage
from cosmos_rl_core.train.anchor import Anchor
from cosmos_rl_core.types import RolloutGroup, TrainBatch

Collate = Callable[[Sequence[RolloutGroup]], TrainBatch]


class Batcher:
    """Collates groups and adds their metrics. The staleness bound is checked here, where the groups are consumed."""

    def __init__(
        self,
        collate: Collate,
        *,
        max_staleness: int,
        batch_advantage: BatchAdvantage | None = None,
        anchor: Anchor | None = None,
    ) -> None:
        """batch_advantage: changes the advantages of all groups together. anchor: adds its rows of the step."""
        self._collate = collate
        self._max_staleness = max_staleness
        self._batch_advantage = batch_advantage
        self._anchor = anchor

    def __call__(self, groups: Sequence[RolloutGroup], *, step: int) -> TrainBatch:
        oldest = min(group.min_policy_version for group in groups)
        assert step - oldest <= self._max_staleness, f"step {step} was given terms of version {oldest}"
        batch = self._collate(self._seen_together(groups))
        anchor = None if self._anchor is None else self._anchor(step)
        return replace(batch, metrics={**batch.metrics, **group_metrics(groups, step=step)}, anchor=anchor)

    def _seen_together(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        if self._batch_advantage is None:
            return groups
        values = self._batch_advantage([np.array([r.advantage for r in group.rollouts]) for group in groups])
        return [_with_advantages(*each) for each in zip(groups, values, strict=True)]


def _with_advantages(group: RolloutGroup, advantages: np.ndarray) -> RolloutGroup:
    pairs = zip(group.rollouts, advantages, strict=True)
    return replace(group, rollouts=tuple(replace(rollout, advantage=float(value)) for rollout, value in pairs))


def group_metrics(groups: Sequence[RolloutGroup], *, step: int) -> Mapping[str, float]:
    """Rewards over rollouts; staleness (steps between sampling and training) over terms."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    staleness = step - np.concatenate([r.versions for r in rollouts])
    spread = [np.std([r.reward for r in group.rollouts]) for group in groups]
    names = rollouts[0].reward_breakdown
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(np.mean(spread)),
        **{f"reward/{name}": float(np.mean([r.reward_breakdown[name] for r in rollouts])) for name in names},
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "truncated_fraction": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "zero_variance_fraction": float(np.mean([s == 0.0 for s in spread])),
        "rollouts": float(len(rollouts)),
        "terms": float(sum(r.num_terms for r in rollouts)),
    }
