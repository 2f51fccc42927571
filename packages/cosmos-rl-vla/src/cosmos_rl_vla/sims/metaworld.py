"""MetaWorld: fifty tasks of a Sawyer arm on MuJoCo (`pip install metaworld`), with images and instructions.

MetaWorld, one episode at a time -- Scene, one task's physics -- MuJoCo; idle scenes are reused"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, Stepped
from cosmos_rl_vla.sims.rendering import choose_gl, lighten, renderer
from cosmos_rl_vla.sims.shared import Scenes, check_cameras, check_physics, instruction_of

INSTRUCTIONS = {
    "assembly": "pick up the ring and put it over the peg",
    "basketball": "put the ball through the hoop",
    "bin-picking": "move the block from one bin to the other",
    "box-close": "put the lid on the box",
    "button-press": "press the button on the front of the box",
    "button-press-topdown": "press the button from above",
    "button-press-topdown-wall": "reach over the wall and press the button from above",
    "button-press-wall": "go around the wall and press the button on the front",
    "coffee-button": "press the button of the coffee machine",
    "coffee-pull": "pull the mug away from the coffee machine",
    "coffee-push": "push the mug under the coffee machine",
    "dial-turn": "turn the dial",
    "disassemble": "take the ring off the peg",
    "door-close": "close the door",
    "door-lock": "lock the door",
    "door-open": "open the door",
    "door-unlock": "unlock the door",
    "drawer-close": "close the drawer",
    "drawer-open": "open the drawer",
    "faucet-close": "close the faucet",
    "faucet-open": "open the faucet",
    "hammer": "hammer the nail into the wall",
    "hand-insert": "put the gripper into the hole",
    "handle-press": "press the handle down",
    "handle-press-side": "press the handle down from the side",
    "handle-pull": "pull the handle up",
    "handle-pull-side": "pull the handle up from the side",
    "lever-pull": "pull the lever up",
    "peg-insert-side": "insert the peg into the hole from the side",
    "peg-unplug-side": "pull the peg out of the hole",
    "pick-out-of-hole": "take the puck out of the hole",
    "pick-place": "pick up the puck and carry it to the goal",
    "pick-place-wall": "carry the puck over the wall to the goal",
    "plate-slide": "slide the plate forward into the cabinet",
    "plate-slide-back": "slide the plate back out of the cabinet",
    "plate-slide-back-side": "slide the plate sideways out of the cabinet",
    "plate-slide-side": "slide the plate sideways into the cabinet",
    "push": "push the puck to the goal",
    "push-back": "pull the block back to the goal",
    "push-wall": "push the puck around the wall to the goal",
    "reach": "move the gripper to the goal",
    "reach-wall": "move the gripper around the wall to the goal",
    "shelf-place": "put the block on the shelf",
    "soccer": "push the ball into the goal",
    "stick-pull": "pull the box with the stick",
    "stick-push": "push the box with the stick",
    "sweep": "sweep the block off the table",
    "sweep-into": "sweep the block into the hole",
    "window-close": "close the window",
    "window-open": "open the window",
}
"""One sentence for each of the fifty tasks."""


def instruction(task: str) -> str:
    """Return the instruction of a task. Raises UserError for one that MetaWorld does not have."""
    return instruction_of(task, INSTRUCTIONS, simulator="metaworld")


_CORNER2_PLACE = (0.75, 0.075, 0.7)
"""Camera position of lerobot and RLinf; MetaWorld's own is further away."""
_MAX_IDLE = 8
"""Maximum number of idle scenes, about 25 MB each."""


class MetaWorldSceneKey(NamedTuple):
    """The key of interchangeable scenes."""

    task: str
    image_size: int
    fovy: float


def import_metaworld() -> None:
    """Import MetaWorld for off-screen rendering; `MetaWorldScene.step` raises MuJoCo's warnings, without a log file.

    Raises UserError if MetaWorld or OpenGL is not installed.
    """
    choose_gl(os.environ)  # before MuJoCo is imported, which reads MUJOCO_GL
    try:
        import metaworld  # noqa: F401
    except ImportError as error:
        install = pip_install("cosmos-rl-vla[metaworld]")
        raise UserError(f"simulator metaworld cannot be imported ({error}): {install}") from error
    mujoco: Any = importlib.import_module("mujoco")
    mujoco.set_mju_user_warning(_leave_no_file)


def _leave_no_file(warning: str) -> None:
    """Replace MuJoCo's writer of MUJOCO_LOG.TXT; `MetaWorldScene.step` reads the counts of warnings."""


class MetaWorldScene:
    """One task's physics.

    MetaWorld carries state from one episode to the next (positions of the model's bodies, the previous observation,
    attributes of rewards), so everything that an episode changes is restored first: an episode depends on its seed
    alone.
    """

    def __init__(self, kind: MetaWorldSceneKey) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        self._mujoco: Any = importlib.import_module("mujoco")  # whose stubs leave most of it out
        self.kind = kind
        self._env: Any = ALL_V3_ENVIRONMENTS[f"{kind.task}-v3"]()
        self._env._set_task_called = True  # reset samples the task, in place of a benchmark's list
        self._env._freeze_rand_vec = False
        self._env.seeded_rand_vec = True
        self._env._partially_observable = False  # scripted policies read the goal
        self._env.__dict__.pop("sawyer_observation_space", None)  # cached for the partially observable one
        self._model, self._data = self._env.model, self._env.data
        lighten(self._model, height=kind.image_size, width=kind.image_size)
        camera = self._model.camera("corner2")
        camera.pos, camera.fovy = _CORNER2_PLACE, kind.fovy
        self._bodies, self._sites = self._model.body_pos.copy(), self._model.site_pos.copy()
        self._kept = {name for name, value in vars(self._env).items() if not _is_memory(value)}
        self._memory = {name: value for name, value in vars(self._env).items() if name not in self._kept}
        self._memory = copy.deepcopy(self._memory)

    def reset(self, seed: int) -> NDArray[np.float64]:
        """Lay out the episode of a seed and return MetaWorld's observation [39]."""
        self._model.body_pos[:], self._model.site_pos[:] = self._bodies, self._sites
        self._mujoco.mj_resetData(self._model, self._data)
        self._mujoco.mj_forward(self._model, self._data)
        for name in vars(self._env).keys() - self._kept:
            delattr(self._env, name)
        vars(self._env).update(copy.deepcopy(self._memory))
        self._env.seed(seed)
        full, _ = self._env.reset()
        return full

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float64], float, bool]:
        """Return the observation [39], the shaped reward, and whether the task is done.

        Raises SimulatorError if the physics diverged: MuJoCo then continues from its first state.
        """
        full, reward, _, _, info = self._env.step(action)
        check_physics(self._data)
        return full, float(reward), info["success"] > 0

    def render(self, camera: str) -> NDArray[np.uint8]:
        """Return the image of a camera, [H, W, 3]."""
        size = self.kind.image_size
        image = renderer().render(self._env.model_name, self._model, self._data, camera=camera, height=size, width=size)
        return image[::-1, ::-1] if camera.startswith("corner") else image  # the corner cameras are upside down


def _is_memory(value: object) -> bool:
    """Whether an attribute is a plain value of the environment, not a view of the physics' arrays."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.owndata)
    return value is None or isinstance(value, bool | int | float | str | tuple | list | dict)


@functools.cache
def scenes() -> Scenes[MetaWorldSceneKey, MetaWorldScene]:
    """Return the idle scenes of this process."""
    return Scenes(MetaWorldScene, max_idle=_MAX_IDLE)


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
        check_cameras(cameras, CAMERAS, simulator="metaworld")
        if not 1 <= max_steps <= _STEP_LIMIT:
            raise UserError(f"simulator metaworld: max_steps is 1 to {_STEP_LIMIT}, not {max_steps}")
        if state not in ("proprioception", "full"):
            raise UserError(f"simulator metaworld: state is proprioception or full, not {state!r}")
        import_metaworld()
        self._cameras, self._size, self._fovy, self._max_steps = tuple(cameras), image_size, fovy, max_steps
        self._numbers = slice(_PROPRIOCEPTION) if state == "proprioception" else slice(None)
        self._scene: MetaWorldScene | None = None
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
        kind = MetaWorldSceneKey(task, self._size, self._fovy)
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

    def observe(self) -> SimObservation:
        """Render the cameras; see Simulator."""
        assert self._scene is not None, "reset comes first"
        images = {camera: self._scene.render(camera) for camera in self._cameras}
        return SimObservation(images=images, state=self._full[self._numbers].astype(np.float32))

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
            scenes().give_back(self._scene.kind, self._scene)
            self._scene = None


@functools.cache
def expert(task: str) -> Any:
    """Return MetaWorld's scripted policy: `get_action(full_state) -> action`. Raises UserError for an unknown task."""
    instruction(task)
    import_metaworld()
    from metaworld.policies import ENV_POLICY_MAP

    return ENV_POLICY_MAP[f"{task}-v3"]()
