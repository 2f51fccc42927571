"""MetaWorld: fifty tasks of a Sawyer arm on MuJoCo (`pip install metaworld`), with images and instructions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import Observation, SimSpec, Stepped
from cosmos_rl_vla.sims.metaworld.scene import Kind, Scene, import_metaworld, scenes
from cosmos_rl_vla.sims.metaworld.tasks import instruction

CAMERAS = ("corner2", "corner", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")

_STEP_LIMIT = 500
"""MetaWorld's own: it refuses to step further."""
_PROPRIOCEPTION = 4
_FULL = 39
_OBJECTS = [4, 5, 6, 11, 12, 13]
"""Indices of the two objects' positions in the state."""


class MetaWorld:
    """The tasks of MetaWorld; see Simulator.

    Actions [4]: translation of the hand along x, y and z (1 is one centimetre), and the gripper's effort.
    State: the hand's position [3] and the gripper's opening; with state="full" MetaWorld's 39 numbers, which
    include the positions of objects and goal. The reward is MetaWorld's shaped one, 0 to 10; success ends the episode.
    Camera corner2 has the position of lerobot and RLinf, upright, with a narrower angle: all objects are in view.
    """

    def __init__(
        self,
        *,
        cameras: Sequence[str] = ("corner2",),
        image_size: int = 64,
        fovy: float = 42.0,
        max_steps: int = 100,
        state: Literal["proprioception", "full"] = "proprioception",
    ) -> None:
        """`fovy` is corner2's angle in degrees. Raises UserError for invalid options."""
        for camera in cameras:
            if camera not in CAMERAS:
                raise UserError(f"simulator metaworld has no camera {camera!r}; cameras: {', '.join(CAMERAS)}")
        if not 1 <= max_steps <= _STEP_LIMIT:
            raise UserError(f"simulator metaworld: max_steps is 1 to {_STEP_LIMIT}, not {max_steps}")
        if state not in ("proprioception", "full"):
            raise UserError(f"simulator metaworld: state is proprioception or full, not {state!r}")
        import_metaworld()
        self._cameras, self._size, self._fovy, self._max_steps = tuple(cameras), image_size, fovy, max_steps
        self._numbers = slice(_PROPRIOCEPTION) if state == "proprioception" else slice(None)
        self._scene: Scene | None = None
        self._full: NDArray[np.float64] = np.zeros(_FULL)
        self._steps = 0
        self.spec = SimSpec(
            cameras=dict.fromkeys(cameras, (image_size, image_size)),
            state_dim=len(self._full[self._numbers]),
            action_dim=4,
            action_low=(-1.0,) * 4,
            action_high=(1.0,) * 4,
            max_steps=max_steps,
            control_hz=80.0,
        )

    def instruction(self, task: str) -> str:
        """Return the instruction of a task. Raises UserError for one that MetaWorld does not have."""
        return instruction(task)

    def reset(self, task: str, init: int) -> None:
        """Lay out the task with `init`, any integer, as the seed; see Simulator."""
        instruction(task)
        kind = Kind(task, self._size, self._fovy)
        if self._scene is None or self._scene.kind != kind:
            self.close()
            self._scene = scenes().take(kind)
        self._full = self._scene.reset(init % 2**64)
        self._steps = 0

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move the arm; see Simulator."""
        assert self._scene is not None, "reset comes first"
        self._full, reward, success = self._scene.step(np.clip(action, -1, 1))
        self._steps += 1
        truncated = not success and self._steps >= self._max_steps
        return Stepped(reward=reward, terminated=success, truncated=truncated, success=success)

    def observe(self) -> Observation:
        """Render the cameras; see Simulator."""
        assert self._scene is not None, "reset comes first"
        images = {camera: self._scene.render(camera) for camera in self._cameras}
        return Observation(images=images, state=self._full[self._numbers].astype(np.float32))

    def full_state(self) -> NDArray[np.float64]:
        """Return MetaWorld's own observation [39], with the positions of objects and goal."""
        return self._full.copy()

    def privileged(self) -> NDArray[np.float32]:
        """Return the positions [6] of the two objects, zeros for one that a task lacks."""
        return self._full[_OBJECTS].astype(np.float32)

    def expert_action(self) -> NDArray[np.float32]:
        """Return the action [4] of MetaWorld's scripted policy in the current state."""
        assert self._scene is not None, "reset comes first"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # actions above one centimetre are clipped with a warning
            action = expert(self._scene.kind.task).get_action(self._full)
        return np.clip(action, -1, 1).astype(np.float32)

    def close(self) -> None:
        """Return the scene to this process's idle ones, for the next episode of its task."""
        if self._scene is not None:
            scenes().give_back(self._scene)
            self._scene = None


@functools.cache
def expert(task: str) -> Any:
    """Return MetaWorld's scripted policy: `get_action(full_state) -> action`. Raises UserError for an unknown task."""
    instruction(task)
    import_metaworld()
    from metaworld.policies import ENV_POLICY_MAP

    return ENV_POLICY_MAP[f"{task}-v3"]()
