"""A simulator whose state is extended by its scripted expert's action and privileged numbers.

    state [s | D | p] = proprioception | the expert's action | privileged numbers

So experts run in the processes of a `SimulatorPool`, as policies do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import GROUP, SimObservation, SimSpec, Simulator, Stepped

EXPERT = "cosmos_rl_vla.data.recording.expert:ScriptedExpert"


@runtime_checkable
class Demonstrator(Simulator, Protocol):
    """A simulator with an expert."""

    def expert_action(self) -> NDArray[np.float32]:
        """Return the expert's action [D] in the current state."""
        ...

    def privileged(self) -> NDArray[np.float32]:
        """Return numbers [p] that the policy does not get, such as objects' positions; p is the same for all tasks."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of such a state, or of a batch of them."""

    states: NDArray[np.float32]
    """[..., s]"""
    actions: NDArray[np.float32]
    """[..., D]: the expert's."""
    privileged: NDArray[np.float32]
    """[..., p]"""


class ScriptedExpert:
    """A simulator with an expert, by its name; see Simulator."""

    def __init__(self, *, simulator: str, options: Mapping[str, Any]) -> None:
        """Raises UserError for an unknown simulator, invalid options, or a simulator without an expert."""
        try:
            sim: Any = plugins.load(GROUP, simulator)(**options)
        except TypeError as error:
            raise UserError(f"simulator {simulator!r}: {error}") from error
        if not isinstance(sim, Demonstrator):
            sim.close()
            raise UserError(f"simulator {simulator!r} has no expert: it needs expert_action() and privileged()")
        self._simulator = sim
        self.inner: SimSpec = self._simulator.spec
        """The simulator's own spec."""
        self.spec = replace(self.inner, state_dim=self.inner.state_dim + self.inner.action_dim + len(sim.privileged()))

    def split(self, states: NDArray[np.float32]) -> Shown:
        """Split states [..., s + D + p]."""
        ends = [self.inner.state_dim, self.inner.state_dim + self.inner.action_dim]
        return Shown(*np.split(states, ends, axis=-1))

    def instruction(self, task: str) -> str:
        """Return the instruction of a task; see Simulator."""
        return self._simulator.instruction(task)

    def reset(self, task: str, init: int) -> None:
        """Begin an episode; see Simulator."""
        self._simulator.reset(task, init)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Execute an action; see Simulator."""
        return self._simulator.step(action)

    def observe(self) -> SimObservation:
        """Return the observation, with the expert's part appended to the state; see Simulator."""
        seen = self._simulator.observe()
        parts = (seen.state, self._simulator.expert_action(), self._simulator.privileged())
        return SimObservation(images=seen.images, state=np.concatenate(parts).astype(np.float32))

    def close(self) -> None:
        """Close the simulator."""
        self._simulator.close()
