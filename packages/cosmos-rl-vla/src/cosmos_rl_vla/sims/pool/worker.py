"""The process of a group of slots: reads commands, drives its simulators, writes what they see into shared memory.

pool --Make--> build --Made--> pool --Attach, then Start and Run in any order--> here --Outcomes, one for each--> pool

It ends when the pool closes its end, or dies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
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
    Reply,
    Run,
    Start,
)
from cosmos_rl_vla.sims.pool.separate import build


def main() -> None:
    """Serve one group of slots. The descriptors are inherited from the pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("commands", "memory", "lifeline"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    threading.Thread(target=_end_with_pool, args=(given.lifeline,), daemon=True).start()
    with Connection(given.commands) as connection:
        link = _Link(connection)
        make = link.receive()
        assert isinstance(make, Make)
        try:
            simulator = build(make.simulator, options=make.options, slots=make.slots)
            link.send(Made(spec=simulator.spec))
            attach = link.receive()
            if attach is None:
                sys.exit(0)
            assert isinstance(attach, Attach)
            serve(link, SlotGroup(simulator, attach, slots=make.slots, descriptor=given.memory))
            simulator.close()
            sys.exit(0)
        except UserError as error:
            link.send(Refused(str(error)))
        except Exception as error:  # a simulator may raise anything; whoever started it is told
            traceback.print_exc()
            link.send(Failed(f"{type(error).__name__}: {error}"))
    sys.exit(1)


def serve(link: _Link, group: SlotGroup) -> None:
    """Answer commands until the pool closes its end."""
    while (command := link.receive()) is not None:
        try:
            link.send(group.execute(command))
        except UserError as error:
            link.send(Refused(str(error)))


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


class _Link:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self) -> Command | None:
        """Return the next command, None once the pool has closed its end."""
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None

    def send(self, reply: Reply) -> None:
        """Send a reply; a pool that is gone needs none."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(msgspec.msgpack.encode(reply))


def _end_with_pool(lifeline: int) -> None:
    """End this process, whatever it is in the middle of, when the pool's process is gone."""
    os.read(lifeline, 1)  # nothing is ever written: it returns when the last writing end is closed
    os._exit(1)


if __name__ == "__main__":
    main()
