"""The protocols of simulators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

GROUP = "cosmos_rl.simulators"
"""The entry point group of simulators; a name in it, or "module:attribute", is a factory `make(**options)`."""

HELD_OUT = 2**31
"""The first `init` of evaluations; those of training are below."""


class SimulatorError(Exception):
    """An episode that went wrong (the physics diverged); the simulator itself can be reset and used again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimObservation:
    """The policy's input at a decision."""

    images: Mapping[str, NDArray[np.uint8]]
    """[H, W, 3] by camera, the cameras of SimSpec."""
    state: NDArray[np.float32]
    """[state_dim], proprioception."""


@dataclass(frozen=True, kw_only=True)
class SimSpec:
    """Sizes and units of a simulator; the same for all its tasks."""

    cameras: dict[str, tuple[int, int]]
    """Height and width of each camera's image; empty without pixels."""
    state_dim: int
    action_dim: int
    action_low: tuple[float, ...]
    """[action_dim], in the units of `step`; actions below are clipped."""
    action_high: tuple[float, ...]
    """[action_dim]"""
    max_steps: int
    """Steps after which an episode is truncated."""
    control_hz: float
    """Steps per second of the robot; for videos."""

    def __post_init__(self) -> None:
        if not len(self.action_low) == len(self.action_high) == self.action_dim:
            raise ValueError(
                f"{self.action_dim} action dimensions, but {len(self.action_low)} lower and "
                f"{len(self.action_high)} upper limits"
            )
        if not self.cameras and not self.state_dim:
            raise ValueError("a simulator needs at least one camera or one number of state")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """Result of one environment step."""

    reward: float
    """The simulator's reward; the shaped one if there is one."""
    terminated: bool
    """The episode ended: this state is terminal."""
    truncated: bool
    """The episode was cut off at the step limit: the state may have a value."""
    success: bool
    """The task is done."""


class Simulator(Protocol):
    """One environment in one process.

        simulator.reset("faucet-open", 1234)          # (task, init) decides everything that follows
        first = simulator.observe()
        stepped = simulator.step(action)              # ... until terminated or truncated

    `SimulatorPool` runs it in a process of its own.
    """

    @property
    def spec(self) -> SimSpec: ...

    def instruction(self, task: str) -> str:
        """Return the instruction of a task. Raises UserError for an unknown task."""
        ...

    def reset(self, task: str, init: int) -> None:
        """Begin an episode. The same task and `init`, any integer, give the same episode bit for bit.

        Raises UserError for an unknown task.
        """
        ...

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Execute one action [action_dim]. Renders nothing. Raises SimulatorError if the episode broke."""
        ...

    def observe(self) -> SimObservation:
        """Return the current observation. The only method that renders."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class Worded(ABC):
    """A simulator class, of either kind, that has the instructions of its tasks without an instance.

    For simulators whose packages are installed in another interpreter than the controller's.
    """

    @classmethod
    @abstractmethod
    def instruction(cls, task: str) -> str:
        """Return the instruction of a task; see Simulator."""


class BatchSimulator(ABC):
    """Several slots in one process, for simulators that step them all at once (on a GPU).

    A subclass is its own factory: it is called with `slots` and the options.
    """

    spec: SimSpec

    @abstractmethod
    def reset(self, slot: int, *, task: str, init: int) -> None:
        """Begin an episode in a slot; other slots are not touched. See Simulator.reset."""

    @abstractmethod
    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> Sequence[Stepped | SimulatorError]:
        """Execute actions [len(slots), action_dim] in these slots; the others do not advance.

        A slot whose episode broke returns its error, and can begin another episode.
        """

    @abstractmethod
    def observe(self, slot: int) -> SimObservation:
        """Return the observation of a slot. Images of one moment are rendered once for all slots."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""
