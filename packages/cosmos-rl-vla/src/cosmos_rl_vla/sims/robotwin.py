"""RoboTwin 2.0: tasks of two arms on SAPIEN, from a checkout of its repository, with images and instructions."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, SimulatorError, Stepped, Worded
from cosmos_rl_vla.sims.shared import check_cameras

CAMERAS = ("head_camera", "left_camera", "right_camera", "front_camera")

_ADVICE = (
    "clone RoboTwin 2.0, run its script/_install.sh and its download of assets, and set ROBOTWIN_PATH (or "
    "[data.options] path) to the clone; [rollout.options] python names the interpreter that it was installed in"
)
_ARM = (-2 * np.pi,) * 6, (2 * np.pi,) * 6
"""Minimum and maximum angle of the six joints; the robot's own limits are narrower."""
_SEEDS = 2**32
_NEXT_SEED = 1_000_003
"""Added to the seed for the next attempt if objects do not come to rest; neighbouring seeds are other episodes."""
_ATTEMPTS = 20
_CLEAR_EVERY = 5
"""Episodes after which SAPIEN's memory is cleared, as RoboTwin does."""


class RoboTwin(Worded):
    """Tasks of RoboTwin with its aloha-agilex robot, such as "place_empty_cup"; see Simulator.

    Actions [14] and state [14]: the left arm's joint angles [6] and gripper (0 closed, 1 open), then the right's.
    An action is the joints' target; a step lasts until they reach it. The reward is 1 at the step that completes
    the task and ends the episode. `init` seeds the layout; if objects do not come to rest, the next seed is tried.
    """

    def __init__(
        self,
        *,
        path: str = "",
        config: str = "demo_clean",
        cameras: Sequence[str] = ("head_camera", "left_camera", "right_camera"),
        max_steps: int = 200,
    ) -> None:
        """`path` is the clone (else ROBOTWIN_PATH), `config` one of its task_config/*.yml.

        Changes this process's working directory to the clone, which finds its files from there. Raises UserError if it
        does not exist, cannot be imported, or has no such configuration.
        """
        check_cameras(cameras, CAMERAS, simulator="robotwin")
        self._root = _enter(path or os.environ.get("ROBOTWIN_PATH", ""))
        self._config = _configuration(self._root, config)
        self._cameras, self._max_steps = tuple(cameras), max_steps
        self._task: Any = None
        self._name = ""
        self._steps = self._episodes = 0
        low, high = (*_ARM[0], 0.0), (*_ARM[1], 1.0)
        size = (self._config["head_camera_h"], self._config["head_camera_w"])
        self.spec = SimSpec(
            cameras=dict.fromkeys(cameras, size),
            state_dim=14,
            action_dim=14,
            action_low=low * 2,
            action_high=high * 2,
            max_steps=max_steps,
            control_hz=10.0,
        )

    @classmethod
    def instruction(cls, task: str) -> str:
        """Return the words of a task's name as its instruction. Raises UserError for an invalid name."""
        if not task.isidentifier():
            raise UserError(f"simulator robotwin has no task {task!r}; a task is a file of its folder envs")
        return task.replace("_", " ")

    def reset(self, task: str, init: int) -> None:
        """Lay out the task; see Simulator. Raises SimulatorError if no seed lets the objects come to rest."""
        self._open(task)
        unstable = importlib.import_module("envs.utils.create_actor").UnStableError
        for attempt in range(_ATTEMPTS):
            seed = (init + attempt * _NEXT_SEED) % _SEEDS
            try:
                self._task.setup_demo(now_ep_num=0, seed=seed, is_test=True, task_name=task, **self._config)
                break
            except unstable:
                self._task.close_env()
        else:
            raise SimulatorError(f"the objects of {task} do not come to rest with {_ATTEMPTS} seeds from {init}")
        self._task.step_lim = self._max_steps + 1  # the limit is applied here: RoboTwin ignores actions after its own
        self._steps = 0

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move both arms to the action's joint angles; see Simulator."""
        assert self._task is not None, "reset comes first"
        self._task.take_action(np.clip(action, self.spec.action_low, self.spec.action_high))
        self._steps += 1
        success = bool(self._task.eval_success)
        truncated = not success and self._steps >= self._max_steps
        return Stepped(reward=float(success), terminated=success, truncated=truncated, success=success)

    def observe(self) -> SimObservation:
        """Render the cameras; see Simulator."""
        assert self._task is not None, "reset comes first"
        seen = self._task.get_obs()
        images = {name: np.asarray(seen["observation"][name]["rgb"], np.uint8) for name in self._cameras}
        return SimObservation(images=images, state=np.asarray(seen["joint_action"]["vector"], np.float32))

    def close(self) -> None:
        """Release the scene."""
        if self._task is not None:
            self._task.close_env(clear_cache=True)
            self._task = None

    def _open(self, task: str) -> None:
        """Close the last episode and load the task. Raises UserError for an unknown task."""
        if self._task is not None:
            self._episodes += 1
            self._task.close_env(clear_cache=self._episodes % _CLEAR_EVERY == 0)
        if self._name != task:
            self.instruction(task)
            try:
                self._task = getattr(importlib.import_module(f"envs.{task}"), task)()
            except ModuleNotFoundError as error:
                if error.name != f"envs.{task}":
                    raise
                tasks = sorted(file.stem for file in (self._root / "envs").glob("[!_]*.py"))
                raise UserError(f"simulator robotwin has no task {task!r}; tasks: {', '.join(tasks)}") from error
            self._name = task


def _enter(path: str) -> Path:
    """Make a clone of RoboTwin importable and the working directory."""
    root = Path(path).expanduser().resolve() if path else None
    if root is None or not (root / "envs" / "_base_task.py").is_file():
        raise UserError(f"simulator robotwin is not at {path or 'ROBOTWIN_PATH (not set)'}: {_ADVICE}")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    os.chdir(root)
    try:
        importlib.import_module("envs.utils.create_actor")
    except ImportError as error:
        raise UserError(f"RoboTwin at {root} cannot be imported ({error}): {_ADVICE}") from error
    return root


def _configuration(root: Path, config: str) -> Mapping[str, Any]:
    """Return the arguments of `setup_demo`: a configuration file, with robots and cameras resolved."""
    folder = root / "task_config"
    if not (folder / f"{config}.yml").is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("[!_]*.yml")))
        raise UserError(f"RoboTwin at {root} has no configuration {config!r}; it has: {known}")
    keys = dict(_yaml(folder / f"{config}.yml"))
    robots, cameras = _yaml(folder / "_embodiment_config.yml"), _yaml(folder / "_camera_config.yml")
    robot = keys["embodiment"]
    if len(robot) != 1:
        raise UserError(f"RoboTwin's {config} has the robots {robot}; this adapter supports one robot with two arms")
    file = robots[robot[0]]["file_path"]
    described = _yaml(root / file / "config.yml")
    camera = cameras[keys["camera"]["head_camera_type"]]
    return keys | {
        "left_robot_file": file,
        "right_robot_file": file,
        "left_embodiment_config": described,
        "right_embodiment_config": described,
        "dual_arm_embodied": True,
        "embodiment_name": robot[0],
        "head_camera_h": camera["h"],
        "head_camera_w": camera["w"],
        "task_config": config,
        "eval_mode": True,
        "render_freq": 0,
    }


def _yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}") from error
