"""The [data] section of a robot recipe: tasks in a simulator, or demonstrations. Free of torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from cosmos_rl_core.settings.base import Strict
from cosmos_rl_vla.sims.base import HELD_OUT

Perturbation = Literal["none", "swap_instruction", "grey_images"]


class VLADataConfig(Strict):
    """[data]: either `simulator` with `tasks`, or `demos`."""

    simulator: str = ""
    """"metaworld", "gymnasium", "reach", one of an installed plug-in, or "module:attribute"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the simulator as they are."""
    tasks: tuple[str, ...] = ()
    """The simulator's tasks to train or evaluate on."""
    split: Literal["train", "held_out"] = "train"
    """Which initial states: those of training, or others that training never sees."""
    num_inits: int = Field(default=1000, ge=1)
    """Initial states of each task."""
    first_init: int = Field(default=0, ge=0, lt=HELD_OUT)
    """The first of them."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """What to tell the policy for a task, instead of the simulator's own words."""
    perturb: tuple[Perturbation, ...] = ("none",)
    """Take from the policy what it ought to need: "swap_instruction" tells it the next task's, "grey_images" hides
    the pictures. Every task from every initial state is a row for each of these, with a column `perturb`."""

    demos: str = ""
    """A dataset in LeRobot's format (v2.1 or v3) to learn from by imitation."""
    episodes: tuple[int, ...] = ()
    """Only these of its episodes; without it all."""
    cameras: tuple[str, ...] = ()
    """Its columns of pictures, in the order in which the simulator has its cameras; without it all, as they stand."""
    state_column: str = "observation.state"
    """Its column of proprioception."""
    action_column: str = "action"
    """Its column of actions."""
    aux_columns: tuple[str, ...] = ()
    """Columns of numbers that a model with `aux_dim` learns to read off the pictures, such as objects' places."""
    cache_bytes: int = Field(default=2_000_000_000, ge=0)
    """Memory for decoded pictures; what was used least recently makes room."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.simulator) == bool(self.demos):
            raise ValueError("set either simulator, to act in one, or demos, to learn from demonstrations")
        if self.simulator and not self.tasks:
            raise ValueError("tasks: name at least one of the simulator's")
        if "swap_instruction" in self.perturb and len(self.tasks) < 2:
            raise ValueError('perturb with "swap_instruction" needs two tasks, to tell the instruction of the other')
        return self
