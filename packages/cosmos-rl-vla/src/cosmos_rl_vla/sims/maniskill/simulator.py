"""ManiSkill: tasks of a Panda arm on SAPIEN (`pip install mani-skill`), with pixels and words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cosmos_rl_core.errors import UserError
from cosmos_rl_vla.sims.base import BatchSimulator, Observation, SimSpec, Stepped, Worded
from cosmos_rl_vla.sims.maniskill.scene import Device, Look, Scene, import_maniskill
from cosmos_rl_vla.sims.maniskill.tasks import instruction


class ManiSkill(Worded):
    """Tasks of ManiSkill with physics on the processor; see Simulator.

    Actions [7] in [-1, 1]: how far the hand moves along and turns about x, y and z, and the gripper (1 opens).
    State [16]: the joints [9], and the hand's place [3] and quaternion [4]. Goals are drawn. Success and
    failure end the episode.
    """

    def __init__(self, *, render: Device = "cpu", **look: Any) -> None:
        """Draw with `render`. `look`: see Look. Raises UserError where ManiSkill is not installed, and as Look does."""
        if render not in ("cpu", "gpu"):
            raise UserError(f"simulator maniskill: render is cpu or gpu, not {render!r}")
        self._look = Look(**look)
        self._render: Device = render
        import_maniskill()
        self._scenes: dict[str, Scene] = {}
        self._scene: Scene | None = None

    @property
    def spec(self) -> SimSpec:
        return self._look.spec

    @classmethod
    def instruction(cls, task: str) -> str:
        """Return what to do. Raises UserError for a task that is not among those of ManiSkill on a table."""
        return instruction(task)

    def reset(self, task: str, init: int) -> None:
        """Lay out the task as `init`, any integer, decides; see Simulator."""
        if task not in self._scenes:
            self._scenes[task] = Scene(task, look=self._look, copies=1, physics="cpu", render=self._render)
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
        """Give all scenes back."""
        for scene in self._scenes.values():
            scene.close()


class ManiSkillBatch(BatchSimulator, Worded):
    """One task of ManiSkill in all slots, stepped and drawn by a GPU together; see BatchSimulator and ManiSkill."""

    def __init__(self, *, slots: int, task: str, **look: Any) -> None:
        """`task`: the one that is played. `look`: see Look. Raises UserError as ManiSkill does, and without a GPU."""
        self._scene = Scene(task, look=(made := Look(**look)), copies=slots, physics="gpu", render="gpu")
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
        """Return what a slot shows; see BatchSimulator."""
        return self._scene.observe(slot)

    def close(self) -> None:
        """Give the physics back."""
        self._scene.close()
