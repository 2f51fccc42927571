"""A light task for quickstarts and tests: reach the square of the colour that the instruction names.

The image shows the squares and the instruction names the target: a policy needs both. One scene,
decided by `init`, serves all tasks. A step costs microseconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, Stepped

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 200, 40),
}
CAMERA = "board"

_FIELD = (30, 30, 34)
_CURSOR = (255, 255, 255)
_HALF_SIDE = 0.2
"""Half the side of a square; the board is [-1, 1] x [-1, 1]."""
_REACHED = 0.2
_STRIDE = 0.12
"""Distance that an action of 1 moves the cursor along its axis."""


class Reach:
    """Move a cursor over a board with actions [2] in [-1, 1]; see Simulator.

    The state is the cursor's position. The reward of a step is the decrease in distance to the target; success ends
    the episode. `expert_action` goes straight to the target.
    """

    def __init__(self, *, colours: int = 3, image_size: int = 32, max_steps: int = 40) -> None:
        if not 2 <= colours <= len(COLOURS):
            raise UserError(f"simulator reach has 2 to {len(COLOURS)} colours, not {colours}")
        self._colours = list(COLOURS)[:colours]
        self._max_steps = max_steps
        self._pixels = (np.arange(image_size) + 0.5) * 2 / image_size - 1  # centres of pixels on the board
        self._squares = np.zeros((colours, 2))
        self._cursor = np.zeros(2)
        self._target = 0
        self._steps = 0
        self.spec = SimSpec(
            cameras={CAMERA: (image_size, image_size)},
            state_dim=2,
            action_dim=2,
            action_low=(-1.0, -1.0),
            action_high=(1.0, 1.0),
            max_steps=max_steps,
            control_hz=10.0,
        )

    def tasks(self) -> list[str]:
        """Return the names of the tasks, one per colour."""
        return list(self._colours)

    def instruction(self, task: str) -> str:
        """Return the instruction of a task. Raises UserError for a colour that is not on the board."""
        return f"reach the {self._colours[self._number(task)]} square"

    def reset(self, task: str, init: int) -> None:
        """Lay out the board with `init`, any integer, as the seed, and make `task` the target."""
        self._target = self._number(task)
        self._steps = 0
        rng = np.random.default_rng(init % 2**64)
        while True:
            places = rng.uniform(-1 + _HALF_SIDE, 1 - _HALF_SIDE, (len(self._colours) + 1, 2))
            apart = np.abs(places[:, None] - places).max(2)[np.triu_indices(len(places), 1)]
            if apart.min() > 2.4 * _HALF_SIDE:  # squares and cursor do not overlap
                break
        self._squares, self._cursor = places[:-1], places[-1]

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move the cursor; see Simulator."""
        before = self._distance()
        self._cursor = np.clip(self._cursor + _STRIDE * np.clip(action, -1, 1), -1, 1)
        self._steps += 1
        success = self._distance() < _REACHED
        return Stepped(
            reward=before - self._distance(),
            terminated=success,
            truncated=not success and self._steps >= self._max_steps,
            success=success,
        )

    def observe(self) -> SimObservation:
        """Render the board; see Simulator."""
        image = np.empty((len(self._pixels), len(self._pixels), 3), np.uint8)
        image[:] = _FIELD
        for colour, place in zip(self._colours, self._squares):
            image[self._patch(place, _HALF_SIDE)] = COLOURS[colour]
        image[self._patch(self._cursor, _HALF_SIDE / 2)] = _CURSOR
        return SimObservation(images={CAMERA: image}, state=self._cursor.astype(np.float32))

    def expert_action(self) -> NDArray[np.float32]:
        """Return the action [2] that goes straight to the target."""
        way = (self._squares[self._target] - self._cursor) / _STRIDE
        return (way / max(1.0, np.abs(way).max())).astype(np.float32)

    def privileged(self) -> NDArray[np.float32]:
        """Return the positions [2 per colour] of the squares, which the policy gets from the image alone."""
        return self._squares.reshape(-1).astype(np.float32)

    def close(self) -> None:
        """Do nothing: there are no resources."""

    def _number(self, task: str) -> int:
        if task not in self._colours:
            raise UserError(f"simulator reach has no task {task!r}; tasks: {', '.join(self._colours)}")
        return self._colours.index(task)

    def _distance(self) -> float:
        return float(np.linalg.norm(self._squares[self._target] - self._cursor))

    def _patch(self, place: NDArray[np.float64], half: float) -> tuple[slice, slice]:
        """Return rows and columns of the pixels whose centres are within `half` of a position (x, y)."""
        x, y = (slice(*np.searchsorted(self._pixels, (middle - half, middle + half))) for middle in place)
        return y, x
