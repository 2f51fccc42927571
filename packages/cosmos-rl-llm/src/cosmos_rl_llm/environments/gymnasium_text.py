"""gymnasium: environments whose observations and actions are texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Turn
from cosmos_rl_llm.environments import imported


class GymnasiumText(Environment):
    """An environment of `gymnasium.make` with spaces.Text on both sides. The reward of each step is a turn's."""

    def __init__(self, *, id: str, kwargs: Mapping[str, Any] | None = None, instruction: str = "") -> None:
        """id: such as "my_games:Guess-v0", whose module registers it. instruction: before the first observation."""
        gymnasium = imported("gymnasium", requirement="gymnasium")
        try:
            self._env = gymnasium.make(id, **(kwargs or {}))
        except (TypeError, ModuleNotFoundError, gymnasium.error.Error) as error:
            raise UserError(f"gymnasium {id}: {error}") from error
        for space in (self._env.observation_space, self._env.action_space):
            if not isinstance(space, gymnasium.spaces.Text):
                raise UserError(
                    f"gymnasium {id} has the space {space}: choose one whose spaces are gymnasium.spaces.Text"
                )
        self._instruction = instruction

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        text, _ = self._env.reset(seed=(row["seed"] + row.get("index", 0)) % 2**31)
        return Observation(f"{self._instruction}\n{text}".strip())

    async def step(self, said: str, turn: Turn) -> Observation:
        space, action = self._env.action_space, said.strip()
        if not space.contains(action):
            return Observation(
                f"Answer with {space.min_length} to {space.max_length} of {''.join(space.character_list)}"
            )
        text, reward, terminated, truncated, _ = self._env.step(action)
        return Observation(text, reward=float(reward), done=terminated or truncated)

    async def close(self) -> None:
        self._env.close()
