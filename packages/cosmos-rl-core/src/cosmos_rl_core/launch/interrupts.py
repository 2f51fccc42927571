"""Run coroutines from synchronous code, also inside a notebook, and handle interrupts by the user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

import uvloop

from cosmos_rl_core.control.server import Controller
from cosmos_rl_core.launch.supervised.link import LauncherLink

CHECK_S = 0.1
T = TypeVar("T")

_listeners: ContextVar[list[Callable[[], Any]] | None] = ContextVar("_listeners", default=None)
"""Callbacks for an interrupt of the notebook's kernel; None outside of a notebook."""


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of `main`, like `asyncio.run`; in another thread if the caller's thread already runs a loop.

    A notebook's kernel runs such a loop. An interrupt of the kernel counts as Ctrl-C. The loop is uvloop's: with
    thousands of workers a message costs the controller a quarter less than with asyncio's own.
    """
    if not _is_in_a_loop():
        return _run(main)
    context, listeners = copy_context(), []
    context.run(_listeners.set, listeners)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(context.run, _run, main)
        while True:
            try:
                return running.result()
            except KeyboardInterrupt:
                if running.done():
                    raise
                for listener in listeners:
                    listener()


def _run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_without_handlers(main))


async def _without_handlers(main: Coroutine[Any, Any, T]) -> T:
    """Await `main`, then remove its signal handlers: unlike asyncio's, a loop of uvloop keeps them when it closes."""
    try:
        return await main
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # not the main thread
                asyncio.get_running_loop().remove_signal_handler(number)


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def on_interrupt(call: Callable[[], None], *, terminate: Callable[[], None] | None = None) -> None:
    """Call `call` in the running loop on each Ctrl-C or SIGTERM; not in a thread that gets no signals.

    terminate: called on SIGTERM instead.
    """
    loop, listeners = asyncio.get_running_loop(), _listeners.get()
    if listeners is not None:
        listeners.append(partial(loop.call_soon_threadsafe, call))
    for number, act in ((signal.SIGINT, call), (signal.SIGTERM, terminate or call)):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller handles signals
            loop.add_signal_handler(number, act)


class Interrupts:
    """Requests to end a run: Ctrl-C, SIGTERM, `cosmos-rl stop`. The first ends it cleanly, the second at once."""

    def __init__(
        self,
        *,
        note: Callable[[str], None],
        kill: Callable[[], None],
        moves: bool,
        supervised: LauncherLink | None = None,
    ) -> None:
        """note: reports the first one. kill: ends the workers. moves: [elastic] controller_moves. supervised: link to
        the launcher, which starts the next controller."""
        self.count = 0
        self._note = note
        self._kill = kill
        self._moves = moves
        self._supervised = supervised
        self._controller: Controller | None = None

    async def listen(self, controller: Controller) -> None:
        """Apply interrupts to this controller from now on, and open the link to the launcher, which passes them on."""
        self._controller = controller
        if self._supervised is not None:
            await self._supervised.open()
        on_interrupt(self.interrupt, terminate=self._exit_without_policies if self._moves else None)
        if self._supervised is not None:
            self._supervised.ready()
            if self._supervised.task.interrupted:
                self.interrupt()

    def interrupt(self) -> None:
        """End the run after the step in work; the second time at once."""
        assert self._controller is not None
        self.count += 1
        if self.count == 1:
            self._note("stopping: the current step is finished and saved (again to stop at once)")
            self._controller.stop("interrupted")
            if self._supervised is not None:
                self._supervised.interrupt_next()
        else:
            self._kill()
            self._controller.outcome.fail(KeyboardInterrupt("stopped at once"))

    def _exit_without_policies(self) -> None:
        """Exit with 143 when no policy is connected, without ending the run: the next controller continues it.

        Policies that get a SIGTERM too save before they leave.
        """
        assert self._controller is not None
        if self._controller.outcome.is_decided:
            return  # the run has ended by itself
        if not self._controller.peers.of_role("policy"):
            sys.stdout.flush()
            os._exit(128 + signal.SIGTERM)
        asyncio.get_running_loop().call_later(CHECK_S, self._exit_without_policies)
