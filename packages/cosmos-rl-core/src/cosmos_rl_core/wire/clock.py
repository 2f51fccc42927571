"""The time in which a process ran."""

from __future__ import annotations

from collections.abc import Callable


class RunningClock:
    """A clock that leaves out the time in which this process did not run: stopped, suspended with its machine, starved.

    Messages wait meanwhile. By another clock all peers have been silent, and their time to answer is over at once.
    """

    def __init__(self, clock: Callable[[], float], *, longest_s: float) -> None:
        """longest_s: most seconds between two readings in a process that runs; more are left out."""
        self._clock = clock
        self._longest_s = longest_s
        self._read_at = clock()
        self._left_out_s = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._left_out_s += max(0.0, now - self._read_at - self._longest_s)
        self._read_at = now
        return now - self._left_out_s
