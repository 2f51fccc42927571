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
    """Keyword arguments of the simulator."""
    tasks: tuple[str, ...] = ()
    """Names of the simulator's tasks to train or evaluate on."""
    split: Literal["train", "held_out"] = "train"
    """Initial states: those of training, or "held_out" ones that training never uses."""
    num_inits: int = Field(default=1000, ge=1)
    """Initial states of each task."""
    first_init: int = Field(default=0, ge=0, lt=HELD_OUT)
    """Index of the first initial state."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Instruction by task, in place of the simulator's own."""
    perturb: tuple[Perturbation, ...] = ("none",)
    """Ablations of the policy's input: "swap_instruction" gives the next task's instruction, "grey_images" hides the
    images. Each (task, initial state) is one row per perturbation, with a column `perturb`."""

    demos: str = ""
    """Dataset in LeRobot's format (v2.1 or v3) for imitation learning."""
    episodes: tuple[int, ...] = ()
    """Episodes of the dataset to use; empty for all."""
    cameras: tuple[str, ...] = ()
    """Image columns, in the order of the simulator's cameras; empty for all, in the dataset's order."""
    state_column: str = "observation.state"
    """Column of proprioception."""
    action_column: str = "action"
    """Column of actions."""
    aux_columns: tuple[str, ...] = ()
    """Numeric columns that a model with `aux_dim` learns to predict from the images, such as object positions."""
    cache_bytes: int = Field(default=2_000_000_000, ge=0)
    """Size of the LRU cache of decoded images, in bytes."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if bool(self.simulator) == bool(self.demos):
            raise ValueError("set either simulator (reinforcement learning) or demos (imitation)")
        if self.simulator and not self.tasks:
            raise ValueError("tasks: name at least one task of the simulator")
        if "swap_instruction" in self.perturb and len(self.tasks) < 2:
            raise ValueError('perturb with "swap_instruction" needs two tasks, to swap their instructions')
        return self
