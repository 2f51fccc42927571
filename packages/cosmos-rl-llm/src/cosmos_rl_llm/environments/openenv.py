"""OpenEnv: environments behind a server of openenv-core, a session of it for each episode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.episodes.interfaces import Environment, Observation
from cosmos_rl_core.types import Turn
from cosmos_rl_llm.environments import imported


class OpenEnv(Environment):
    """A session with a server. The row's "reset" has arguments of the environment's reset, beside the seed."""

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "message",
        action: Mapping[str, Any] | None = None,
        observation_field: str = "",
    ) -> None:
        """url: of the server, such as "http://127.0.0.1:8000". action_field: the field of an action that has what the
        model said. action: its other fields. observation_field: the field that the model reads; not set: all, as JSON.
        """
        client = imported("openenv.core.generic_client", requirement="openenv-core").GenericEnvClient
        self._client = client(base_url=url)
        self._action_field, self._action, self._field = action_field, dict(action or {}), observation_field

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        result = await self._client.reset(seed=row["seed"] % 2**31, **row.get("reset", {}))
        return Observation(self._text(result))

    async def step(self, said: str, turn: Turn) -> Observation:
        result = await self._client.step({**self._action, self._action_field: said})
        reward = None if result.reward is None else float(result.reward)
        return Observation(self._text(result), reward=reward, done=result.done)

    async def close(self) -> None:
        await self._client.close()

    def _text(self, result: Any) -> str:
        fields = result.observation
        return str(fields[self._field]) if self._field else json.dumps(fields, ensure_ascii=False)
