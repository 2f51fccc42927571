"""The rules of a scored group: filter -> shape its rewards -> mask prefixes -> advantages, of the whole or of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.algorithms.advantages import (
    GroupAdvantage,
    build_advantage,
    build_step_advantages,
    generalized,
)
from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.settings.base import Problem
from cosmos_rl_core.settings.problems import as_toml

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import AlgorithmConfig
    from cosmos_rl_core.types import Episode, Rollout

Shaping = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(rewards [G], lengths [G], truncated [G]) -> rewards [G]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Functions of numpy arrays [G], in the order in which they apply."""

    keep: Callable[[np.ndarray], bool] | None = None
    """rewards [G], before shaping -> False where the group carries too little signal (dynamic sampling)."""
    shape_reward: Shaping | None = None
    """Penalty on length, before the advantage."""
    mask_prefix_terms: int = 0
    """Shortest prefix that is masked in rollouts that share it and have different rewards; 0 masks none."""
    tokens: Callable[[Rollout], np.ndarray] | None = None
    """rollout -> [T] int, the token of each term, for `mask_prefix_terms`."""
    mask_truncated: bool = False
    """Whether rollouts that a limit cut off are not trained on."""
    num_trained: int | None = None
    """Rollouts of a group that are trained on, those whose rewards vary most; None: all."""
    advantage: GroupAdvantage
    of_steps: Callable[[Episode], Episode] | None = None
    """Estimates the advantages of an episode's steps; `advantage` is not called for it."""
    selects: bool = False
    """Whether rollouts with advantage 0 are not trained on."""
    waits_for_step: bool = False
    """Whether advantages need all groups of a step, so that a group alone has none yet."""


def group_rules(
    config: AlgorithmConfig,
    *,
    max_terms: int,
    compares: bool = True,
    tokens: Callable[[Rollout], np.ndarray] | None = None,
) -> GroupRules:
    """Return the rules of a config. Raises UserError for an overlong buffer longer than `max_terms`.

    compares: false where rewards are not trained on: all advantages are 0. tokens: as of `GroupRules`.
    """
    return GroupRules(
        keep=build_filter(config),
        shape_reward=_shaping(config, max_terms=max_terms) if config.overlong_buffer_terms else None,
        mask_prefix_terms=config.mask_prefix_terms,
        tokens=tokens,
        mask_truncated=config.mask_truncated,
        num_trained=config.max_variance_rollouts,
        advantage=build_advantage(config) if compares else _no_advantage,
        of_steps=_generalized(config) if config.advantage == "gae" else None,
        selects=find_algorithm(config.name).selects,
        waits_for_step=compares and build_step_advantages(config) is not None,
    )


def _no_advantage(rewards: np.ndarray) -> np.ndarray:
    return np.zeros(len(rewards))


def needs_episodes(config: AlgorithmConfig, *, rollouts: str) -> list[Problem]:
    """Return the problem of advantages of steps in a domain whose `rollouts`, named for the message, have none."""
    if config.advantage != "gae":
        return []
    wrong = f"needs rewards of the steps of an episode, and {rollouts} have none"
    suggestion = '"grpo" compares the rollouts of a prompt instead'
    return [Problem(key="algorithm.name", given=as_toml(config.name), wrong=wrong, suggestion=suggestion)]


def _generalized(config: AlgorithmConfig) -> Callable[[Episode], Episode]:
    def with_advantages(episode: Episode) -> Episode:
        advantages = generalized(episode.rewards, episode.values, gamma=config.gamma, gae_lambda=config.gae_lambda)
        return replace(episode, advantages=advantages, returns=advantages + episode.values[:-1])

    return with_advantages


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


SAME_REWARD = 1e-8
"""Rewards closer than this are the same reward."""


def has_signal(rewards: np.ndarray) -> bool:
    """Return False where all rewards [G] are the same, so that every advantage is 0. DAPO, section 3.2."""
    return bool(np.ptp(rewards) > SAME_REWARD)


def build_filter(config: AlgorithmConfig) -> Callable[[np.ndarray], bool] | None:
    """Return the predicate of groups that are trained on; None keeps all."""
    low, high = config.filter_low, config.filter_high
    if low is None and high is None:
        return has_signal if config.filter_zero_variance else None

    def keep(rewards: np.ndarray) -> bool:
        mean = float(np.mean(rewards))
        within = (low is None or mean >= low) and (high is None or mean <= high)
        return within and (not config.filter_zero_variance or has_signal(rewards))

    return keep


def most_varied(rewards: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of the `count` rewards [G] with the largest variance, ascending. PODS (arXiv 2504.13818).

    Such a choice is some of the lowest rewards and the rest from the highest (its theorem 1), so that count + 1 choices
    are compared; of equal ones that with the fewest of the lowest. Equal rewards are taken in their order.
    """
    order = np.argsort(rewards, kind="stable")
    choices = [np.concatenate([order[:low], order[len(order) - (count - low) :]]) for low in range(count + 1)]
    return np.sort(max(choices, key=lambda chosen: float(np.var(rewards[chosen]))))


def soft_overlong(lengths: np.ndarray, truncated: np.ndarray, *, max_terms: int, buffer_terms: int) -> np.ndarray:
    """Return a value in [-1, 0] for each rollout, falling over the last `buffer_terms`. DAPO, section 3.4.

    0 up to max_terms - buffer_terms, then linear to -1 at max_terms; -1 for a rollout cut off by a limit.

        lengths    [G] int    terms of each rollout
        truncated  [G] bool   ended by a limit, not by its own stop
    """
    excess = lengths - (max_terms - buffer_terms)
    return np.where(truncated, -1.0, -np.clip(excess / buffer_terms, 0.0, 1.0))


def mask_prefixes(
    tokens: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray], rewards: np.ndarray, *, at_least: int
) -> list[np.ndarray]:
    """Return the loss masks without the terms of prefixes that rollouts with different rewards share.

    Such terms get gradients in opposite directions from equal inputs. A prefix is one of at least `at_least` tokens
    beyond which no two of the rollouts that have it agree. A rollout that would have no term left keeps its mask.
    Cosmos-RL, min_filter_prefix_tokens.

        tokens      G of [T] int     T differs between rollouts
        loss_masks  G of [T] bool
        rewards     [G] float        after shaping
    """
    masks = [mask.copy() for mask in loss_masks]
    for length, members in shared_prefixes([each.tolist() for each in tokens]):
        if length < at_least or not has_signal(rewards[members]):
            continue
        for member in members:
            if masks[member][length:].any():
                masks[member][:length] = False
    return masks


def shared_prefixes(sequences: Sequence[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield (length, indices of the sequences) of each prefix that several share and no two of them continue alike."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    # sequences that share a prefix are neighbours in this order, and such a prefix is a plateau above both neighbours
    shared = [_shared_length(sequences[one], sequences[other]) for one, other in pairwise(order)]
    plateaus = [[*places] for _, places in groupby(range(len(shared)), key=shared.__getitem__)]
    for places in plateaus:
        first, last = places[0], places[-1]
        around = [*shared[max(0, first - 1) : first], *shared[last + 1 : last + 2]]
        if shared[first] and all(length < shared[first] for length in around):
            yield shared[first], order[first : last + 2]


def _shared_length(one: list[int], other: list[int]) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)
