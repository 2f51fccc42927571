"""The simulators of one process: one per slot, or one with many slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import GROUP, BatchSimulator, Observation, Simulator, SimulatorError, Stepped


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

    def observe(self, slot: int) -> Observation:
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
