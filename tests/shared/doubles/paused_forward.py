"""Pauses an engine in a forward pass, so that a test cancels, switches or closes at a known point of a rollout.

paused = PausedForward(model)
call = asyncio.ensure_future(engine.generate(...))
await paused.reached()
switch = await posted(engine.switch(1, apply))
paused.go()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from torch import nn

_LIMIT_S = 60
T = TypeVar("T")


class PausedForward:
    """Blocks forward pass number `passes` of `module` until `go` is called."""

    def __init__(self, module: nn.Module, *, passes: int = 3) -> None:
        self._left = passes
        self._here, self._go = threading.Event(), threading.Event()
        module.register_forward_pre_hook(self._hold)

    async def reached(self) -> None:
        """Return when the thread is held. Raises TimeoutError after a minute."""
        if not await asyncio.to_thread(self._here.wait, _LIMIT_S):
            raise TimeoutError("the module was not called often enough")

    def go(self) -> None:
        """Let the thread go on, for good."""
        self._go.set()

    def _hold(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._here.set()
            if not self._go.wait(_LIMIT_S):
                raise TimeoutError("nothing let the module go on")


async def posted(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start `call`, a request to a `ThreadedEngine`, and return its task when the request has been posted."""
    task = asyncio.ensure_future(call)
    for _ in range(2):  # the turn in which it asks, and the turn that posts all requests of that one
        await asyncio.sleep(0)
    return task
