"""ManiSkill: tasks of a Panda arm on SAPIEN (`pip install mani-skill`), with images and instructions.

ManiSkill       one Scene per task, physics on the CPU
ManiSkillBatch  one Scene of several copies that step together on a GPU"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.imports import pip_install
from cosmos_rl_vla.sims.base import BatchSimulator, SimObservation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.shared import check_cameras, instruction_of

INSTRUCTIONS = {
    "LiftPegUpright-v1": "stand the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole in the box",
    "PickCube-v1": "pick up the red cube and hold it at the green ball",
    "PlaceSphere-v1": "put the ball into the bin",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube into the target",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube into the target",
    "RollBall-v1": "roll the ball into the target",
    "StackCube-v1": "put the red cube on the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
}
"""One sentence per task."""

BUILT_ANEW = frozenset({"PegInsertionSide-v1"})
"""Tasks that randomise sizes of objects, so that each episode needs a scene of its own."""


def instruction(task: str) -> str:
    """Return the instruction of a task. Raises UserError for an unknown one."""
    return instruction_of(task, INSTRUCTIONS, simulator="maniskill")


Device = Literal["cpu", "gpu"]

CONTROL = {"pd_ee_delta_pose": 7, "pd_ee_delta_pos": 4, "pd_joint_delta_pos": 8}
"""Control modes of the Panda arm, and their action dimensions."""
CAMERAS = ("base_camera", "hand_camera")
_ROBOTS = {False: "panda", True: "panda_wristcam"}
"""Robot by whether it has a hand camera."""
_STATE_DIM = 9 + 7
_SEEDS = 2**32
"""Upper bound of seeds of numpy's RandomState, which ManiSkill uses."""
_NO_VULKAN = (
    "no Vulkan device to render with: install the GPU's Vulkan driver, or on a machine without one Mesa's lavapipe "
    "24.3 or newer (bookworm-backports: apt-get install -t bookworm-backports mesa-vulkan-drivers libvulkan1) and set "
    "VK_DRIVER_FILES to its lvp_icd.json"
)
_NO_DEVICE = {
    "cuda": "physics on a GPU needs an NVIDIA GPU; use maniskill, whose physics is on the CPU",
    "device": _NO_VULKAN,
    "vk::": _NO_VULKAN,
}
"""Remedy by a part of SAPIEN's error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneOptions:
    """Cameras, control mode and reward of a scene; validated on construction."""

    cameras: Sequence[str] = ("base_camera",)
    image_size: int = 128
    control: str = "pd_ee_delta_pose"
    reward: str = "normalized_dense"
    max_steps: int = 100

    def __post_init__(self) -> None:
        check_cameras(self.cameras, CAMERAS, simulator="maniskill")
        if self.control not in CONTROL:
            raise UserError(f"simulator maniskill: control is one of {', '.join(CONTROL)}, not {self.control!r}")
        if self.reward not in ("normalized_dense", "dense", "sparse"):
            raise UserError(f"simulator maniskill: reward is normalized_dense, dense or sparse, not {self.reward!r}")

    @property
    def spec(self) -> SimSpec:
        """Return sizes and units, the same for all tasks."""
        dim = CONTROL[self.control]
        return SimSpec(
            cameras=dict.fromkeys(self.cameras, (self.image_size, self.image_size)),
            state_dim=_STATE_DIM,
            action_dim=dim,
            action_low=(-1.0,) * dim,
            action_high=(1.0,) * dim,
            max_steps=self.max_steps,
            control_hz=20.0,
        )


def import_maniskill() -> None:
    """Import ManiSkill. Raises UserError if it is not installed."""
    try:
        importlib.import_module("mani_skill.envs")
    except ImportError as error:
        raise UserError(
            f"simulator maniskill cannot be imported ({error}): {pip_install('cosmos-rl-vla[maniskill]')}, or in an "
            f"interpreter of its own, named by [rollout.options] python"
        ) from error


class ManiSkillScene:
    """`copies` of a task. An episode depends on its seed alone, whichever copy it runs in.

    The state [16] of a copy: the arm's joints [9] and the pose of its hand, position [3] and quaternion [4].
    """

    def __init__(self, task: str, *, options: SceneOptions, copies: int, physics: Device, render: Device) -> None:
        """Build them, which takes seconds; several only with physics on the GPU.

        Raises UserError for options that ManiSkill refuses and a missing Vulkan driver.
        """
        instruction(task)
        if copies > 1 and task in BUILT_ANEW:
            raise UserError(
                f"{task} randomises sizes of objects and cannot run on a GPU's copies of one scene: use maniskill"
            )
        self._torch: Any = importlib.import_module("torch")
        self.task, self._options, self._copies = task, options, copies
        self._env = _make(task, options, copies, physics=physics, render=render)
        for hidden in self._env._hidden_objects:  # goals: instructions name them, so they must be visible
            hidden.show_visual()
        self._env._hidden_objects.clear()
        self._env._obs_mode = "none"  # steps render nothing
        self._steps = np.zeros(copies, np.int64)
        self._seen: Mapping[str, Any] | None = None

    def reset(self, copy: int, *, init: int) -> None:
        """Begin an episode in one of the copies; the others keep their state."""
        seed = init % _SEEDS
        idle = self._others([copy])
        before = self._env.get_state_dict() if idle else None
        chosen = self._torch.tensor([copy], device=self._env.device)
        options = {"env_idx": chosen} if self._copies > 1 else None
        self._env.reset(
            seed=[seed] * self._copies, options=options
        )  # one seed for all copies: an episode does not depend on the copy's index
        self._put_back(before, idle)
        self._steps[copy] = 0
        self._seen = None

    def step(self, copies: Sequence[int], actions: NDArray[np.float32]) -> list[Stepped]:
        """Execute actions [len(copies), D]; the physics of the other copies is restored."""
        torch, env = self._torch, self._env
        padded = np.zeros((self._copies, actions.shape[1]), np.float32)
        padded[list(copies)] = np.clip(actions, -1, 1)
        idle = self._others(copies)
        before = env.get_state_dict() if idle else None
        _, rewards, terminated, _, info = env.step(torch.as_tensor(padded, device=env.device))
        self._put_back(before, idle)
        self._steps[list(copies)] += 1
        self._seen = None
        rewards, terminated, success = (_array(part) for part in (rewards, terminated, info["success"]))
        return [
            Stepped(
                reward=float(rewards[copy]),
                terminated=bool(terminated[copy]),
                truncated=not terminated[copy] and bool(self._steps[copy] >= self._options.max_steps),
                success=bool(success[copy]),
            )
            for copy in copies
        ]

    def observe(self, copy: int) -> SimObservation:
        """Return the observation of a copy. Images of one moment are rendered once for all copies."""
        seen = self._seen = self._seen or self._render_all()
        images = {name: _array(seen["sensor_data"][name]["rgb"][copy]) for name in self._options.cameras}
        parts = (seen["agent"]["qpos"][copy], seen["extra"]["tcp_pose"][copy])
        return SimObservation(images=images, state=np.concatenate([_array(part) for part in parts]).astype(np.float32))

    def _render_all(self) -> Mapping[str, Any]:
        self._env._obs_mode = "rgb"
        seen = self._env.get_obs()
        self._env._obs_mode = "none"
        return seen

    def close(self) -> None:
        """Release the physics."""
        self._env.close()

    def _others(self, copies: Sequence[int]) -> list[int]:
        return sorted(set(range(self._copies)) - set(copies))

    def _put_back(self, before: Mapping[str, Any] | None, idle: list[int]) -> None:
        """Restore an earlier state of the physics for the idle copies."""
        if before is not None:
            chosen = self._torch.tensor(idle, device=self._env.device)
            bodies = {kind: before[kind] for kind in ("actors", "articulations") if kind in before}
            rows = {kind: {name: state[chosen] for name, state in of.items()} for kind, of in bodies.items()}
            self._env.set_state_dict(rows, chosen)


def _make(task: str, options: SceneOptions, copies: int, *, physics: Device, render: Device) -> Any:
    import_maniskill()
    import gymnasium

    try:
        env = gymnasium.make(
            task,
            num_envs=copies,
            obs_mode="rgb",
            control_mode=options.control,
            reward_mode=options.reward,
            robot_uids=_ROBOTS["hand_camera" in options.cameras],
            sensor_configs={"width": options.image_size, "height": options.image_size},
            sim_backend="physx_cpu" if physics == "cpu" else "physx_cuda",
            render_backend=render,
        )
    except NotImplementedError as error:
        raise UserError(f"simulator maniskill: {task}: {error}") from error
    except RuntimeError as error:
        reason = next((advice for sign, advice in _NO_DEVICE.items() if sign in str(error).lower()), None)
        if reason is None:
            raise
        raise UserError(f"simulator maniskill: {error}: {reason}") from error
    return env.unwrapped


def _array(tensor: Any) -> NDArray[Any]:
    return tensor.cpu().numpy()


class ManiSkill(Worded):
    """Tasks of ManiSkill with physics on the CPU; see Simulator.

    Actions [7] in [-1, 1]: translation of the hand along and rotation about x, y and z, and the gripper (1 opens).
    State [16]: the joints [9], and the hand's position [3] and quaternion [4]. Goals are rendered. Success and
    failure end the episode.
    """

    def __init__(self, *, render: Device = "cpu", **options: Any) -> None:
        """`render`: device of rendering. `options`: of SceneOptions.

        Raises UserError if ManiSkill is not installed, and for invalid options.
        """
        if render not in ("cpu", "gpu"):
            raise UserError(f"simulator maniskill: render is cpu or gpu, not {render!r}")
        self._options = SceneOptions(**options)
        self._render: Device = render
        import_maniskill()
        self._scenes: dict[str, ManiSkillScene] = {}
        self._scene: ManiSkillScene | None = None

    @property
    def spec(self) -> SimSpec:
        return self._options.spec

    @classmethod
    def instruction(cls, task: str) -> str:
        """Return the instruction of a task. Raises UserError for one outside ManiSkill's table-top tasks."""
        return instruction(task)

    def reset(self, task: str, init: int) -> None:
        """Lay out the task with `init`, any integer, as the seed; see Simulator."""
        if task not in self._scenes:
            self._scenes[task] = ManiSkillScene(
                task, options=self._options, copies=1, physics="cpu", render=self._render
            )
        self._scene = self._scenes[task]
        self._scene.reset(0, init=init)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move the arm; see Simulator."""
        assert self._scene is not None, "reset comes first"
        return self._scene.step([0], action[None])[0]

    def observe(self) -> SimObservation:
        """Render the cameras; see Simulator."""
        assert self._scene is not None, "reset comes first"
        return self._scene.observe(0)

    def close(self) -> None:
        """Release all scenes."""
        for scene in self._scenes.values():
            scene.close()


class ManiSkillBatch(BatchSimulator, Worded):
    """One task of ManiSkill in all slots, stepped and rendered together on a GPU; see BatchSimulator and ManiSkill."""

    def __init__(self, *, slots: int, task: str, **options: Any) -> None:
        """`task`: of all slots. `options`: of SceneOptions. Raises UserError as ManiSkill, and without a GPU."""
        self._scene = ManiSkillScene(
            task, options=(scene_options := SceneOptions(**options)), copies=slots, physics="gpu", render="gpu"
        )
        self.spec = scene_options.spec

    @classmethod
    def instruction(cls, task: str) -> str:
        """See ManiSkill."""
        return instruction(task)

    def reset(self, slot: int, *, task: str, init: int) -> None:
        """Begin an episode; see BatchSimulator. Raises UserError for a task other than that of this process."""
        if task != self._scene.task:
            raise UserError(
                f"simulator maniskill_batch was made for {self._scene.task} and cannot play {task}: a GPU steps copies "
                f"of one task; set [data.options] task, or use maniskill"
            )
        self._scene.reset(slot, init=init)

    def step(self, slots: Sequence[int], actions: NDArray[np.float32]) -> list[Stepped]:
        """Move the arms; see BatchSimulator."""
        return self._scene.step(slots, actions)

    def observe(self, slot: int) -> SimObservation:
        """Return the observation of a slot; see BatchSimulator."""
        return self._scene.observe(slot)

    def close(self) -> None:
        """Release the physics."""
        self._scene.close()
