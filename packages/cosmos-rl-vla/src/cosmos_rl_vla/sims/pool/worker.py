"""The process of a group of slots: reads commands, runs its simulators, writes observations into shared memory.

pool --Make--> build --Made--> pool --Attach, then Start and Run in any order--> here --Outcomes, one for each--> pool

It ends when the pool closes its end, or dies."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core import plugins
from cosmos_rl_core.connected_process import ChildFailed
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.processes import end_with, inherited_socket
from cosmos_rl_core.wire.blocking import BlockingConnection
from cosmos_rl_core.wire.frames import ConnectionClosed
from cosmos_rl_vla.sims.base import GROUP, BatchSimulator, SimObservation, Simulator, SimulatorError, Stepped
from cosmos_rl_vla.sims.pool.messages import (
    AttachMemory,
    Broke,
    ChunkResult,
    Command,
    ExecuteChunk,
    Made,
    Make,
    ObservationMemory,
    Outcomes,
    SimulatorPhase,
    StartEpisode,
)


def run_chunks(
    step: Callable[[Sequence[int], NDArray[np.float32]], Sequence[Stepped | SimulatorError]],
    slots: Sequence[int],
    actions: NDArray[np.float32],
) -> list[ChunkResult | SimulatorError]:
    """Execute actions [n, H, D] in n slots side by side; a slot whose episode is over is not stepped further.

    The result of a slot that broke, or returned a reward that is not finite, is the error.
    """
    results: list[ChunkResult | SimulatorError] = [ChunkResult(rewards=[0.0] * actions.shape[1]) for _ in slots]
    for substep in range(actions.shape[1]):
        running = {row: one for row, one in enumerate(results) if isinstance(one, ChunkResult) and not one.done}
        if not running:
            break
        steps = step([slots[row] for row in running], actions[list(running), substep])
        for (row, result), stepped in zip(running.items(), steps, strict=True):
            try:
                if isinstance(stepped, SimulatorError):
                    raise stepped
                result.add(stepped)
            except SimulatorError as error:
                results[row] = error
    return results


class Separate(BatchSimulator):
    """Independent simulators, stepped in turn."""

    def __init__(self, simulators: Sequence[Simulator]) -> None:
        self._simulators = simulators
        self.spec = simulators[0].spec

    def reset(self, slot: int, *, task: str, init: int) -> None:
        """See BatchSimulator."""
        self._simulators[slot].reset(task, init)

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> list[Stepped | SimulatorError]:
        """See BatchSimulator."""
        return [self._step(slot, action) for slot, action in zip(slots, actions, strict=True)]

    def _step(self, slot: int, action: NDArray[np.float32]) -> Stepped | SimulatorError:
        try:
            return self._simulators[slot].step(action)
        except SimulatorError as error:
            return error

    def observe(self, slot: int) -> SimObservation:
        """See BatchSimulator."""
        return self._simulators[slot].observe()

    def close(self) -> None:
        """See BatchSimulator."""
        for simulator in self._simulators:
            simulator.close()


def build(simulator: str, *, options: Mapping[str, Any], slots: int) -> BatchSimulator:
    """Build the simulators of a process from the name of a plug-in.

    Raises UserError for an unknown name, options that the factory does not accept, and errors of the factory itself.
    """
    factory = plugins.load(GROUP, simulator)
    try:
        if isinstance(factory, type) and issubclass(factory, BatchSimulator):
            return factory(slots=slots, **options)  # pyright: ignore[reportCallIssue]  # parameters of the subclass
        return Separate([factory(**options) for _ in range(slots)])
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise UserError(f"simulator {simulator!r}: {error}") from error


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
            failed = ChildFailed(str(error), user=True)
        except Exception as error:  # a simulator may raise anything; the pool gets its text
            traceback.print_exc()
            failed = ChildFailed(f"{type(error).__name__}: {error}", user=False)
        with suppress(ConnectionClosed):
            pool.send(failed)
    sys.exit(1)


def _work(pool: BlockingConnection, memory: int) -> None:
    """Build the simulators, then execute commands until the pool closes its end, which raises ConnectionClosed."""
    make = pool.receive()
    assert isinstance(make, Make)
    simulator = build(make.simulator, options=make.options, slots=make.slots)
    pool.send(Made(spec=simulator.spec))
    attach = pool.receive()
    assert isinstance(attach, AttachMemory)
    group = SlotGroup(simulator, attach, slots=make.slots, descriptor=memory)
    try:
        while True:
            pool.send(Outcomes(group.execute(pool.receive())))
    except ConnectionClosed:
        simulator.close()
        raise


class SlotGroup:
    """The simulators of this process and their part of the memory."""

    def __init__(self, simulator: BatchSimulator, attach: AttachMemory, *, slots: int, descriptor: int) -> None:
        self._simulator = simulator
        self._memory = ObservationMemory(descriptor, attach.spec, groups=attach.groups, slots=attach.groups * slots)
        self._first = attach.group * slots
        self._pulse = self._memory.pulses[attach.group]
        self._action_dim = attach.spec.action_dim

    def execute(self, command: Command) -> list[ChunkResult | Broke | None]:
        """Start an episode, or run a chunk, and observe. Returns the results of the command's slots."""
        try:
            if isinstance(command, StartEpisode):
                return [self._start(command)]
            assert isinstance(command, ExecuteChunk)
            return self._run(command)
        finally:
            self._pulse[1] = SimulatorPhase.IDLE

    def _start(self, command: StartEpisode) -> Broke | None:
        self._beat(SimulatorPhase.RESET)
        try:
            self._simulator.reset(command.slot, task=command.task, init=command.init)
            self._observe(command.slot)
        except (SimulatorError, UserError) as error:
            return Broke(str(error), final=isinstance(error, UserError))
        return None

    def _run(self, command: ExecuteChunk) -> list[ChunkResult | Broke | None]:
        shape = (len(command.slots), command.horizon, self._action_dim)
        actions = np.frombuffer(command.actions, np.float32).reshape(shape)
        try:
            results = run_chunks(self._step, command.slots, actions)
            return [self._seen(slot, result) for slot, result in zip(command.slots, results, strict=True)]
        except UserError as error:
            return [Broke(str(error), final=True) for _ in command.slots]

    def _step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> Sequence[Stepped | SimulatorError]:
        self._beat(SimulatorPhase.STEP)
        return self._simulator.step(slots, actions)

    def _seen(self, slot: int, result: ChunkResult | SimulatorError) -> ChunkResult | Broke:
        if isinstance(result, SimulatorError):
            return Broke(str(result))
        try:
            self._beat(SimulatorPhase.STEP)
            self._observe(slot)
        except SimulatorError as error:
            return Broke(str(error))
        return result

    def _observe(self, slot: int) -> None:
        self._memory.write(self._first + slot, self._simulator.observe(slot))

    def _beat(self, phase: SimulatorPhase) -> None:
        self._pulse[1] = phase
        self._pulse[0] += 1


if __name__ == "__main__":
    main()
