"""Phases of a worker's start, such as importing and reading weights.

    with entering(show):                   # a worker, around the construction of its parts
        phase(READING)                     # the code that builds a part, in the same thread: calls show(READING)

    phases = Phases()                      # the controller, for each worker
    phases.enter(IMPORTING, now=clock())
    phases.enter(READING, now=clock())
    phases.enter("", now=clock())          # the start is over
    describe(phases.seconds)               # "7.1 s: importing 3.1 s, reading weights 4.0 s"

A worker is importing until a part of it names another phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

IMPORTING, READING, RESTORING = "importing", "reading weights", "reading the checkpoint"
SIMULATORS, REWARDS = "starting simulators", "building rewards"
GPU, WEIGHTS = "waiting for the GPU", "waiting for weights"
SHORT_S = 0.5
"""Phases below it are left out of texts."""

_show: ContextVar[Callable[[str], None] | None] = ContextVar("_show", default=None)


def phase(name: str) -> None:
    """Begin a phase of the start of the worker that this thread builds. Without one, does nothing."""
    if (show := _show.get()) is not None:
        show(name)


@contextmanager
def entering(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` for each phase that begins in this thread, within the context."""
    before = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)


@dataclass(slots=True)
class Phases:
    """The phases of one worker's start, with their seconds."""

    current: str = ""
    """Empty before the first and after the last one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each phase that has ended, in their order."""
    since: float = 0.0
    """Clock when the current one began."""

    def enter(self, name: str, *, now: float) -> None:
        """End the current phase and begin another; empty: the start is over."""
        self.seconds = {each: round(seconds, 2) for each, seconds in self.so_far(now).items()}
        self.current, self.since = name, now

    def so_far(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase, of the current one until now."""
        if not self.current:
            return dict(self.seconds)
        return self.seconds | {self.current: self.seconds.get(self.current, 0.0) + now - self.since}


def describe(seconds: Mapping[str, float]) -> str:
    """Return the sum of some phases, and those of SHORT_S and more; empty without phases."""
    if not seconds:
        return ""
    shown = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value >= SHORT_S)
    return f"{sum(seconds.values()):.1f} s: {shown}" if shown else f"{sum(seconds.values()):.1f} s"
