"""BEHAVIOR-1K: household activities of the R1Pro robot on OmniGibson (Isaac Sim), with images and instructions."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import SimObservation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.shared import stored_state

CAMERAS = {"head": "zed_link:Camera:0", "left_wrist": "left_realsense_link:Camera:0"} | {
    "right_wrist": "right_realsense_link:Camera:0"
}
"""Camera names -> substrings of the robot's sensor names."""

HELD_OUT_INSTANCES = 10
"""Number of an activity's last stored instances that training never uses."""

_ROBOT = "R1Pro"
_STATE = ("base_qvel", "trunk_qpos", "arm_left_qpos", "arm_right_qpos")
_FINGERS = ("gripper_left_qpos", "gripper_right_qpos")
_DIM = 23
_SETTLE_STEPS = 25
_RENDERS = 4
"""Renders by which Isaac's cameras lag, about."""
_ADVICE = (
    "install BEHAVIOR-1K with its setup.sh (OmniGibson, BDDL, JoyLo, datasets) on a machine with an RTX GPU, and name "
    "its interpreter in [rollout.options] python"
)


class Behavior(Worded):
    """One activity of BEHAVIOR-1K; see Simulator.

    Actions [23] in [-1, 1]: base [3], trunk [4], left arm [7], left gripper, right arm [7], right gripper.
    State [23]: the base's velocity [3], and the positions of trunk [4], left arm [7], right arm [7] and both grippers.
    `init` chooses one of the activity's stored instances. Isaac Sim runs once per process and renders at every step:
    slots = 1.
    """

    def __init__(
        self, *, task: str, head_size: int = 720, wrist_size: int = 480, max_steps: int = 2000, headless: bool = True
    ) -> None:
        """Start Isaac Sim and load the activity's scene, which takes minutes: raise start_timeout_s.

        Raises UserError for a second one in a process, an unknown activity, and if BEHAVIOR-1K is not installed.
        """
        self._og, self._tools = _import_behavior(headless)
        if self._og.sim is not None:
            raise UserError("Isaac Sim runs once per process: set [rollout.options] slots = 1, and more processes")
        self.instruction(task)
        self._task, self._max_steps = task, max_steps
        self._sizes = {"head": head_size, "left_wrist": wrist_size, "right_wrist": wrist_size}
        self._config = self._configuration()
        self._env: Any = self._og.Environment(configs=self._config)
        self._set_cameras()
        self._instances = self._find_instances()
        self._seen: Mapping[str, Any] = {}
        self._steps = 0
        self.spec = SimSpec(
            cameras={name: (size, size) for name, size in self._sizes.items()},
            state_dim=_DIM,
            action_dim=_DIM,
            action_low=(-1.0,) * _DIM,
            action_high=(1.0,) * _DIM,
            max_steps=max_steps,
            control_hz=30.0,
        )

    @classmethod
    def instruction(cls, task: str) -> str:
        """Return the words of an activity's name as its instruction. Raises UserError for an invalid name."""
        if not task.isidentifier():
            raise UserError(f"simulator behavior has no activity {task!r}; one is turning_on_radio")
        return task.replace("_", " ")

    def reset(self, task: str, init: int) -> None:
        """Load the stored instance of `init`; see Simulator. Raises UserError for another activity."""
        if task != self._task:
            raise UserError(
                f"simulator behavior was made for {self._task} and cannot play {task}: a process has one scene; set "
                f"[data.options] task, and one activity in [data] tasks"
            )
        instances = self._instances
        chosen = stored_state(init, states=len(instances), held_out=HELD_OUT_INSTANCES)
        self._load(instances[chosen])
        self._seen, _ = self._env.reset()
        for _ in range(_RENDERS):
            self._og.sim.render()
        self._seen, _ = self._env.get_obs()
        self._steps = 0

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move the robot; see Simulator."""
        torch: Any = importlib.import_module("torch")
        self._seen, reward, terminated, _, info = self._env.step(torch.as_tensor(np.clip(action, -1, 1)))
        self._steps += 1
        return Stepped(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=not terminated and self._steps >= self._max_steps,
            success=bool(info["done"]["success"]),
        )

    def observe(self) -> SimObservation:
        """Return the images that the last step rendered; see Simulator."""
        seen = next(part for part in self._seen.values() if "proprio" in part)  # the robot's
        images = {
            name: np.asarray(next(part for key, part in seen.items() if sensor in key)["rgb"], np.uint8)[..., :3]
            for name, sensor in CAMERAS.items()
        }
        body = np.asarray(seen["proprio"], np.float32)
        places = self._tools.PROPRIOCEPTION_INDICES[_ROBOT]
        parts = [body[places[name]] for name in _STATE] + [body[places[name]].sum(keepdims=True) for name in _FINGERS]
        return SimObservation(images=images, state=np.concatenate(parts))

    def close(self) -> None:
        """Stop Isaac Sim."""
        self._og.shutdown()

    def _configuration(self) -> dict[str, Any]:
        teleop: Any = importlib.import_module("gello.robots.sim_robot.og_teleop_utils")
        tasks = teleop.load_available_tasks()
        if self._task not in tasks:
            raise UserError(
                f"simulator behavior has no activity {self._task!r}; activities: {', '.join(sorted(tasks))}"
            )
        described = {"task_name": self._task, "task_cfg": tasks[self._task][0]}
        config = self._tools.generate_basic_environment_config(**described)
        robot = teleop.generate_robot_config(**described)
        robot["obs_modalities"] = ["proprio", "rgb"]
        robot["proprio_obs"] = list(self._tools.PROPRIOCEPTION_INDICES[_ROBOT])
        config["robots"] = [robot]
        config["task"]["termination_config"]["max_steps"] = self._max_steps + 1  # the limit is applied here
        config["task"]["include_obs"] = False
        return config

    def _set_cameras(self) -> None:
        """Set the sizes of the robot's cameras, and the head camera's angle to the challenge's."""
        for name, sensor in self._env.robots[0].sensors.items():
            called = next((ours for ours, part in CAMERAS.items() if part in name), None)
            if called is not None:
                sensor.image_height = sensor.image_width = self._sizes[called]
                if called == "head":
                    sensor.horizontal_aperture = 40.0
        self._env.load_observation_space()

    def _find_instances(self) -> list[Path]:
        """Return the files of the activity's stored instances, in numeric order."""
        scene, task = self._config["scene"]["scene_model"], self._config["task"]
        root = importlib.import_module("omnigibson.utils.asset_utils").get_task_instance_path(scene)
        folder = Path(root) / "json" / f"{scene}_task_{task['activity_name']}_instances"
        numbered = re.compile(rf"_{task['activity_definition_id']}_(\d+)_template-tro_state\.json$")
        instances = {int(match[1]): file for file in folder.glob("*.json") if (match := numbered.search(file.name))}
        if len(instances) <= HELD_OUT_INSTANCES:
            raise UserError(
                f"{folder} has {len(instances)} instances of {self._task}; download the challenge's task instances"
            )
        return [instances[number] for number in sorted(instances)]

    def _load(self, instance: Path) -> None:
        """Set robot and objects to an instance's poses, and let them settle."""
        convert = importlib.import_module("omnigibson.utils.python_utils").recursively_convert_to_torch
        env = self._env
        for key, state in convert(json.loads(instance.read_text())).items():
            if key == "robot_poses":
                pose = state[_ROBOT][0]
                env.robots[0].set_position_orientation(pose["position"], pose["orientation"])
                env.scene.write_task_metadata(key=key, data=state)
            else:
                env.task.object_scope[key].load_state(state, serialized=False)
        for _ in range(_SETTLE_STEPS):
            self._og.sim.step_physics()
            for entity in env.task.object_scope.values():
                if not entity.is_system and entity.exists:
                    entity.keep_still()
        env.scene.update_initial_file()


def _import_behavior(headless: bool) -> tuple[Any, Any]:
    """Return omnigibson and its evaluation tools. Raises UserError if they are not installed."""
    try:
        og: Any = importlib.import_module("omnigibson")
        macros: Any = importlib.import_module("omnigibson.macros").gm
        tools: Any = importlib.import_module("omnigibson.learning.utils.eval_utils")
        importlib.import_module("gello.robots.sim_robot.og_teleop_utils")
    except ImportError as error:
        raise UserError(f"simulator behavior cannot be imported ({error}): {_ADVICE}") from error
    macros.HEADLESS = headless
    macros.ENABLE_OBJECT_STATES = macros.ENABLE_FLATCACHE = macros.ENABLE_TRANSITION_RULES = True
    macros.USE_GPU_DYNAMICS = False
    return og, tools
