"""Groups of a step -> its batches, with metrics of the groups.

groups -> advantages that need all groups -> minibatches -> collated -> trained on in every epoch, in another order
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from cosmos_rl_core.algorithms.advantages import StepAdvantages, critic_metrics
from cosmos_rl_core.data.mixing import DataTerm
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.train.batch_part import BatchPart
from cosmos_rl_core.types import Rollout, RolloutGroup, TrainBatch, TrainStep

Collate = Callable[[Sequence[RolloutGroup]], TrainBatch]


class Batcher:
    """Collates groups and adds their metrics. The staleness bound is checked here, where the groups are consumed."""

    def __init__(
        self,
        collate: Collate,
        *,
        max_staleness: int,
        advantages: StepAdvantages | None = None,
        data_term: DataTerm | None = None,
        minibatches: int = 1,
        epochs: int = 1,
        seed: int = 0,
        on_groups: Callable[[Sequence[RolloutGroup], int], None] | None = None,
    ) -> None:
        """Set up the stages; those that are None or 1 are skipped.

        collate: all groups -> this rank's share of them. advantages: completes those that need all groups of a step.
        data_term: adds its rows of the step. seed: of the split into minibatches. on_groups: called with the groups of
        each step, which have the advantages that are trained on, and the step.
        """
        self._collate = collate
        self._max_staleness = max_staleness
        self._advantages = advantages
        self._data_term = data_term
        self._minibatches = minibatches
        self._epochs = epochs
        self._seed = seed
        self._on_groups = on_groups

    def __call__(self, groups: Sequence[RolloutGroup], *, step: int, part: BatchPart | None = None) -> TrainStep:
        """Return the work of a step with these groups, of which this policy replica trains on a `part`, if given.

        Raises EpochOver with a part: the replicas add up their counts.
        """
        oldest = min(group.min_policy_version for group in groups)
        assert step - oldest <= self._max_staleness, f"step {step} was given terms of version {oldest}"
        trained = groups if self._advantages is None else self._advantages(groups, step)
        if self._on_groups is not None:
            self._on_groups(trained, step)
        random = np.random.default_rng([self._seed, step])
        minibatches = deal_minibatches(trained, count=self._minibatches, random=random)
        batches = [self._collate(each) for each in minibatches] if part is None else part.collate(minibatches)
        orders = [range(len(batches)), *(random.permutation(len(batches)) for _ in range(self._epochs - 1))]
        data_term = None if self._data_term is None else self._data_term(step)
        of_rows = {} if data_term is None else data_term.metrics
        return TrainStep(
            batches=tuple(batches),
            updates=tuple(int(number) for order in orders for number in order),
            data_term=data_term,
            metrics={
                **group_metrics(trained, step=step),
                **{f"data_term/{name}": value for name, value in of_rows.items()},
            },
        )


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
        **episode_metrics(rollouts),
    }


def episode_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Return means over the episodes in turns; {} without any.

    A number that an environment reports in several turns of an episode is added up; its mean is over the episodes that
    have it.
    """
    episodes = [rollout.exchanges for rollout in rollouts if rollout.exchanges]
    if not episodes:
        return {}
    exchanges = [exchange for episode in episodes for exchange in episode]
    own: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name in dict.fromkeys(name for exchange in episode for name in exchange.metrics):
            own[name].append(sum(exchange.metrics.get(name, 0.0) for exchange in episode))
    masks = [rollout.loss_mask for rollout in rollouts if rollout.exchanges]
    return {
        "episode_turns": len(exchanges) / len(episodes),
        "episode_branches": fmean(len({exchange.branch for exchange in episode}) for episode in episodes),
        "episode_model_s": sum(exchange.model_s for exchange in exchanges) / len(episodes),
        "episode_environment_s": sum(exchange.environment_s for exchange in exchanges) / len(episodes),
        "trained_term_fraction": sum(int(mask.sum()) for mask in masks) / max(1, sum(len(mask) for mask in masks)),
        "parse_failure_fraction": fmean(bool(exchange.problem) for exchange in exchanges),
        **{f"environment/{name}": fmean(values) for name, values in own.items()},
    }


def deal_minibatches(
    groups: Sequence[RolloutGroup], *, count: int, random: np.random.Generator
) -> list[list[RolloutGroup]]:
    """Deal trained rollouts, or steps of episodes, into `count` minibatches whose sizes differ by at most one.

    Episodes in turns are dealt as rollouts: a turn is read with all turns before it.

    Raises UserError for fewer of them than minibatches.
    """
    if count == 1:
        return [list(groups)]
    masks = [[_trained_units(rollout) for rollout in group.rollouts] for group in groups]
    total = sum(int(mask.sum()) for of_group in masks for mask in of_group)
    if total < count:
        raise UserError(
            f"[policy] minibatches = {count}: the rollouts of this step have only {total} parts to train on; "
            "lower it, or raise prompts_per_step"
        )
    places = random.permutation(total) % count
    minibatches: list[list[RolloutGroup]] = [[] for _ in range(count)]
    start = 0
    for group, of_group in zip(groups, masks, strict=True):
        dealt: list[list[Rollout]] = [[] for _ in range(count)]
        for rollout, mask in zip(group.rollouts, of_group, strict=True):
            assigned = np.full(len(mask), -1)  # minibatch of each unit; -1 for units that are not trained on
            assigned[mask] = places[start : start + mask.sum()]
            start += int(mask.sum())
            for number in np.unique(assigned[mask]):
                dealt[number].append(_only(rollout, assigned == number))
        for number, rollouts in enumerate(dealt):
            if rollouts:
                minibatches[number].append(replace(group, rollouts=tuple(rollouts)))
    return minibatches


def _trained_units(rollout: Rollout) -> np.ndarray:
    """[S] bool, or [1] for a rollout that stays whole: whether any of its terms is trained on."""
    if rollout.episode is None or rollout.exchanges:
        return np.array([bool(rollout.loss_mask.any())])
    trained = np.zeros(rollout.episode.num_steps, bool)
    trained[rollout.episode.term_steps[rollout.loss_mask]] = True
    return trained


def _only(rollout: Rollout, units: np.ndarray) -> Rollout:
    """Restrict a rollout's loss mask to `units`."""
    if rollout.episode is None or rollout.exchanges:
        return rollout
    return replace(rollout, loss_mask=rollout.loss_mask & units[rollout.episode.term_steps])
