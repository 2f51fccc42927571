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
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import PYTHON
from cosmos_rl_core.processes import GRACE_S, ChildProcess, last_lines
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.frames import ConnectionClosed
from cosmos_rl_vla.sims.base import SimSpec
from cosmos_rl_vla.sims.pool.messages import (
    AttachMemory,
    Began,
    Broke,
    ChunkResult,
    Command,
    ExecuteChunk,
    Made,
    Make,
    ObservationMemory,
    Outcomes,
    Reply,
    SimulatorFailed,
    SimulatorPhase,
    SimulatorRefused,
    StartEpisode,
)

_LAST_LINES = 40


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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Time limits of one call in a process, in seconds."""

    start_s: float
    reset_s: float
    step_s: float


class Dead(Exception):
    """The process of a group cannot be used any more. Its text is the reason."""


class GroupProcess:
    """A started process and the connection to it."""

    def __init__(self, *, memory: int, python: str | None) -> None:
        """Start it; `memory` is the descriptor of the pool's memory. Raises UserError if `python` cannot be run."""
        self.last_output = ""
        """The last lines it printed; set once it has ended."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `kill`; a pipe would block when nobody reads
        try:
            self.child, ours = ChildProcess.connected(
                [*((python,) if python else PYTHON), "-m", "cosmos_rl_vla.sims.pool.worker", str(memory)],
                environment=_environment(own=python is not None),
                output=self._log,
                keeps=(memory,),
            )
        except OSError as error:
            self._log.close()
            raise UserError(f"cannot run {python} for a simulator: {error.strerror}") from error
        self.connection = BlockingConnection(ours, decode=Reply)

    def send(self, command: Command) -> None:
        """Send a command. Does nothing for a dead process: `receive` then raises ConnectionClosed."""
        with suppress(ConnectionClosed):
            self.connection.send(command)

    def end(self, *, grace_s: float) -> str:
        """Wait for its end, kill it and its children, and return a description of how it ended."""
        self.connection.close()
        self.child.wait(grace_s)
        self.child.kill()
        status = self.child.wait()
        if not self._log.closed:
            self.last_output = last_lines(self._log, count=_LAST_LINES)
            self._log.close()
        return status


def _environment(*, own: bool) -> Mapping[str, str]:
    """Return a simulator process's environment; with its `own` Python, only these packages of ours are importable."""
    packages = [str(Path(cosmos_rl_core.__path__[0]).parent), str(Path(__file__).parents[3])]
    path = list(dict.fromkeys(packages)) if own else [str(Path(folder).resolve()) for folder in sys.path]
    threads = {"OMP_NUM_THREADS": "1"}  # the processes already use all cores
    return {**threads, **os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


class SimulatorProcess:
    """A process that is replaced when it fails.

    group.start(slot, task, init); group.run(slots, actions)
    events = group.receive()            # when group.connection is readable; Dead where the process failed
    events = group.discard(reason)         # what it ran is lost; then group.spawn()
    """

    def __init__(self, first: int, *, make: Make, limits: Limits, memory: int, python: str | None) -> None:
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
        self.spawn()

    def spawn(self) -> None:
        """Start a process, the first or a replacement."""
        self.process = GroupProcess(memory=self._memory, python=self._python)
        self._unanswered: deque[Sequence[int]] = deque()
        self._running: set[int] = set()
        self._building = True
        self._moved_at = time.monotonic()
        self._count = -1
        self.process.send(self._make)
        if self._attach is not None:
            self.process.send(self._attach)

    def attach(self, memory: ObservationMemory, *, spec: SimSpec, groups: int) -> None:
        """Send this and all later processes the memory to write observations to."""
        number = self._first // self._make.slots
        self._pulse = memory.pulses[number]
        self._attach = AttachMemory(spec=spec, group=number, groups=groups)
        self.process.send(self._attach)

    @property
    def awaited(self) -> bool:
        """Whether a reply is due."""
        return bool(self._unanswered)

    def start(self, slot: int, *, task: str, init: int) -> None:
        """Begin an episode in a slot."""
        self._expect([slot])
        self._running.add(slot)
        self.process.send(StartEpisode(slot=slot - self._first, task=task, init=init))

    def run(self, slots: Sequence[int], actions: NDArray[np.float32]) -> None:
        """Execute a chunk [n, H, D] in slots of this group."""
        self._expect(slots)
        local = [slot - self._first for slot in slots]
        self.process.send(ExecuteChunk(slots=local, horizon=actions.shape[1], actions=actions.tobytes()))

    def _expect(self, slots: Sequence[int]) -> None:
        if not self._unanswered:
            self._moved_at = time.monotonic()
        self._unanswered.append(slots)

    def receive(self) -> list[SlotReady | Lost]:
        """Receive one reply. Raises Dead, and UserError if the simulators cannot be built with these options."""
        try:
            reply: Reply = self.process.connection.receive()
        except ConnectionClosed:
            how = self.process.end(grace_s=GRACE_S)
            raise Dead(f"the process of the simulators ended ({how})") from None
        self._moved_at = time.monotonic()
        if self._building:
            self._built(reply)
            return []
        if isinstance(reply, SimulatorFailed):
            raise Dead(reply.reason)
        slots = self._unanswered.popleft()
        if isinstance(reply, SimulatorRefused):
            self._running.difference_update(slots)
            return [Lost(slot=slot, reason=reply.reason, final=True) for slot in slots]
        assert isinstance(reply, Outcomes)
        return [self._event(slot, outcome) for slot, outcome in zip(slots, reply.slots, strict=True)]

    def _built(self, reply: Reply) -> None:
        if isinstance(reply, SimulatorRefused):
            raise UserError(reply.reason)
        if isinstance(reply, SimulatorFailed):
            raise Dead(reply.reason)
        assert isinstance(reply, Made)
        if self.spec not in (None, reply.spec):
            raise UserError(f"simulator {self._make.simulator!r} was {self.spec}; built again it is {reply.spec}")
        self.spec, self._building = reply.spec, False

    def _event(self, slot: int, outcome: Began | ChunkResult | Broke) -> SlotReady | Lost:
        if isinstance(outcome, Broke):
            self._blame(outcome.reason)
            self._running.discard(slot)
            return Lost(slot=slot, reason=outcome.reason)
        if isinstance(outcome, Began):
            return SlotReady(slot=slot, result=None)
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
        count, phase = (int(number) for number in self._pulse)
        if count != self._count:
            self._count, self._moved_at = count, time.monotonic()
        left = self._limit(phase)[0] - (time.monotonic() - self._moved_at)
        return min(left, self._limits.reset_s, self._limits.step_s)  # by then it may be in a call of another limit

    def hung(self) -> str:
        """Return the error of a hung process, with the limit that it exceeded."""
        limit, name = self._limit(int(self._pulse[1]))
        return f"the simulator took longer for a {name} than {name}_timeout_s = {limit:g}"

    def _limit(self, phase: int) -> tuple[float, str]:
        if self._building:
            return self._limits.start_s, "start"
        if phase == SimulatorPhase.RESET:
            return self._limits.reset_s, "reset"
        return self._limits.step_s, "step"

    def discard(self, reason: str) -> list[SlotReady | Lost]:
        """Kill the process and return its lost episodes; `spawn` starts another."""
        self.process.end(grace_s=0)
        self.last_output = self.process.last_output
        self._blame(reason)
        self._pulse[:] = 0
        return [Lost(slot=slot, reason=reason) for slot in sorted(self._running)]
