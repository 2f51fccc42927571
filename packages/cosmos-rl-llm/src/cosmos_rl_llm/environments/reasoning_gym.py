"""reasoning-gym: tasks that are made by a program, which also scores the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.types import Turn
from cosmos_rl_llm.environments import imported


class ReasoningGym(Environment):
    """A question, and its score from 0 to 1. The row's "index" chooses the question."""

    def __init__(
        self,
        *,
        task: str,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        instruction: str = "",
        tag: str = "",
        attempts: int = 1,
    ) -> None:
        """task: such as "leg_counting". config: of the task, such as {"max_animals": 3}. seed: of its questions.

        instruction: follows the question. tag: the answer is what is inside the last of these, such as "answer" for
        <answer>...</answer>; not set: the whole text. attempts: turns with an answer until it scores 1.
        """
        self._dataset = _dataset(task, json.dumps(dict(config or {})), seed)
        self._instruction, self._tag, self._left = instruction, tag, attempts

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        index = row["index"] % len(self._dataset)
        self._entry = await asyncio.to_thread(self._dataset.__getitem__, index)
        return Observation(f"{self._entry['question']}\n{self._instruction}".strip())

    async def step(self, said: str, turn: Turn) -> Observation:
        self._left -= 1
        score = float(await asyncio.to_thread(self._dataset.score_answer, self._answer(said), self._entry))
        if score == 1 or self._left <= 0 or turn.finish_reason == "length":
            return Observation(reward=score, done=True, metrics={"solved": score == 1})
        return Observation("That is not right. Try again.")

    def _answer(self, said: str) -> str:
        if not self._tag:
            return said.strip()
        return said.rpartition(f"<{self._tag}>")[2].partition(f"</{self._tag}>")[0].strip()


@lru_cache(maxsize=16)
def _dataset(task: str, config: str, seed: int) -> Any:
    gym = imported("reasoning_gym", requirement="reasoning-gym")
    try:
        return gym.create_dataset(task, **{"seed": seed, **json.loads(config)})
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning_gym task {task!r} with config {config}: {error}") from error
