"""Work over thousands of workers in slices, so that the event loop handles messages between them.

def count(peers) -> Slices[int]:
    for some in slices(peers):
        ...
        yield
    return number

number = at_once(count(peers))
number = await in_turns(count(peers), spent)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
Slices = Generator[None, None, T]
"""Work that yields after each slice and returns its result."""
SLICE = 256
"""Workers per slice."""


def slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield parts of at most SLICE items."""
    for first in range(0, len(items), SLICE):
        yield items[first : first + SLICE]


def at_once(work: Slices[T]) -> T:
    """Return the result of work that nothing interrupts."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


async def in_turns(work: Slices[T], spent: Callable[[float], None]) -> T:
    """Return the result of work between whose slices the event loop goes on. spent: receives its CPU seconds."""
    while True:
        began = time.thread_time()
        try:
            next(work)
        except StopIteration as end:
            return end.value
        finally:
            spent(time.thread_time() - began)
        await asyncio.sleep(0)
