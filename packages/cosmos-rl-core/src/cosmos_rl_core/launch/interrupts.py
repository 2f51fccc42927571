"""Coroutines that run to their end from plain code, also inside a notebook, and stop when a person asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_listeners: ContextVar[list[Callable[[], Any]] | None] = ContextVar("_listeners", default=None)
"""Calls for an interrupt of the notebook that this coroutine runs beside; None where there is no notebook."""


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Return what `main` returns, as `asyncio.run`; where the caller's thread runs a loop already, in another thread.

    A notebook's kernel runs a loop. An interrupt of the kernel counts as Ctrl-C.
    """
    if not _is_in_a_loop():
        return asyncio.run(main)
    context, listeners = copy_context(), []
    context.run(_listeners.set, listeners)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(context.run, asyncio.run, main)
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                if running.done():
                    raise
                for listener in listeners:
                    listener()


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def on_interrupt(call: Callable[[], None]) -> None:
    """Call `call` in the running loop for each Ctrl-C or SIGTERM; in a thread that gets no signals, never."""
    loop, listeners = asyncio.get_running_loop(), _listeners.get()
    if listeners is not None:
        listeners.append(partial(loop.call_soon_threadsafe, call))
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller handles signals
            loop.add_signal_handler(number, call)
