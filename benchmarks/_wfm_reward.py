"""A reward in place of a remote service: it takes time, and none of this machine's cores."""

from __future__ import annotations

import asyncio

from pydantic import Field

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_core.types import RolloutGroup
from cosmos_rl_wfm.rewards.pixels import brightness


class Remote(Strict):
    """Mean brightness, after a while."""

    seconds: float = Field(ge=0)
    """How long the answer for a group takes."""

    async def __call__(self, group: RolloutGroup) -> list[float]:
        await asyncio.sleep(self.seconds)
        return [brightness(rollout.media["video"]) for rollout in group.rollouts]
