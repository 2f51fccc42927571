"""One group of slots in a pool: its process, what the process has not answered yet, and whether it still moves."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimSpec
from cosmos_rl_vla.sims.pool.chunk import ChunkResult
from cosmos_rl_vla.sims.pool.memory import ObservationMemory, Phase
from cosmos_rl_vla.sims.pool.messages import (
    Attach,
    Began,
    Broke,
    Chunked,
    Failed,
    Made,
    Make,
    Outcomes,
    Refused,
    Reply,
    Run,
    Start,
)
from cosmos_rl_vla.sims.pool.process import GroupProcess

_LAST_MOMENTS_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A slot has answered: its observation is in the pool's arrays, and stays until the slot's next command."""

    slot: int
    result: ChunkResult | None
    """What the chunk gave; None for an episode that has just begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The episode of a slot is gone; the slot can begin another at once."""

    slot: int
    reason: str
    final: bool = False
    """True: the same episode would be lost again (a task that does not exist); False: worth another attempt."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """For how long a process may stay in one call, in seconds."""

    start_s: float
    reset_s: float
    step_s: float


class Dead(Exception):
    """The process of a group cannot be used any more. Says why."""


class Group:
    """A process that is replaced when it fails.

    group.start(slot, task, init); group.run(slots, actions)
    events = group.receive()            # when group.connection is readable; Dead where the process failed
    events = group.bury(reason)         # what it ran is lost; then group.spawn()
    """

    def __init__(
        self, first: int, *, make: Make, limits: Limits, memory: int, lifeline: int, python: str | None
    ) -> None:
        self._first = first
        self._make = make
        self._limits = limits
        self._memory, self._lifeline, self._python = memory, lifeline, python
        self._attach: Attach | None = None
        self._pulse: NDArray[np.int64] = np.zeros(2, np.int64)
        self.spec: SimSpec | None = None
        """None until the first process has built its simulators."""
        self.faults = 0
        """Episodes or processes lost since a chunk last succeeded."""
        self.fault = ""
        """The last of them."""
        self.last_words = ""
        """What the last process that was replaced printed at its end."""
        self.spawn()

    def spawn(self) -> None:
        """Start a process, the first or the next."""
        self.process = GroupProcess(memory=self._memory, lifeline=self._lifeline, python=self._python)
        self._unanswered: deque[Sequence[int]] = deque()
        self._running: set[int] = set()
        self._building = True
        self._moved_at = time.monotonic()
        self._count = -1
        self.process.send(self._make)
        if self._attach is not None:
            self.process.send(self._attach)

    def attach(self, memory: ObservationMemory, *, spec: SimSpec, groups: int) -> None:
        """Tell this and all later processes where to write what their simulators see."""
        number = self._first // self._make.slots
        self._pulse = memory.pulses[number]
        self._attach = Attach(spec=spec, group=number, groups=groups)
        self.process.send(self._attach)

    @property
    def awaited(self) -> bool:
        """Whether an answer is due."""
        return bool(self._unanswered)

    def start(self, slot: int, *, task: str, init: int) -> None:
        """Begin an episode in a slot."""
        self._expect([slot])
        self._running.add(slot)
        self.process.send(Start(slot=slot - self._first, task=task, init=init))

    def run(self, slots: Sequence[int], actions: NDArray[np.float32]) -> None:
        """Execute a chunk [n, H, D] in slots of this group."""
        self._expect(slots)
        local = [slot - self._first for slot in slots]
        self.process.send(Run(slots=local, horizon=actions.shape[1], actions=actions.tobytes()))

    def _expect(self, slots: Sequence[int]) -> None:
        if not self._unanswered:
            self._moved_at = time.monotonic()
        self._unanswered.append(slots)

    def receive(self) -> list[Ready | Lost]:
        """Take one answer. Raises Dead, and UserError where the simulators cannot be built as asked."""
        try:
            reply = self.process.receive()
        except EOFError:
            how = self.process.end(patience_s=_LAST_MOMENTS_S)
            raise Dead(f"the process of the simulators ended ({how})") from None
        self._moved_at = time.monotonic()
        if self._building:
            self._built(reply)
            return []
        if isinstance(reply, Failed):
            raise Dead(reply.reason)
        slots = self._unanswered.popleft()
        if isinstance(reply, Refused):
            self._running.difference_update(slots)
            return [Lost(slot=slot, reason=reply.reason, final=True) for slot in slots]
        assert isinstance(reply, Outcomes)
        return [self._event(slot, outcome) for slot, outcome in zip(slots, reply.slots, strict=True)]

    def _built(self, reply: Reply) -> None:
        if isinstance(reply, Refused):
            raise UserError(reply.reason)
        if isinstance(reply, Failed):
            raise Dead(reply.reason)
        assert isinstance(reply, Made)
        if self.spec not in (None, reply.spec):
            raise UserError(f"simulator {self._make.simulator!r} was {self.spec}; when built again it is {reply.spec}")
        self.spec, self._building = reply.spec, False

    def _event(self, slot: int, outcome: Began | Chunked | Broke) -> Ready | Lost:
        if isinstance(outcome, Broke):
            self._blame(outcome.reason)
            self._running.discard(slot)
            return Lost(slot=slot, reason=outcome.reason)
        if isinstance(outcome, Began):
            return Ready(slot=slot, result=None)
        self.faults = 0
        result = outcome.result()
        if result.done:
            self._running.discard(slot)
        return Ready(slot=slot, result=result)

    def _blame(self, reason: str) -> None:
        self.faults, self.fault = self.faults + 1, reason

    def patience_s(self) -> float:
        """Return after how long to look again whether the process still moves; at or below 0 it hangs."""
        if not self._building and not self._unanswered:
            return math.inf
        count, phase = (int(number) for number in self._pulse)
        if count != self._count:
            self._count, self._moved_at = count, time.monotonic()
        left = self._limit(phase)[0] - (time.monotonic() - self._moved_at)
        return min(left, self._limits.reset_s, self._limits.step_s)  # by then it may be in a call of another limit

    def hung(self) -> str:
        """Return what a process without patience left has not finished."""
        limit, name = self._limit(int(self._pulse[1]))
        return f"the simulator took longer for a {name} than {name}_timeout_s = {limit:g}"

    def _limit(self, phase: int) -> tuple[float, str]:
        if self._building:
            return self._limits.start_s, "start"
        if phase == Phase.RESET:
            return self._limits.reset_s, "reset"
        return self._limits.step_s, "step"

    def bury(self, reason: str) -> list[Ready | Lost]:
        """Kill the process. What it ran is lost; `spawn` starts another."""
        self.process.kill()
        self.last_words = self.process.last_words
        self._blame(reason)
        self._pulse[:] = 0
        return [Lost(slot=slot, reason=reason) for slot in sorted(self._running)]
