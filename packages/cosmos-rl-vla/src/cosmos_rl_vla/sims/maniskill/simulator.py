"""ManiSkill: tasks of a Panda arm on SAPIEN (`pip install mani-skill`), with images and instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import BatchSimulator, Observation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.maniskill.scene import Device, Scene, SceneOptions, import_maniskill
from cosmos_rl_vla.sims.maniskill.tasks import instruction


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
        self._scenes: dict[str, Scene] = {}
        self._scene: Scene | None = None

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
            self._scenes[task] = Scene(task, options=self._options, copies=1, physics="cpu", render=self._render)
        self._scene = self._scenes[task]
        self._scene.reset(0, init=init)

    def step(self, action: NDArray[np.float32]) -> Stepped:
        """Move the arm; see Simulator."""
        assert self._scene is not None, "reset comes first"
        return self._scene.step([0], action[None])[0]

    def observe(self) -> Observation:
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
        self._scene = Scene(task, options=(made := SceneOptions(**options)), copies=slots, physics="gpu", render="gpu")
        self.spec = made.spec

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

    def observe(self, slot: int) -> Observation:
        """Return the observation of a slot; see BatchSimulator."""
        return self._scene.observe(slot)

    def close(self) -> None:
        """Release the physics."""
        self._scene.close()
