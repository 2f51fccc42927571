"""A scene of MetaWorld: its physics, reset to the same state before each episode."""

from __future__ import annotations

import copy
import functools
import importlib
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimulatorError
from cosmos_rl_vla.sims.gl import choose_gl
from cosmos_rl_vla.sims.rendering import lighten, renderer

_CORNER2_PLACE = (0.75, 0.075, 0.7)
"""Camera position of lerobot and RLinf; MetaWorld's own is further away."""
_DIVERGED = slice(4, 7)
"""mjWARN_BADQPOS, mjWARN_BADQVEL, mjWARN_BADQACC"""
_MAX_IDLE = 8
"""Maximum number of idle scenes, about 25 MB each."""


class Kind(NamedTuple):
    """The key of interchangeable scenes."""

    task: str
    image_size: int
    fovy: float


def import_metaworld() -> None:
    """Import MetaWorld for off-screen rendering; `Scene.step` turns MuJoCo's warnings into errors without a log file.

    Raises UserError if MetaWorld or OpenGL is not installed.
    """
    choose_gl(os.environ)  # before MuJoCo is imported, which reads MUJOCO_GL
    try:
        import metaworld  # noqa: F401
    except ImportError as error:
        install = "pip install 'cosmos-rl-vla[metaworld]'"
        raise UserError(f"simulator metaworld cannot be imported ({error}): {install}") from error
    mujoco: Any = importlib.import_module("mujoco")
    mujoco.set_mju_user_warning(_leave_no_file)


def _leave_no_file(warning: str) -> None:
    """Replace MuJoCo's writer of MUJOCO_LOG.TXT; `Scene.step` reads the counts of warnings."""


class Scene:
    """One task's physics.

    MetaWorld carries state from one episode to the next (positions of the model's bodies, the previous observation,
    attributes of rewards), so everything that an episode changes is restored first: an episode depends on its seed
    alone.
    """

    def __init__(self, kind: Kind) -> None:
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
        if self._data.warning.number[_DIVERGED].any():
            raise SimulatorError("the physics of MuJoCo diverged (positions, velocities or accelerations not finite)")
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


class Scenes:
    """The idle scenes of this process, most recently used last."""

    def __init__(self) -> None:
        self._idle: list[Scene] = []

    def take(self, kind: Kind) -> Scene:
        """Return an idle scene of that kind, or build one."""
        for scene in reversed(self._idle):
            if scene.kind == kind:
                self._idle.remove(scene)
                return scene
        return Scene(kind)

    def give_back(self, scene: Scene) -> None:
        """Keep a scene for the next episode of its kind."""
        self._idle = [*self._idle, scene][-_MAX_IDLE:]


@functools.cache
def scenes() -> Scenes:
    """Return the idle scenes of this process."""
    return Scenes()
