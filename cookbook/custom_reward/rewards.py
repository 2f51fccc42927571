"""Three rewards of one's own. A reward gets a whole group and returns one finite number a rollout."""

from __future__ import annotations

import asyncio

from pydantic import Field

from cosmos_rl_core import Options, Rollout, RolloutGroup


def only_digits(group: RolloutGroup) -> list[float]:
    """The plainest kind, a function: 1 where the answer is a number and nothing else."""
    return [float(rollout.text.isdecimal()) for rollout in group.rollouts]


class Closeness(Options):
    """A class when there are options: 1 for the right sum, less the further away, 0 from `scale` on.

    A strict model makes a misspelt option an error before the run starts; any class that takes its options by keyword
    will do.
    """

    scale: float = Field(default=100.0, gt=0)
    """Distance from the reference at which nothing is left."""

    def __call__(self, group: RolloutGroup) -> list[float]:
        wanted = int(group.prompt.row["answer"])  # the row as [data] read it, with its own columns too
        return [self._score(rollout.text, wanted) for rollout in group.rollouts]

    def _score(self, text: str, wanted: int) -> float:
        distance = abs(int(text) - wanted) if text.isdecimal() else self.scale
        return max(0.0, 1.0 - distance / self.scale)


async def finished(group: RolloutGroup) -> list[float]:
    """An async function where a reward has to wait, for a judge behind a URL or a sandbox: many wait side by side."""
    return await asyncio.gather(*(_judge(rollout) for rollout in group.rollouts))


async def _judge(rollout: Rollout) -> float:
    await asyncio.sleep(0.001)  # here you would await your judge
    return float(rollout.finish_reason == "stop")
