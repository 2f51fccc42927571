"""A limit of processor time for one answer's part of a reward."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _OutOfTime(BaseException):
    """Not an Exception: libraries pass over those."""


def within(limit_s: float, work: Callable[[], T], *, otherwise: T) -> T:
    """Return the result of `work`, or `otherwise` when it has taken `limit_s` of the processor.

    Processor time of this thread, so that other processes and threads have no influence on a reward. Only the main
    thread, as that of a reward's process, gets the signal: in another thread there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    is_running, began = True, time.thread_time()

    def expire(*_: object) -> None:
        if is_running and time.thread_time() - began >= limit_s:  # the timer counts all threads
            raise _OutOfTime

    before = signal.signal(signal.SIGPROF, expire)
    signal.setitimer(signal.ITIMER_PROF, limit_s, limit_s / 10)  # again, where a bare except has passed over the first
    try:
        return work()
    except _OutOfTime:
        return otherwise
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
