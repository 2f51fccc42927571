"""LIBERO: 130 tasks of a Panda arm on robosuite (`pip install hf-libero`), with images and instructions.

Libero, one episode at a time -- Scene, one task's physics -- robosuite; idle scenes are reused"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_core.storage.pickles import read_array
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.rendering import choose_gl, fit, lighten, renderer
from cosmos_rl_vla.sims.shared import Scenes, check_cameras, check_physics, similar, stored_state

MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Step limits of openvla-oft by suite: somewhat more than the longest demonstration."""

_SCENE = re.compile(r"^[A-Z_]+SCENE\d+_")
"""Prefix of the task names of libero_10 and libero_90."""


class LiberoTask(NamedTuple):
    """A task: its suite and its name in it."""

    suite: str
    name: str

    @property
    def sentence(self) -> str:
        """Return the instruction."""
        return _SCENE.sub("", self.name).replace("_", " ")


@functools.cache
def suites() -> Mapping[str, Sequence[str]]:
    """Return the names of the tasks of each suite, in LIBERO's order."""
    return json.loads((files("cosmos_rl_vla.sims") / "libero_tasks.json").read_text())


def find_task(task: str) -> LiberoTask:
    """Return the task written as "suite/name" or "suite/number", the number in LIBERO's order.

    Raises UserError for one that LIBERO does not have.
    """
    suite, _, name = task.partition("/")
    if suite not in suites():
        raise UserError(
            f"LIBERO has no suite {suite!r}: write a task as libero_goal/open_the_middle_drawer_of_the_cabinet or "
            f"libero_goal/0; suites: {', '.join(suites())}"
        )
    names = suites()[suite]
    if name.isdecimal() and int(name) < len(names):
        return LiberoTask(suite, names[int(name)])
    if name in names:
        return LiberoTask(suite, name)
    known = f"it has {len(names)}, from {suite}/0 to {suite}/{len(names) - 1}"
    hint = similar(name, names, otherwise=known)
    raise UserError(f"{suite} has no task {name!r}; {hint}")


Rendering = Literal["fast", "robosuite"]

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
        raise UserError(
            f"simulator libero cannot be imported ({error}): {pip_install('cosmos-rl-vla[libero]')}, or in an "
            "interpreter of its own, named by [rollout.options] python"
        ) from error
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


class LiberoSceneKey(NamedTuple):
    """The key of interchangeable scenes."""

    task: LiberoTask
    image_size: int
    rendering: Rendering


class LiberoScene:
    """One task's physics; an episode depends on its stored state alone."""

    def __init__(self, kind: LiberoSceneKey) -> None:
        """Build it, which takes seconds. Raises UserError if files of LIBERO are missing."""
        libero: Any = importlib.import_module("libero.libero")
        control: Any = importlib.import_module("libero.libero.envs.env_wrapper").ControlEnv
        task, image_size = kind.task, kind.image_size
        self.kind = kind
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
        prepare = lighten if kind.rendering == "fast" else fit
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
        check_physics(self._data)
        return seen, float(reward), bool(success)

    def render(self, camera: str) -> NDArray[np.uint8]:
        """Return the image of a camera, [H, W, 3], upright with left and right exchanged.

        robosuite's images are upside down and openvla-oft rotates them by 180 degrees: policies are trained on these.
        """
        size, called = self.kind.image_size, f"{self.kind.task.suite}/{self.kind.task.name}"
        image = renderer().render(called, self._model, self._data, camera=camera, height=size, width=size)
        return image[:, ::-1]

    def close(self) -> None:
        """Release the physics."""
        self._env.close()


@functools.cache
def scenes() -> Scenes[LiberoSceneKey, LiberoScene]:
    """Return the idle scenes of this process."""
    return Scenes(LiberoScene, max_idle=_MAX_IDLE, close=LiberoScene.close)


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
        check_cameras(cameras, CAMERAS, simulator="libero")
        if drawing not in ("fast", "robosuite"):
            raise UserError(f"simulator libero: drawing is fast or robosuite, not {drawing!r}")
        import_libero()
        self._rendering: Rendering = drawing
        self._cameras, self._size, self._settle, self._limit = tuple(cameras), image_size, settle_steps, max_steps
        self._scene: LiberoScene | None = None
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
        """Begin at the stored state of `init`; see Simulator and `shared.stored_state`."""
        libero_task = find_task(task)
        if self._scene is None or self._scene.kind.task != libero_task:
            self.close()
            self._scene = scenes().take(LiberoSceneKey(libero_task, self._size, self._rendering))
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
        limit = self._limit or MAX_STEPS[self._scene.kind.task.suite]
        truncated = not success and self._steps >= limit
        return Stepped(reward=reward, terminated=success, truncated=truncated, success=success)

    def observe(self) -> SimObservation:
        """Render the cameras; see Simulator."""
        assert self._scene is not None, "reset comes first"
        images = {camera: self._scene.render(camera) for camera in self._cameras}
        parts = (
            self._seen["robot0_eef_pos"],
            axis_angle(self._seen["robot0_eef_quat"]),
            self._seen["robot0_gripper_qpos"],
        )
        return SimObservation(images=images, state=np.concatenate(parts).astype(np.float32))

    def close(self) -> None:
        """Return the scene to this process's idle ones, for the next episode of its task."""
        if self._scene is not None:
            scenes().give_back(self._scene.kind, self._scene)
            self._scene = None


def axis_angle(quaternion: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rotation [3], axis times angle in [0, 2 pi], of a unit quaternion (x, y, z, w); zeros for none."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    length = np.sqrt(1.0 - w * w)
    if np.isclose(length, 0.0):
        return np.zeros(3)
    return quaternion[:3] * (2.0 * np.arccos(w) / length)
