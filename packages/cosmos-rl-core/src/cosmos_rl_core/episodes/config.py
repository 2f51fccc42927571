"""[environment]: episodes of several turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from cosmos_rl_core.settings.base import Strict


class EnvironmentSection(Strict):
    """[environment]: episodes of several turns with an environment. Without it a rollout is one answer."""

    name: str = Field(min_length=1)
    """A class derived from `Environment`: one that a package installed, or "module:attribute"."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Passed to the class by keyword."""
    max_turns: int = Field(default=8, ge=1)
    """Maximum number of turns of the model in an episode; it is cut after the last, unless the environment ends it."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens of one turn. Not set: what is left of [rollout.sampling] max_tokens, which limits all
    tokens after the first prompt, the environment's included."""
    max_episodes: int = Field(default=256, ge=1)
    """Maximum number of concurrent episodes in a rollout replica, whether the model or the environment is at work."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Maximum time of one answer of the environment; then the episode is given up and tried again."""
    retries: int = Field(default=1, ge=0)
    """Further tries of an episode whose environment failed, before its prompt is given back."""
    unfinished_reward: float | None = None
    """Reward of an episode that was cut and that the environment gave none. Not set: such an episode is an error of
    its prompt, as nobody gave it a reward."""
    python: str = ""
    """Interpreter of another environment with the class and its packages, such as "envs/games/bin/python". Not set: the
    class runs in the rollout replica."""
