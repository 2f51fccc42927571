"""A number is guessed in several turns: the environment, and one row for each number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cosmos_rl_core import Environment, Observation, Turn

HIGHEST = 7


def rows() -> Sequence[Mapping[str, Any]]:
    return [{"secret": secret} for secret in range(HIGHEST + 1)]


class GuessGame(Environment):
    """The model says a digit; the answer is whether the secret is less (<) or more (>). The right digit wins."""

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.secret = str(row["secret"])
        return Observation("?")

    async def step(self, said: str, turn: Turn) -> Observation:
        if said == self.secret:
            return Observation(reward=1.0, done=True)
        if not said.isdigit():
            return Observation("?")  # an error of the model is an observation
        return Observation("<" if self.secret < said else ">")
