"""A scene of LIBERO: robosuite's physics of one task, rendered with the OpenGL context of this process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import tempfile
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.storage.pickles import read_array
from cosmos_rl_vla.sims.base import SimulatorError
from cosmos_rl_vla.sims.gl import choose_gl
from cosmos_rl_vla.sims.libero.tasks import LiberoTask
from cosmos_rl_vla.sims.rendering import fit, lighten, renderer

Rendering = Literal["fast", "robosuite"]

_INSTALL = "pip install 'cosmos-rl-vla[libero]', or in an interpreter of its own, named by [rollout.options] python"
_DIVERGED = slice(4, 7)
"""mjWARN_BADQPOS, mjWARN_BADQVEL, mjWARN_BADQACC"""
_COLLISION, _HIDDEN = 0, 3
"""Geom groups: robosuite's collision shapes, and the first group that MuJoCo does not render."""
_SEED = 0
"""Seed of randomness outside the stored state (positions of fixtures); openvla-oft evaluates with this one."""
_MAX_IDLE = 4
"""Maximum number of idle scenes."""


def import_libero() -> None:
    """Import LIBERO without its renderer. Raises UserError if it, its assets or OpenGL is missing."""
    choose_gl(os.environ)  # before MuJoCo is imported, which reads MUJOCO_GL
    try:
        _answer_question()
        importlib.import_module("libero.libero.envs.env_wrapper")
    except ImportError as error:
        raise UserError(f"simulator libero cannot be imported ({error}): {_INSTALL}") from error
    assets = _assets()
    if not assets.is_dir():
        raise UserError(
            f"LIBERO's meshes are not at {assets}: its wheel has none and the download failed; put the folder "
            f"`assets` of its repository there, or set HF_HOME to a cache that has them"
        )


def _answer_question() -> None:
    """Write LIBERO's config file of default paths if it is missing.

    Without the file LIBERO's import prompts on the terminal, and a simulator process has none.
    """
    spec = importlib.util.find_spec("libero.libero")
    if spec is None or spec.origin is None:
        raise ImportError("No module named 'libero.libero'")
    root = Path(spec.origin).parent
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH") or Path.home() / ".libero")
    config = folder / "config.yaml"
    if config.exists():
        return
    places = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets", "assets": "assets"}
    paths = {"benchmark_root": str(root), **{name: str(root / place) for name, place in places.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(paths, file)  # which is YAML too
    os.replace(file.name, config)  # several processes may do so at once


def _assets() -> Path:
    libero: Any = importlib.import_module("libero.libero")
    try:
        return Path(libero.get_assets_path())  # of hf-libero, which downloads them
    except AttributeError:
        return Path(libero.get_libero_path("assets"))


class Scene:
    """One task's physics; an episode depends on its stored state alone."""

    def __init__(self, task: LiberoTask, *, image_size: int, rendering: Rendering) -> None:
        """Build it, which takes seconds. Raises UserError if files of LIBERO are missing."""
        libero: Any = importlib.import_module("libero.libero")
        control: Any = importlib.import_module("libero.libero.envs.env_wrapper").ControlEnv
        self.task, self.image_size, self.rendering = task, image_size, rendering
        described = Path(libero.get_libero_path("bddl_files")) / task.suite / f"{task.name}.bddl"
        self.states = read_states(Path(libero.get_libero_path("init_states")) / task.suite / f"{task.name}.pruned_init")
        if not described.is_file():
            raise UserError(f"LIBERO's description of {task.suite}/{task.name} is not at {described}")
        self._env = control(
            bddl_file_name=str(described),
            use_camera_obs=False,  # images are rendered when the policy observes, not at every step
            has_offscreen_renderer=False,
            hard_reset=False,  # which would build the model again
            ignore_done=True,
        )
        self._model, self._data = self._env.sim.model._model, self._env.sim.data._data
        self._model.geom_group[self._model.geom_group == _COLLISION] = _HIDDEN
        prepare = lighten if rendering == "fast" else fit
        prepare(self._model, height=image_size, width=image_size)

    def reset(self, state: NDArray[np.float64]) -> dict[str, Any]:
        """Begin at a stored state [n] and return robosuite's observation, without images."""
        self._env.seed(_SEED)
        self._env.reset()
        for robot in self._env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # robosuite's reset does not reset it
        return self._env.set_init_state(state)

    def step(self, action: NDArray[np.float64]) -> tuple[dict[str, Any], float, bool]:
        """Return robosuite's observation, the reward, and whether the task is done.

        Raises SimulatorError if the physics diverged.
        """
        seen, reward, success, _ = self._env.step(action)
        if self._data.warning.number[_DIVERGED].any():
            raise SimulatorError("the physics of MuJoCo diverged (positions, velocities or accelerations not finite)")
        return seen, float(reward), bool(success)

    def render(self, camera: str) -> NDArray[np.uint8]:
        """Return the image of a camera, [H, W, 3], upright with left and right exchanged.

        robosuite's images are upside down and openvla-oft rotates them by 180 degrees: policies are trained on these.
        """
        size, called = self.image_size, f"{self.task.suite}/{self.task.name}"
        image = renderer().render(called, self._model, self._data, camera=camera, height=size, width=size)
        return image[:, ::-1]

    def close(self) -> None:
        """Release the physics."""
        self._env.close()


class Scenes:
    """The idle scenes of this process, most recently used last."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, Scene] = OrderedDict()

    def take(self, task: LiberoTask, *, image_size: int, rendering: Rendering) -> Scene:
        """Return an idle scene of the task, image size and rendering, or build one."""
        for key, scene in reversed(self._idle.items()):
            if (scene.task, scene.image_size, scene.rendering) == (task, image_size, rendering):
                return self._idle.pop(key)
        return Scene(task, image_size=image_size, rendering=rendering)

    def give_back(self, scene: Scene) -> None:
        """Keep a scene for the next episode of its task; evicts the scene idle for longest."""
        self._idle[id(scene)] = scene
        if len(self._idle) > _MAX_IDLE:
            self._idle.popitem(last=False)[1].close()


@functools.cache
def scenes() -> Scenes:
    """Return the idle scenes of this process."""
    return Scenes()


MAX_BYTES = 64 * 2**20
"""Maximum size of a task's unpacked states; 50 states of 1,000 numbers are 400 KB."""


def read_states(path: Path) -> NDArray[np.float64]:
    """Return the initial states [50, n] of a task: MuJoCo's time, positions and velocities.

    The file is an archive of `torch.save` around the pickle of one numpy array; neither is loaded as such.
    Raises UserError for a file that does not exist or has other contents.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            pickled = next(member for member in archive.infolist() if member.filename.endswith("data.pkl"))
            if pickled.file_size > MAX_BYTES:
                raise UserError(f"{path}: {pickled.file_size:,} bytes of states, at most {MAX_BYTES:,} are read")
            data = archive.read(pickled)
    except (OSError, EOFError, RuntimeError, StopIteration, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: LIBERO's initial states cannot be read ({error}); install hf-libero again") from error
    states = read_array(data, name=str(path))
    if states.ndim != 2 or states.dtype != np.float64:
        raise UserError(f"{path}: initial states of shape {states.shape} and type {states.dtype}, not float64 [50, n]")
    return states
