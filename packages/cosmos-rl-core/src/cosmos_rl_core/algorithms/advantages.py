"""Advantages: how much better a rollout did than its group, or a step of an episode than the critic expected.

rewards [G] float64 -> advantages [G] float64
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_core.algorithms.table import find_algorithm
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from cosmos_rl_core.algorithms.config import AlgorithmConfig

GroupAdvantage = Callable[[np.ndarray], np.ndarray]
"""Rewards of a group [G] float64 -> its advantages [G] float64."""
BatchAdvantage = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""Rewards of each group [G] of a step -> advantages of each group [G]."""
StepAdvantages = Callable[[Sequence[RolloutGroup], int], Sequence[RolloutGroup]]
"""(groups of a step, step) -> the groups with advantages that need all of them."""


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """Subtract the group's mean: A_i = r_i - mean(r). Dr.GRPO (arXiv 2503.20783)."""
    if len(rewards) < 2:
        raise UserError("a group of one rollout has nothing to compare with: set group_size to 2 or more")
    shifted = rewards - rewards[0]  # equal rewards become exact zeros, whatever their size
    return shifted - shifted.mean()


def group_std(rewards: np.ndarray, *, ddof: int = 0, epsilon: float = 1e-6) -> np.ndarray:
    """Subtract the group's mean, divide by its standard deviation. GRPO (arXiv 2402.03300, section 4.1).

    A_i = (r_i - mean(r)) / (std(r) + epsilon), with G - ddof as the divisor of the variance.
    """
    centred = group_mean(rewards)
    return centred / (np.sqrt(np.sum(centred**2) / (len(rewards) - ddof)) + epsilon)


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Subtract the mean of the others: A_i = r_i - sum_{j != i} r_j / (G - 1). RLOO (arXiv 2402.14740).

    sum_{j != i} r_j = G mean(r) - r_i, hence A_i = (r_i - mean(r)) G / (G - 1).
    """
    return group_mean(rewards) * (len(rewards) / (len(rewards) - 1))


def global_std(groups: Sequence[np.ndarray], *, ddof: int = 0) -> float:
    """Return the standard deviation of all rewards of a step, differences between prompts included.

    flow_grpo's and DiffusionNFT's `global_std`; TRL's `scale_rewards = "batch"` with ddof 1.
    """
    return float(np.std(np.concatenate(groups), ddof=ddof))


def pooled_std(groups: Sequence[np.ndarray], *, ddof: int = 0) -> float:
    """Return the pooled standard deviation: each reward around its own group's mean; divisor sum_k (G_k - ddof)."""
    squares = np.concatenate([group_mean(rewards) ** 2 for rewards in groups])
    return float(np.sqrt(squares.sum() / (len(squares) - ddof * len(groups))))


def generalized(rewards: np.ndarray, values: np.ndarray, *, gamma: float, gae_lambda: float) -> np.ndarray:
    """Estimate each step's advantage from rewards [S] and values [S + 1] of an episode -> [S] float32.

    delta_k = r_k + gamma V_{k+1} - V_k,   A_k = delta_k + gamma lambda A_{k+1}.   GAE (arXiv 1506.02438, equation 16).

    values[S] is 0 after a true end and the critic's estimate where a limit cut the episode off.
    """
    deltas = rewards + gamma * values[1:] - values[:-1]
    advantages = np.empty(len(deltas), np.float64)
    following = 0.0
    for step in reversed(range(len(deltas))):
        following = advantages[step] = deltas[step] + gamma * gae_lambda * following
    return advantages.astype(np.float32)


ADVANTAGES: Mapping[str, GroupAdvantage] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "global_std": group_mean,
    "pooled_std": group_mean,
    "leave_one_out": leave_one_out,
}
"""Advantages of one group by name; for the two in `BATCH_DEVIATIONS` before the division."""

BATCH_DEVIATIONS: Mapping[str, Callable[..., float]] = {"global_std": global_std, "pooled_std": pooled_std}
"""Divisors by name: (rewards of each group of a step, ddof) -> the deviation that divides all of them."""


def build_batch_advantage(config: AlgorithmConfig) -> BatchAdvantage | None:
    """Return the advantages that need all groups of a step; None where each group is enough."""
    deviation = BATCH_DEVIATIONS.get(config.advantage)
    if deviation is None or find_algorithm(config.name).advantage is not None:
        return None
    finish = _finishing(config)

    def advantages(groups: Sequence[np.ndarray]) -> list[np.ndarray]:
        divisor = deviation(groups, ddof=config.std_ddof) + config.std_epsilon
        return [finish(group_mean(rewards) / divisor) for rewards in groups]

    return advantages


def build_advantage(config: AlgorithmConfig) -> GroupAdvantage:
    """Return the estimator of the config: checked, and clipped where `advantage_clip` is set.

    With "gae" a rollout as a whole has advantage 0; `generalized` estimates those of its steps.
    """
    function = find_algorithm(config.name).advantage or _of_group(config)
    seen_together = build_batch_advantage(config) is not None
    finish = np.asarray if seen_together else _finishing(config)

    def advantages(rewards: np.ndarray) -> np.ndarray:
        values = np.asarray(function(np.asarray(rewards, dtype=np.float64)), dtype=np.float64)
        if values.shape != np.shape(rewards) or not np.isfinite(values).all():
            raise UserError(
                f"the advantage of algorithm {config.name!r} has to return {np.size(rewards)} finite "
                f"numbers, one a rollout; it returned {values!r}"
            )
        return finish(values)

    return advantages


def _of_group(config: AlgorithmConfig) -> GroupAdvantage:
    if config.advantage == "group_std":
        return partial(group_std, ddof=config.std_ddof, epsilon=config.std_epsilon)
    return ADVANTAGES.get(config.advantage, np.zeros_like)


def _finishing(config: AlgorithmConfig) -> GroupAdvantage:
    """Shape a group's advantages as the algorithm does, and clip them."""
    shaping = find_algorithm(config.name).shaping
    limit = np.inf if config.advantage_clip is None else config.advantage_clip

    def finish(advantages: np.ndarray) -> np.ndarray:
        shaped = advantages if shaping is None else shaping(advantages, config)
        return np.clip(shaped, -limit, limit)

    return finish


DEVIATION_FLOOR = 1e-5
"""Added to the deviation that divides, so that steps that are all the same do not blow up."""


def build_step_advantages(config: AlgorithmConfig) -> StepAdvantages | None:
    """Return the function that completes the advantages of a step; None where those of each group are final.

    "gae": normalises and clips the advantages of all episodes. A deviation over all groups: divides by it.
    """
    if config.advantage == "gae":
        return partial(_normalized, config)
    advantage = build_batch_advantage(config)
    return None if advantage is None else partial(with_batch_advantages, advantage)


def with_batch_advantages(
    advantage: BatchAdvantage, groups: Sequence[RolloutGroup], step: int
) -> Sequence[RolloutGroup]:
    """Return the groups with the advantages of their rewards."""
    values = advantage([np.array([rollout.reward for rollout in group.rollouts]) for group in groups])
    return [_with_advantages(group, each) for group, each in zip(groups, values, strict=True)]


def _with_advantages(group: RolloutGroup, advantages: np.ndarray) -> RolloutGroup:
    pairs = zip(group.rollouts, advantages, strict=True)
    return replace(group, rollouts=tuple(replace(rollout, advantage=float(value)) for rollout, value in pairs))


def _normalized(config: AlgorithmConfig, groups: Sequence[RolloutGroup], step: int) -> Sequence[RolloutGroup]:
    shift, scale, limit = 0.0, 1.0, np.inf if config.advantage_clip is None else config.advantage_clip
    if config.normalize_advantages:
        shift, scale = _moments([rollout for group in groups for rollout in group.rollouts])
    if step < config.critic_warmup_steps:
        scale = np.inf  # only the critic learns
    return [
        replace(group, rollouts=tuple(_scaled(each, shift, scale, limit) for each in group.rollouts))
        for group in groups
    ]


def critic_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Return `explained_variance` = 1 - var(return - value) / var(return) over steps, and means; {} without any."""
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
    """Scale and clip a rollout's advantages; its returns do not change."""
    assert rollout.episode is not None and rollout.episode.advantages is not None
    advantages = np.clip((rollout.episode.advantages - shift) / scale, -limit, limit).astype(np.float32)
    episode = replace(rollout.episode, advantages=advantages)
    return replace(rollout, episode=episode, advantage=float(advantages.mean()))
