"""The tiny domain's settings, its wanted actions and its rewards. No torch. See `tiny`."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup


class TinyModel(Strict):
    """[model]"""

    actions: int = Field(default=5, ge=2)
    """V: actions to choose from."""
    contexts: int = Field(default=10, ge=1)
    """Different prompts."""
    hidden: int = Field(default=16, ge=1)
    seed: int = 0
    """Of the initial weights."""


class TinyData(Strict):
    """[data]"""

    rows: int = Field(default=10, ge=0)
    start: int = 0


def wanted(context: int, place: int, *, actions: int) -> int:
    """The action that is rewarded."""
    return (context + place) % actions


def hits(group: RolloutGroup) -> list[float]:
    """Fraction of actions that are the wanted ones."""
    context = group.prompt.row["context"]
    fractions = []
    for rollout in group.rollouts:
        actions, num_actions = rollout.arrays["actions"], int(rollout.arrays["num_actions"])
        right = [action == wanted(context, place, actions=num_actions) for place, action in enumerate(actions)]
        fractions.append(float(np.mean(right)))
    return fractions


def not_a_number(group: RolloutGroup) -> list[float]:
    return [float("nan")] * len(group.rollouts)


def words(group: RolloutGroup) -> Any:
    return ["good"] * len(group.rollouts)


def too_few(group: RolloutGroup) -> list[float]:
    return [1.0] * (len(group.rollouts) - 1)
