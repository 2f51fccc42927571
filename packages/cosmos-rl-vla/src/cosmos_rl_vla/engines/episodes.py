"""Episode requests, and the episodes in an engine's slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.rollout.engine_thread import EngineRequest
from cosmos_rl_core.types import Prompt, Rollout
from cosmos_rl_vla.sampling import VLASampling
from cosmos_rl_vla.trajectory import Trajectory

_SEEDS = 2**63 - 1


@dataclass(eq=False, slots=True, kw_only=True)
class Request(EngineRequest):
    """The episodes of one prompt: the same task from the same initial state."""

    prompt: Prompt
    num_samples: int
    sampling: VLASampling
    seed: int
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    """Finished rollouts by index in the group."""

    @property
    def task(self) -> str:
        return self.prompt.row["task"]

    @property
    def init(self) -> int:
        return self.prompt.row["init"]

    def episodes(self) -> list[Running]:
        """Return the group's episodes, each with a seed of its own."""
        seeds = np.random.SeedSequence(self.seed).generate_state(self.num_samples, np.uint64)
        return [Running(request=self, place=place, seed=int(seed) & _SEEDS) for place, seed in enumerate(seeds)]

    def add(self, place: int, rollout: Rollout) -> None:
        """Add the rollout of an episode; the last one finishes the request."""
        self.rollouts[place] = rollout
        if len(self.rollouts) == self.num_samples:
            self.finish()


@dataclass(eq=False, slots=True, kw_only=True)
class Running:
    """An episode in a slot."""

    request: Request
    place: int
    """Index in its group."""
    seed: int
    """Seed of the policy's sampling."""
    attempt: int = 0
    """Number of times its simulator was lost."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    closing: bool = False
    """The episode was truncated at the step limit; the critic's value of the last state is missing."""

    def again(self) -> Running:
        """Return the episode to begin again after its simulator was lost."""
        return Running(request=self.request, place=self.place, seed=self.seed, attempt=self.attempt + 1)
