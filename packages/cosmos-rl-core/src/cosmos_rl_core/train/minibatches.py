"""A step's rollouts -> the parts it is trained on one after another, several times over. PPO (arXiv 1707.06347).

What is dealt out are the steps of episodes, and rollouts as a whole where they have none: a rollout appears in every
minibatch that has a step of its, with a mask that leaves the other steps out. Which is dealt where follows from seed
and step, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Rollout, RolloutGroup


def deal_minibatches(
    groups: Sequence[RolloutGroup], *, count: int, random: np.random.Generator
) -> list[list[RolloutGroup]]:
    """Deal what is trained on into `count` minibatches of equal size up to one.

    Raises UserError where there is less to deal than minibatches.
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
            drawn = np.full(len(mask), -1)
            drawn[mask] = places[start : start + mask.sum()]
            start += int(mask.sum())
            for number in np.unique(drawn[mask]):
                dealt[number].append(_only(rollout, drawn == number))
        for number, rollouts in enumerate(dealt):
            if rollouts:
                minibatches[number].append(replace(group, rollouts=tuple(rollouts)))
    return minibatches


def _trained_units(rollout: Rollout) -> np.ndarray:
    """[S] bool, or [1] for a rollout without steps: whether anything of it is trained on."""
    if rollout.episode is None:
        return np.array([bool(rollout.loss_mask.any())])
    trained = np.zeros(rollout.episode.num_steps, bool)
    trained[rollout.episode.term_steps[rollout.loss_mask]] = True
    return trained


def _only(rollout: Rollout, units: np.ndarray) -> Rollout:
    """The rollout with only those units trained on."""
    if rollout.episode is None:
        return rollout
    return replace(rollout, loss_mask=rollout.loss_mask & units[rollout.episode.term_steps])
