"""Parts that several simulators share: idle scenes, stored initial states, checks of tasks, cameras and physics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from cosmos_rl_core.errors import UserError, closest
from cosmos_rl_vla.sims.base import HELD_OUT, SimulatorError

_DIVERGED = slice(4, 7)
"""mjWARN_BADQPOS, mjWARN_BADQVEL, mjWARN_BADQACC"""

K = TypeVar("K")
S = TypeVar("S")


class Scenes(Generic[K, S]):
    """The idle scenes of a process with their kinds, most recently used last."""

    def __init__(self, build: Callable[[K], S], *, max_idle: int, close: Callable[[S], None] | None = None) -> None:
        """close: called with a scene that is evicted."""
        self._build, self._max_idle, self._close = build, max_idle, close
        self._idle: list[tuple[K, S]] = []

    def take(self, kind: K) -> S:
        """Return an idle scene of that kind, or build one."""
        for at in reversed(range(len(self._idle))):
            if self._idle[at][0] == kind:
                return self._idle.pop(at)[1]
        return self._build(kind)

    def give_back(self, kind: K, scene: S) -> None:
        """Keep a scene for the next episode of its kind; evicts the scene idle for longest."""
        self._idle.append((kind, scene))
        if len(self._idle) > self._max_idle:
            _, oldest = self._idle.pop(0)
            if self._close is not None:
                self._close(oldest)


def stored_state(init: int, *, states: int, held_out: int) -> int:
    """Return the index among `states` stored ones: the last `held_out` are for evaluation, the others for training.

    Inits >= HELD_OUT are of evaluations. Inits wrap around the number of states.
    """
    assert 0 < held_out < states
    if init >= HELD_OUT:
        return states - held_out + (init - HELD_OUT) % held_out
    return init % (states - held_out)


def instruction_of(task: str, instructions: Mapping[str, str], *, simulator: str) -> str:
    """Return the instruction of a task. Raises UserError for an unknown one."""
    if task not in instructions:
        hint = similar(task, instructions, otherwise=f"tasks: {', '.join(instructions)}")
        raise UserError(f"simulator {simulator} has no task {task!r}; {hint}")
    return instructions[task]


def similar(name: str, names: Sequence[str] | Mapping[str, str], *, otherwise: str) -> str:
    """Return the question that names the most similar of `names`; `otherwise` without a similar one."""
    near = closest(name, list(names))
    return f"did you mean {near!r}?" if near else otherwise


def check_cameras(cameras: Sequence[str], known: Sequence[str], *, simulator: str) -> None:
    """Raise UserError for a camera that is not `known`."""
    for camera in cameras:
        if camera not in known:
            raise UserError(f"simulator {simulator} has no camera {camera!r}; cameras: {', '.join(known)}")


def check_physics(data: Any) -> None:
    """Raise SimulatorError if the physics of a `mujoco.MjData` diverged."""
    if data.warning.number[_DIVERGED].any():
        raise SimulatorError("the physics of MuJoCo diverged (positions, velocities or accelerations not finite)")
