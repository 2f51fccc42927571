"""Threads that read rows side by side: those of a batch, and beside a training step those of the next one.

    step k        forward and backward passes, optimizer   |  step k + 1
    background    the rows of step k + 1 -----------------> take: at once, if they are read by then

Decoders of pictures and videos release the GIL.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Thread
from typing import Any, TypeVar

from cosmos_rl_core.types import Prompt

THREADS = 8
"""Maximum number of rows or prompts that a process reads at once, or as many as there are cores."""
T = TypeVar("T")
R = TypeVar("R")


@cache
def readers() -> ThreadPoolExecutor:
    """The process's threads that read prompts and rows with pictures or videos."""
    return ThreadPoolExecutor(_num_threads(), thread_name_prefix="media")


def side_by_side(read: Callable[[T], R], rows: Sequence[T]) -> list[R]:
    """Return the results of reading rows, several at a time."""
    return list(readers().map(read, rows))


class Ahead:
    """Rows that are read before they are wanted. Any thread may take them; one begins.

    ahead.begin(prompts, read)
    result = ahead.take(prompt, read)       of any prompt; one that was not begun is read now
    """

    def __init__(self) -> None:
        self._begun: dict[int, tuple[Prompt, Future[Any]]] = {}

    def begin(self, prompts: Sequence[Prompt], read: Callable[[Prompt], Any]) -> None:
        """Read prompts in threads that do not keep the process alive. Those begun before are forgotten."""
        self._begun = {prompt.sample_id: (prompt, Future()) for prompt in prompts}
        waiting = deque(self._begun.values())
        for _ in range(min(_num_threads(), len(waiting))):
            Thread(target=_read_all, args=(waiting, read), name="row-ahead", daemon=True).start()

    def take(self, prompt: Prompt, read: Callable[[Prompt], R]) -> R:
        """Return the result of reading a prompt, and raise what it raised; wait for one that is being read."""
        begun, future = self._begun.get(prompt.sample_id, (None, None))
        if future is None or begun != prompt:  # of other rows with the same numbers, such as held-out ones
            return read(prompt)
        del self._begun[prompt.sample_id]
        return future.result()


def _read_all(waiting: deque[tuple[Prompt, Future[Any]]], read: Callable[[Prompt], Any]) -> None:
    while True:
        try:
            prompt, future = waiting.popleft()
        except IndexError:
            return
        try:
            future.set_result(read(prompt))
        except BaseException as error:  # raised where it is taken
            future.set_exception(error)


def _num_threads() -> int:
    return min(THREADS, max(2, os.cpu_count() or 1))
