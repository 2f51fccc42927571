"""A simulator that shows what its scripted expert would do, and what only the expert knows, behind its own state.

    state [s | D | p] = what the robot knows of itself | the expert's action | privileged numbers

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
from cosmos_rl_vla.sims.base import GROUP, Observation, SimSpec, Simulator, Stepped

EXPERT = "cosmos_rl_vla.data.recording.expert:Expert"


@runtime_checkable
class Demonstrator(Simulator, Protocol):
    """A simulator with an expert."""

    def expert_action(self) -> NDArray[np.float32]:
        """Return the action [D] that the expert would take now."""
        ...

    def privileged(self) -> NDArray[np.float32]:
        """Return numbers [p] that the policy is not told, such as objects' places; the same count for all tasks."""
        ...


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of such a state, or of n of them."""

    states: NDArray[np.float32]
    """[..., s]"""
    actions: NDArray[np.float32]
    """[..., D]: the expert's."""
    privileged: NDArray[np.float32]
    """[..., p]"""


class Expert:
    """A simulator with an expert, by its name; see Simulator."""

    def __init__(self, *, simulator: str, options: Mapping[str, Any]) -> None:
        """Raises UserError for a simulator that is not there, options it does not take, or one without an expert."""
        try:
            made: Any = plugins.load(GROUP, simulator)(**options)
        except TypeError as error:
            raise UserError(f"simulator {simulator!r}: {error}") from error
        if not isinstance(made, Demonstrator):
            made.close()
            raise UserError(f"simulator {simulator!r} has no expert: it wants expert_action() and privileged()")
        self._simulator = made
        self.inner: SimSpec = self._simulator.spec
        """The simulator's own."""
        self.spec = replace(self.inner, state_dim=self.inner.state_dim + self.inner.action_dim + len(made.privileged()))

    def split(self, states: NDArray[np.float32]) -> Shown:
        """Take states [..., s + D + p] apart."""
        ends = [self.inner.state_dim, self.inner.state_dim + self.inner.action_dim]
        return Shown(*np.split(states, ends, axis=-1))

    def instruction(self, task: str) -> str:
        """Return what to do; see Simulator."""
        return self._simulator.instruction(task)

    def reset(self, task: str, init: int) -> None:
        """Begin an episode; see Simulator."""
        self._simulator.reset(task, init)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Execute an action; see Simulator."""
        return self._simulator.step(action)

    def observe(self) -> Observation:
        """Return what is seen, with the expert's part behind the state; see Simulator."""
        seen = self._simulator.observe()
        parts = (seen.state, self._simulator.expert_action(), self._simulator.privileged())
        return Observation(images=seen.images, state=np.concatenate(parts).astype(np.float32))

    def close(self) -> None:
        """Close the simulator."""
        self._simulator.close()
