"""Between a pool and the process of a group: messages in msgspec frames, observations in shared memory.

The memory is a memfd: it has no name to leak, and the kernel frees it when the last process that maps it ends.
A slot is written by its process between a command and the reply to it, and read by the pool at all other times."""

from __future__ import annotations

import enum
import math
import mmap
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.connected_process import ChildFailed
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, SimulatorError, Stepped


class Make(msgspec.Struct, frozen=True, tag=True):
    """Build the simulators of this process. The reply is Made."""

    simulator: str
    options: dict[str, Any]
    slots: int


class AttachMemory(msgspec.Struct, frozen=True, tag=True):
    """Map the memory. No reply."""

    spec: SimSpec
    group: int
    groups: int


class StartEpisode(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode. The reply is Outcomes of one slot."""

    slot: int
    """Index within the group, as in all messages."""
    task: str
    init: int


class ExecuteChunk(msgspec.Struct, frozen=True, tag=True):
    """Execute a chunk in some slots. The reply is Outcomes of them, in this order."""

    slots: list[int]
    horizon: int
    actions: bytes
    """float32 [len(slots), horizon, action_dim]"""


class Made(msgspec.Struct, frozen=True, tag=True):
    """The simulators are built."""

    spec: SimSpec


class ChunkResult(msgspec.Struct, kw_only=True, tag=True):
    """Results of the H actions of one decision. Substeps after the first that ended the episode were not executed."""

    rewards: list[float]
    """[H], 0 for substeps not executed."""
    steps: int = 0
    """Number of executed substeps, the first ones."""
    terminated: bool = False
    """The last executed substep ended the episode."""
    truncated: bool = False
    """The last executed substep was at the step limit; the observation after it is the final one."""
    success: bool = False
    """The task was done at an executed substep."""

    def add(self, stepped: Stepped) -> None:
        """Count one more executed substep. Raises SimulatorError for a reward that is not finite."""
        if not math.isfinite(stepped.reward):
            raise SimulatorError(f"the reward is {stepped.reward}")
        self.rewards[self.steps] = float(stepped.reward)  # simulators give numbers of numpy too
        self.steps += 1
        self.terminated, self.truncated = stepped.terminated, stepped.truncated and not stepped.terminated
        self.success |= stepped.success

    @property
    def valid(self) -> NDArray[np.bool_]:
        """[H], the executed substeps."""
        return np.arange(len(self.rewards)) < self.steps

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Broke(msgspec.Struct, frozen=True, tag=True):
    """An episode is lost; the slot can begin another."""

    reason: str
    final: bool = False
    """Whether a repetition would fail again: a UserError, such as an unknown task."""


class Outcomes(msgspec.Struct, frozen=True, tag=True):
    """Results of the slots of one command, in its order. Observations are in the shared memory."""

    slots: list[ChunkResult | Broke | None]
    """None: the episode has its first observation."""


Command = Make | AttachMemory | StartEpisode | ExecuteChunk
Reply = Made | Outcomes | ChildFailed
"""ChildFailed: the simulators cannot be built, or raised something else than SimulatorError and UserError."""


_LINE = 64
"""Alignment of each array, in bytes."""


class SimulatorPhase(enum.IntEnum):
    """The call that a process is in."""

    IDLE = 0
    RESET = 1
    STEP = 2
    """A step, or an observation."""


class ObservationMemory:
    """The arrays of one block."""

    def __init__(self, descriptor: int, spec: SimSpec, *, groups: int, slots: int) -> None:
        self.pulses: NDArray[np.int64]
        """[groups, 2]: number of calls into simulators, and the current Phase, by process."""
        self.states: NDArray[np.float32]
        """[slots, state_dim]"""
        self.images: Mapping[str, NDArray[np.uint8]]
        """[slots, H, W, 3] by camera."""
        shapes = {name: (slots, height, width, 3) for name, (height, width) in spec.cameras.items()}
        sizes = [groups * 2 * 8, slots * spec.state_dim * 4, *map(math.prod, shapes.values())]
        starts = np.cumsum([0, *(-(-size // _LINE) * _LINE for size in sizes)]).tolist()
        os.ftruncate(descriptor, starts[-1])  # either side may be first; both set the same size
        block = mmap.mmap(descriptor, starts[-1])
        self.num_bytes = starts[-1]
        self.pulses = np.frombuffer(block, np.int64, groups * 2, starts[0]).reshape(groups, 2)
        self.states = np.frombuffer(block, np.float32, slots * spec.state_dim, starts[1]).reshape(slots, -1)
        self.images = {
            name: np.frombuffer(block, np.uint8, math.prod(shape), start).reshape(shape)
            for (name, shape), start in zip(shapes.items(), starts[2:])
        }

    def write(self, slot: int, observation: SimObservation) -> None:
        """Copy an observation into a slot.

        Raises SimulatorError for a state that is not finite, and ValueError for shapes other than those of the spec.
        """
        if observation.state.shape != self.states.shape[1:]:
            raise ValueError(f"a state of shape {observation.state.shape}; the spec has {self.states.shape[1:]}")
        if not np.isfinite(observation.state).all():
            raise SimulatorError(f"the state holds numbers that are not finite: {observation.state}")
        self.states[slot] = observation.state
        for camera, images in self.images.items():
            image = observation.images[camera]
            if image.shape != images.shape[1:] or image.dtype != np.uint8:
                raise ValueError(
                    f"camera {camera!r} gave {image.dtype} {image.shape}; the spec has uint8 {images.shape[1:]}"
                )
            images[slot] = image
