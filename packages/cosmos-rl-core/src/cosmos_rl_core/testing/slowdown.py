"""Compares the time of two implementations on the machine at hand, for tests of kernels that a measurement chose.

assert slowdown(plain=run_torchs, chosen=run_ours) <= NO_SLOWER
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

NO_SLOWER = 1.02
"""The decision of a call costs 2 % at most."""
_ROUNDS = 40
_ATTEMPTS = 5
"""Equal work differs by up to 6 % on a loaded machine: the best of several comparisons counts."""
_ROUND_S = 2e-3
"""Time of one side in a round, at least one call."""


def slowdown(*, plain: Callable[[], object], chosen: Callable[[], object]) -> float:
    """Return the time of `chosen` over that of `plain`: CPU time of this thread, both in turns."""
    plain(), chosen()
    calls = max(1, int(_ROUND_S / max(_seconds(plain, 1), 1e-6)))
    return min(_ratio(plain, chosen, calls) for _ in range(_ATTEMPTS))


def _ratio(plain: Callable[[], object], chosen: Callable[[], object], calls: int) -> float:
    found = []
    for number in range(_ROUNDS):
        if number % 2:
            theirs, ours = _seconds(plain, calls), _seconds(chosen, calls)
        else:
            ours, theirs = _seconds(chosen, calls), _seconds(plain, calls)
        found.append(ours / theirs)
    return median(found)


def _seconds(work: Callable[[], object], calls: int) -> float:
    started = time.thread_time()
    for _ in range(calls):
        work()
    return time.thread_time() - started
