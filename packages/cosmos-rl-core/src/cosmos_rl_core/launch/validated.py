"""When a supervised replica measures the loss on held-out rows: between two steps, before it asks for a batch.

next_batch(0)             next_batch(1)   ...   next_batch(n)
^ before the first step                         ^ after the last; every [eval] every_steps between
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from cosmos_rl_core.loop import Steps
from cosmos_rl_core.types import StepResult, TrainBatch


class ValidatedSteps:
    """`loop.Steps` that measures before it asks for a batch, wherever that is due. Every rank wraps its own."""

    def __init__(
        self,
        steps: Steps,
        *,
        due: Callable[[int], bool],
        measure: Callable[[], Awaitable[Mapping[str, float]]],
        tell: Callable[[int, Mapping[str, float]], Awaitable[None]],
    ) -> None:
        """Wrap `steps`; `due(version)` says when to `measure`, `tell(version, figures)` hands on what came of it."""
        self._steps = steps
        self._due = due
        self._measure = measure
        self._tell = tell

    async def next_batch(self, step: int) -> TrainBatch | None:
        if self._due(step):
            await self._tell(step, await self._measure())
        return await self._steps.next_batch(step)

    async def commit(self, step: int) -> None:
        await self._steps.commit(step)

    async def report(self, result: StepResult, sync: Mapping[str, float]) -> None:
        await self._steps.report(result, sync)
