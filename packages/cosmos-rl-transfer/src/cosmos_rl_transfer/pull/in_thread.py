"""Blocking work in a thread, awaited so that a cancelled caller leaves nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def in_thread(executor: Executor, work: Callable[[], T], *, wake: Callable[[], None]) -> T:
    """Return what `work` returns. If this is cancelled, `wake` makes the work end, and that is waited for."""
    future = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        wake()
        await asyncio.wait([future])
        future.exception()  # cancelled work's error is nobody's news
        raise
