"""LIBERO: 130 tasks of a Panda arm on robosuite (`pip install hf-libero`), with images and instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import Observation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.inits import stored_state
from cosmos_rl_vla.sims.libero.scene import Rendering, Scene, import_libero, scenes
from cosmos_rl_vla.sims.libero.tasks import MAX_STEPS, find_task

CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview", "birdview", "sideview")

HELD_OUT_STATES = 10
"""Number of a task's last stored initial states, of 50, that training never uses."""

_ACTION_DIM, _STATE_DIM = 7, 8
_NO_MOTION = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
"""The action that keeps the arm where it is, gripper open."""


class Libero(Worded):
    """The tasks of LIBERO, such as "libero_goal/open_the_middle_drawer_of_the_cabinet"; see Simulator.

    Actions [7] in [-1, 1]: translation of the hand along and rotation about x, y and z, and the gripper (-1 opens).
    State [8]: the hand's position [3], its rotation as axis times angle [3], and the positions of the two fingers.
    The reward is 1 at the step that completes the task and ends the episode. `init` chooses one of 50 stored states.
    """

    def __init__(
        self,
        *,
        cameras: Sequence[str] = ("agentview", "robot0_eye_in_hand"),
        image_size: int = 256,
        max_steps: int | None = None,
        settle_steps: int = 10,
        drawing: Rendering = "fast",
    ) -> None:
        """`max_steps` replaces the suites' limits. Objects settle during the first `settle_steps`.

        `drawing`: "robosuite" renders as robosuite does, "fast" without shadows, reflections and multisampling.
        Raises UserError for an unknown camera or `drawing`, and if LIBERO cannot be imported.
        """
        for camera in cameras:
            if camera not in CAMERAS:
                raise UserError(f"simulator libero has no camera {camera!r}; cameras: {', '.join(CAMERAS)}")
        if drawing not in ("fast", "robosuite"):
            raise UserError(f"simulator libero: drawing is fast or robosuite, not {drawing!r}")
        import_libero()
        self._rendering: Rendering = drawing
        self._cameras, self._size, self._settle, self._limit = tuple(cameras), image_size, settle_steps, max_steps
        self._scene: Scene | None = None
        self._seen: Mapping[str, Any] = {}
        self._steps = 0
        self.spec = SimSpec(
            cameras=dict.fromkeys(cameras, (image_size, image_size)),
            state_dim=_STATE_DIM,
            action_dim=_ACTION_DIM,
            action_low=(-1.0,) * _ACTION_DIM,
            action_high=(1.0,) * _ACTION_DIM,
            max_steps=max_steps or max(MAX_STEPS.values()),
            control_hz=20.0,
        )

    @classmethod
    def instruction(cls, task: str) -> str:
        """Return the instruction of a task, taken from its name. Raises UserError for one that LIBERO does not have."""
        return find_task(task).sentence

    def reset(self, task: str, init: int) -> None:
        """Begin at the stored state of `init`; see Simulator and `inits.stored_state`."""
        found = find_task(task)
        if self._scene is None or self._scene.task != found:
            self.close()
            self._scene = scenes().take(found, image_size=self._size, rendering=self._rendering)
        states = self._scene.states
        self._seen = self._scene.reset(states[stored_state(init, states=len(states), held_out=HELD_OUT_STATES)])
        for _ in range(self._settle):
            self._seen, _, _ = self._scene.step(_NO_MOTION)
        self._steps = 0

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move the arm; see Simulator."""
        assert self._scene is not None, "reset comes first"
        self._seen, reward, success = self._scene.step(np.clip(action, -1, 1).astype(np.float64))
        self._steps += 1
        limit = self._limit or MAX_STEPS[self._scene.task.suite]
        truncated = not success and self._steps >= limit
        return Stepped(reward=reward, terminated=success, truncated=truncated, success=success)

    def observe(self) -> Observation:
        """Render the cameras; see Simulator."""
        assert self._scene is not None, "reset comes first"
        images = {camera: self._scene.render(camera) for camera in self._cameras}
        parts = (
            self._seen["robot0_eef_pos"],
            axis_angle(self._seen["robot0_eef_quat"]),
            self._seen["robot0_gripper_qpos"],
        )
        return Observation(images=images, state=np.concatenate(parts).astype(np.float32))

    def close(self) -> None:
        """Return the scene to this process's idle ones, for the next episode of its task."""
        if self._scene is not None:
            scenes().give_back(self._scene)
            self._scene = None


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation [3], axis times angle in [0, 2 pi], of a unit quaternion (x, y, z, w); zeros for none."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    length = np.sqrt(1.0 - w * w)
    if np.isclose(length, 0.0):
        return np.zeros(3)
    return quaternion[:3] * (2.0 * np.arccos(w) / length)
