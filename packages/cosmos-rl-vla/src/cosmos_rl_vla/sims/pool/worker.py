"""The process of a group of slots: reads commands, runs its simulators, writes observations into shared memory.

pool --Make--> build --Made--> pool --Attach, then Start and Run in any order--> here --Outcomes, one for each--> pool

It ends when the pool closes its end, or dies.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import end_with, inherited_socket
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.frames import ConnectionClosed
from cosmos_rl_vla.sims.base import BatchSimulator, SimulatorError, Stepped
from cosmos_rl_vla.sims.pool.chunk import ChunkResult, run_chunks
from cosmos_rl_vla.sims.pool.memory import ObservationMemory, Phase
from cosmos_rl_vla.sims.pool.messages import (
    Attach,
    Began,
    Broke,
    Chunked,
    Command,
    Failed,
    Made,
    Make,
    Outcomes,
    Refused,
    Run,
    Start,
)
from cosmos_rl_vla.sims.pool.separate import build


def main() -> None:
    """Serve one group of slots. The arguments are two inherited descriptors: the memory and the connection."""
    inherited, memory = inherited_socket(), int(sys.argv[1])
    end_with(inherited)
    with closing(BlockingConnection(inherited, decode=Command)) as pool:
        try:
            with suppress(ConnectionClosed):  # the pool was closed, or is gone
                _work(pool, memory)
            sys.exit(0)
        except UserError as error:
            reply = Refused(str(error))
        except Exception as error:  # a simulator may raise anything; the pool gets its text
            traceback.print_exc()
            reply = Failed(f"{type(error).__name__}: {error}")
        with suppress(ConnectionClosed):
            pool.send(reply)
    sys.exit(1)


def _work(pool: BlockingConnection, memory: int) -> None:
    """Build the simulators, then execute commands until the pool closes its end, which raises ConnectionClosed."""
    make = pool.receive()
    assert isinstance(make, Make)
    simulator = build(make.simulator, options=make.options, slots=make.slots)
    pool.send(Made(spec=simulator.spec))
    attach = pool.receive()
    assert isinstance(attach, Attach)
    group = SlotGroup(simulator, attach, slots=make.slots, descriptor=memory)
    try:
        while True:
            command = pool.receive()
            try:
                reply = group.execute(command)
            except UserError as error:
                reply = Refused(str(error))
            pool.send(reply)
    except ConnectionClosed:
        simulator.close()
        raise


class SlotGroup:
    """The simulators of this process and their part of the memory."""

    def __init__(self, simulator: BatchSimulator, attach: Attach, *, slots: int, descriptor: int) -> None:
        self._simulator = simulator
        self._memory = ObservationMemory(descriptor, attach.spec, groups=attach.groups, slots=attach.groups * slots)
        self._first = attach.group * slots
        self._pulse = self._memory.pulses[attach.group]
        self._action_dim = attach.spec.action_dim

    def execute(self, command: Command) -> Outcomes:
        """Start an episode, or run a chunk, and observe."""
        try:
            if isinstance(command, Start):
                return Outcomes([self._start(command)])
            assert isinstance(command, Run)
            return Outcomes(self._run(command))
        finally:
            self._pulse[1] = Phase.IDLE

    def _start(self, command: Start) -> Began | Broke:
        self._beat(Phase.RESET)
        try:
            self._simulator.reset(command.slot, task=command.task, init=command.init)
            self._observe(command.slot)
        except SimulatorError as error:
            return Broke(str(error))
        return Began()

    def _run(self, command: Run) -> list[Began | Chunked | Broke]:
        shape = (len(command.slots), command.horizon, self._action_dim)
        actions = np.frombuffer(command.actions, np.float32).reshape(shape)
        results = run_chunks(self._step, command.slots, actions)
        return [self._seen(slot, result) for slot, result in zip(command.slots, results, strict=True)]

    def _step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> Sequence[Stepped | SimulatorError]:
        self._beat(Phase.STEP)
        return self._simulator.step(slots, actions)

    def _seen(self, slot: int, result: ChunkResult | SimulatorError) -> Chunked | Broke:
        if isinstance(result, SimulatorError):
            return Broke(str(result))
        try:
            self._beat(Phase.STEP)
            self._observe(slot)
        except SimulatorError as error:
            return Broke(str(error))
        return Chunked.of(result)

    def _observe(self, slot: int) -> None:
        self._memory.write(self._first + slot, self._simulator.observe(slot))

    def _beat(self, phase: Phase) -> None:
        self._pulse[1] = phase
        self._pulse[0] += 1


if __name__ == "__main__":
    main()
