"""Run coroutines from synchronous code, also inside a notebook, and handle interrupts by the user."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

from cosmos_rl_core.control.server import Controller

T = TypeVar("T")

_listeners: ContextVar[list[Callable[[], Any]] | None] = ContextVar("_listeners", default=None)
"""Callbacks for an interrupt of the notebook's kernel; None outside of a notebook."""


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of `main`, like `asyncio.run`; in another thread if the caller's thread already runs a loop.

    A notebook's kernel runs such a loop. An interrupt of the kernel counts as Ctrl-C.
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
    """Call `call` in the running loop on each Ctrl-C or SIGTERM; not in a thread that gets no signals."""
    loop, listeners = asyncio.get_running_loop(), _listeners.get()
    if listeners is not None:
        listeners.append(partial(loop.call_soon_threadsafe, call))
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller handles signals
            loop.add_signal_handler(number, call)


class Interrupts:
    """Requests to end a run: Ctrl-C, SIGTERM, `cosmos-rl stop`. The first ends it cleanly, the second at once."""

    def __init__(self, *, note: Callable[[str], None], kill: Callable[[], None]) -> None:
        """note: reports the first one. kill: ends the workers."""
        self.count = 0
        self._note = note
        self._kill = kill
        self._controller: Controller | None = None

    def listen(self, controller: Controller) -> None:
        """Apply interrupts to this controller from now on."""
        self._controller = controller
        on_interrupt(self.interrupt)

    def interrupt(self) -> None:
        """End the run after the step in work; the second time at once."""
        assert self._controller is not None
        self.count += 1
        if self.count == 1:
            self._note("stopping: the current step is finished and saved (again to stop at once)")
            self._controller.stop("interrupted")
        else:
            self._kill()
            self._controller.outcome.fail(KeyboardInterrupt("stopped at once"))
