"""Groups of a step -> what the trainer takes, with what a person wants to know about them.

groups -> advantages seen together -> minibatches -> collated -> each of them, epoch after epoch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from cosmos_rl_core.algorithms.advantages import BatchAdvantage
from cosmos_rl_core.algorithms.episodes import StepAdvantages, critic_metrics
from cosmos_rl_core.train.anchor import Anchor
from cosmos_rl_core.train.minibatches import deal_minibatches
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
        of_steps: StepAdvantages | None = None,
        anchor: Anchor | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        seed: int = 0,
        on_groups: Callable[[Sequence[RolloutGroup], int], None] | None = None,
    ) -> None:
        """Wire it.

        batch_advantage: rewards of all groups -> their advantages. of_steps: changes the advantages of episodes' steps.
        anchor: adds its rows of the step. seed: of what is dealt into minibatches. on_groups: called with the groups
        of each step, with the advantages that are trained on, and the step.
        """
        self._collate = collate
        self._max_staleness = max_staleness
        self._batch_advantage = batch_advantage
        self._of_steps = of_steps
        self._anchor = anchor
        self._minibatches = minibatches
        self._epochs = epochs
        self._seed = seed
        self._on_groups = on_groups

    def __call__(self, groups: Sequence[RolloutGroup], *, step: int) -> TrainBatch:
        oldest = min(group.min_policy_version for group in groups)
        assert step - oldest <= self._max_staleness, f"step {step} was given terms of version {oldest}"
        trained = self._seen_together(groups, step=step)
        if self._on_groups is not None:
            self._on_groups(trained, step)
        first, *later = self._updates(trained, step=step)
        metrics = {**first.metrics, **group_metrics(groups, step=step)}
        if first.anchor is not None:
            metrics |= {f"anchor/{name}": value for name, value in first.anchor.metrics.items()}
        return replace(first, metrics=metrics, later=tuple(later))

    def _updates(self, groups: Sequence[RolloutGroup], *, step: int) -> list[TrainBatch]:
        random = np.random.default_rng([self._seed, step])
        dealt = deal_minibatches(groups, count=self._minibatches, random=random)
        anchor = None if self._anchor is None else self._anchor(step)
        batches = [replace(self._collate(each), anchor=anchor) for each in dealt]
        orders = [range(len(batches)), *(random.permutation(len(batches)) for _ in range(self._epochs - 1))]
        return [batches[place] for order in orders for place in order]

    def _seen_together(self, groups: Sequence[RolloutGroup], *, step: int) -> Sequence[RolloutGroup]:
        if self._of_steps is not None:
            return self._of_steps(groups, step=step)
        if self._batch_advantage is None:
            return groups
        values = self._batch_advantage([np.array([r.reward for r in group.rollouts]) for group in groups])
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
        **critic_metrics(rollouts),
    }
