"""Shared memory of a pool and its simulators: observations of all slots, and a progress counter of each process.

A memfd: it has no name to leak, and the kernel frees it when the last process that maps it ends.
A slot is written by its process between a command and the reply to it, and read by the pool at all other times.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_vla.sims.base import Observation, SimSpec, SimulatorError

_LINE = 64
"""Alignment of each array, in bytes."""


class Phase(enum.IntEnum):
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

    def write(self, slot: int, observation: Observation) -> None:
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
