"""An engine that takes turns with the policy on the same GPUs ([run] colocate).

    asleep --generate, switch--> wait for the turn -> engine.wake -> awake --no work, and the policy wants its turn-->
    engine.sleep -> the turn ends -> asleep

An engine without work stays awake until the policy wants its turn: the next grant of leases may be on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.episodes.interfaces import HoldsSessions, Opening, Session
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.gpu_time import RolloutGpuTime
from cosmos_rl_core.interfaces import Sleeps
from cosmos_rl_core.observe.trace import Timeline
from cosmos_rl_core.types import Prompt, Rollout, Sampling, Turn

if TYPE_CHECKING:
    from torch import Tensor


class ColocatedEngine:
    """Implements `interfaces.RolloutEngine` over an engine that can sleep, and is asleep at first."""

    def __init__(self, engine: Sleeps, gpu_time: RolloutGpuTime, *, timeline: Timeline | None = None) -> None:
        self._engine, self._gpu_time = engine, gpu_time
        self._timeline = timeline or Timeline("rollout")
        self._span = ExitStack()
        """Holds the span of the turn."""
        self._users = 0
        """Calls that need the engine awake."""
        self._is_awake = asyncio.Event()
        self._is_idle = asyncio.Event()
        """Set while there are no users."""
        self._is_idle.set()
        self._changing = asyncio.Lock()
        """Held while the engine falls asleep or wakes."""
        self._waking: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Policy version of the weights, also of those that sleep."""
        return self._engine.version

    @property
    def progress(self) -> int:
        """The engine's work."""
        return self._engine.progress

    def weights(self) -> Mapping[str, Tensor]:
        """The engine's live tensors, without memory while it sleeps on a GPU."""
        return self._engine.weights()

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: Any, seed: int
    ) -> tuple[str, list[Rollout]]:
        async with self._awake():
            return await self._engine.generate(prompt, num_samples=num_samples, sampling=sampling, seed=seed)

    def open(self, opening: Opening) -> _AwakeSession:
        """Begin a history (`episodes.interfaces.HoldsSessions`): the engine is awake while it samples a turn."""
        if not isinstance(self._engine, HoldsSessions):
            raise UserError("[environment]: this engine has no sessions for episodes of turns")
        return _AwakeSession(self._engine.open(opening), self._awake)

    async def switch(self, version: int, apply: Callable[[], None]) -> None:
        async with self._awake():
            await self._engine.switch(version, apply)

    async def close(self) -> None:
        await self.leave()
        await self._engine.close()

    async def leave(self) -> None:
        """Stop waiting for the turn."""
        self._span.close()
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.gather(self._waking, return_exceptions=True)

    async def share_gpu_time(self) -> None:
        """Put the engine to sleep whenever it has no work and the policy wants its turn. Runs until cancelled."""
        while True:
            await self._is_awake.wait()
            await self._gpu_time.wanted()
            await self._is_idle.wait()
            async with self._changing:
                if not self._users:
                    self._is_awake.clear()
                    with self._timeline.span("sleep", track="turn"):
                        await self._engine.sleep()
                    self._span.close()
                    self._gpu_time.give()

    @asynccontextmanager
    async def _awake(self) -> AsyncIterator[None]:
        self._users += 1
        self._is_idle.clear()
        try:
            if not self._is_awake.is_set():
                if self._waking is None:
                    self._waking = asyncio.create_task(self._wake())
                await asyncio.shield(self._waking)  # a cancelled call does not leave the engine half awake
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._is_idle.set()

    async def _wake(self) -> None:
        try:
            async with self._changing:
                with self._timeline.span("wait for turn", track="turn"):
                    await self._gpu_time.take()
                self._span.enter_context(self._timeline.span("turn", track="turn"))
                with self._timeline.span("wake", track="turn"):
                    await self._engine.wake()
                self._is_awake.set()
        finally:
            self._waking = None


class _AwakeSession:
    """A session of an engine that may sleep between two turns, and forget keys and values."""

    def __init__(self, session: Session, awake: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        self._session, self._awake = session, awake
        self.limit = session.limit

    async def extend(self, terms: np.ndarray, *, sampling: Sampling, seed: int) -> Turn:
        async with self._awake():
            return await self._session.extend(terms, sampling=sampling, seed=seed)

    def close(self) -> None:
        self._session.close()
