"""One group of slots in a pool: its process, its pending commands, and the detection of a hang."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import cosmos_rl_core
from cosmos_rl_core.connected_process import ChildFailed, ConnectedProcess, ProcessDied, TimeLimit
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.processes import GRACE_S
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.frames import ConnectionClosed
from cosmos_rl_vla.config import SimulatorLimits
from cosmos_rl_vla.sims.base import SimSpec
from cosmos_rl_vla.sims.pool.messages import (
    AttachMemory,
    Broke,
    ChunkResult,
    Command,
    ExecuteChunk,
    Made,
    Make,
    ObservationMemory,
    Reply,
    SimulatorPhase,
    StartEpisode,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotReady:
    """A slot has replied: its observation is in the pool's arrays until the slot's next command."""

    slot: int
    result: ChunkResult | None
    """Result of the chunk; None for an episode that has just begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """The episode of a slot is lost; the slot can begin another at once."""

    slot: int
    reason: str
    final: bool = False
    """True: repeating the episode would fail again (an unknown task). False: it may be repeated."""


def _environment(*, own: bool) -> Mapping[str, str]:
    """Return a simulator process's environment; with its `own` Python, only these packages of ours are importable."""
    packages = [str(Path(cosmos_rl_core.__path__[0]).parent), str(Path(__file__).parents[3])]
    path = list(dict.fromkeys(packages)) if own else [str(Path(folder).resolve()) for folder in sys.path]
    threads = {"OMP_NUM_THREADS": "1"}  # the processes already use all cores
    return {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


class SimulatorProcess:
    """A process that is replaced when it fails.

    group.start(slot, task, init); group.run(slots, actions)
    events = group.receive()               # when group.connection is readable; ProcessDied where the process failed
    events = group.discard(death)          # what it ran is lost; then group.spawn()
    """

    def __init__(self, first: int, *, make: Make, limits: SimulatorLimits, memory: int, python: str | None) -> None:
        self._first = first
        self._make = make
        self._limits = limits
        self._memory, self._python = memory, python
        self._attach: AttachMemory | None = None
        self._pulse: NDArray[np.int64] = np.zeros(2, np.int64)
        self.spec: SimSpec | None = None
        """None until the first process has built its simulators."""
        self.faults = 0
        """Episodes or processes lost since a chunk last succeeded."""
        self.fault = ""
        """Text of the last fault."""
        self.last_output = ""
        """The last lines printed by the process replaced last."""
        self.process: ConnectedProcess
        self.connection: BlockingConnection
        self.spawn()

    def spawn(self) -> None:
        """Start a process, the first or a replacement."""
        python, own = ((self._python,), True) if self._python else (PYTHON, False)
        self.process = ConnectedProcess(
            [*python, "-m", "cosmos_rl_vla.sims.pool.worker", str(self._memory)],
            name="the process of the simulators",
            environment=_environment(own=own),
            log=tempfile.TemporaryFile(),  # noqa: SIM115  # a pipe would block when nobody reads
            keeps=(self._memory,),
        )
        self.connection = self.process.open_blocking(decode=Reply)
        self._unanswered: deque[Sequence[int]] = deque()
        self._running: set[int] = set()
        self._building = True
        self._moved_at = time.monotonic()
        self._count = -1
        self._send(self._make)
        if self._attach is not None:
            self._send(self._attach)

    def attach(self, memory: ObservationMemory, *, spec: SimSpec, groups: int) -> None:
        """Send this and all later processes the memory to write observations to."""
        number = self._first // self._make.slots
        self._pulse = memory.pulses[number]
        self._attach = AttachMemory(spec=spec, group=number, groups=groups)
        self._send(self._attach)

    def _send(self, command: Command) -> None:
        """Send a command. Does nothing for a dead process: `receive` then raises ProcessDied."""
        with suppress(ConnectionClosed):
            self.connection.send(command)

    @property
    def awaited(self) -> bool:
        """Whether a reply is due."""
        return bool(self._unanswered)

    def start(self, slot: int, *, task: str, init: int) -> None:
        """Begin an episode in a slot."""
        self._expect([slot])
        self._running.add(slot)
        self._send(StartEpisode(slot=slot - self._first, task=task, init=init))

    def run(self, slots: Sequence[int], actions: NDArray[np.float32]) -> None:
        """Execute a chunk [n, H, D] in slots of this group."""
        self._expect(slots)
        local = [slot - self._first for slot in slots]
        self._send(ExecuteChunk(slots=local, horizon=actions.shape[1], actions=actions.tobytes()))

    def _expect(self, slots: Sequence[int]) -> None:
        busy = {slot for earlier in self._unanswered for slot in earlier}
        assert busy.isdisjoint(slots), f"slots {sorted(busy.intersection(slots))} are running"
        if not busy:
            self._moved_at = time.monotonic()
        self._unanswered.append(slots)

    def receive(self) -> list[SlotReady | Lost]:
        """Receive one reply. Raises ProcessDied, and UserError if the simulators cannot be built with these options."""
        try:
            reply: Reply = self.connection.receive()
        except ConnectionClosed:
            raise self.process.died(self.process.close_blocking(grace_s=GRACE_S)) from None
        self._moved_at = time.monotonic()
        if isinstance(reply, ChildFailed):
            raise reply.error
        if isinstance(reply, Made):
            self._built(reply.spec)
            return []
        return [
            self._event(slot, outcome) for slot, outcome in zip(self._unanswered.popleft(), reply.slots, strict=True)
        ]

    def _built(self, spec: SimSpec) -> None:
        if self.spec not in (None, spec):
            raise UserError(f"simulator {self._make.simulator!r} was {self.spec}; built again it is {spec}")
        self.spec, self._building = spec, False

    def _event(self, slot: int, outcome: ChunkResult | Broke | None) -> SlotReady | Lost:
        if isinstance(outcome, Broke):
            if not outcome.final:
                self._blame(outcome.reason)
            self._running.discard(slot)
            return Lost(slot=slot, reason=outcome.reason, final=outcome.final)
        if outcome is not None:
            self.faults = 0
            if outcome.done:
                self._running.discard(slot)
        return SlotReady(slot=slot, result=outcome)

    def _blame(self, reason: str) -> None:
        self.faults, self.fault = self.faults + 1, reason

    def time_left_s(self) -> float:
        """Return the seconds until the next check for progress; at or below 0 the process hangs."""
        if not self._building and not self._unanswered:
            return math.inf
        # The process counts its calls into simulators in shared memory. A limit begins anew with each call, so a chunk
        # of many steps may take long, and a single step may not.
        count, phase = (int(number) for number in self._pulse)
        if count != self._count:
            self._count, self._moved_at = count, time.monotonic()
        left = self._limit(phase).seconds - (time.monotonic() - self._moved_at)
        # After the shortest limit this is asked again, as the process may be in a call of another kind by then.
        return min(left, self._limits.reset_timeout_s, self._limits.step_timeout_s)

    def hung(self) -> ProcessDied:
        """Return the error of a hung process, with the limit that it exceeded."""
        return self.process.late(self._limit(int(self._pulse[1])))

    def _limit(self, phase: int) -> TimeLimit:
        limits = self._limits
        if self._building:
            return TimeLimit("start_timeout_s", limits.start_timeout_s)
        if phase == SimulatorPhase.RESET:
            return TimeLimit("reset_timeout_s", limits.reset_timeout_s)
        return TimeLimit("step_timeout_s", limits.step_timeout_s)

    def discard(self, death: ProcessDied) -> list[SlotReady | Lost]:
        """Kill the process and return its lost episodes; `spawn` starts another."""
        self.process.close_blocking()
        self.last_output, reason = self.process.last_output, str(death)
        self._blame(reason)
        self._pulse[:] = 0
        return [Lost(slot=slot, reason=reason) for slot in sorted(self._running)]
