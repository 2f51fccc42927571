"""Requests of an engine, and batches of samples of several requests.

head of the queue  --> its plan of steps, as many of its samples as fit
those behind it    --> join where their plan has the same steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cosmos_rl_core.rollout.engine_thread import EngineRequest
from cosmos_rl_core.types import Prompt, Rollout
from cosmos_rl_wfm.models.base import Condition
from cosmos_rl_wfm.samplers.sampler import Plan
from cosmos_rl_wfm.sampling import FlowSampling

_SEEDS = 2**63 - 1


@dataclass(eq=False, slots=True, kw_only=True)
class Request(EngineRequest):
    """Samples for one prompt."""

    prompt: Prompt
    num_samples: int
    sampling: FlowSampling
    seed: int
    condition: Condition | None = None
    """[1]; None until it is made."""
    rollouts: list[Rollout] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        """A seed per sample: its noise does not depend on the batch."""
        state = np.random.SeedSequence(self.seed).generate_state(self.num_samples, np.uint64)
        return [int(seed) & _SEEDS for seed in state]

    @property
    def starts(self) -> list[int]:
        """Seeds of the samples' starting noise."""
        seeds = self.seeds
        return seeds[:1] * self.num_samples if self.sampling.same_noise else seeds

    @property
    def left(self) -> int:
        """Samples that are not made yet."""
        return self.num_samples - len(self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples that are denoised together."""

    parts: tuple[tuple[Request, int], ...]
    """Requests, each with the number of its samples in the batch."""
    plan: Plan
    sampling: FlowSampling

    @property
    def seeds(self) -> list[int]:
        return [seed for request, count in self.parts for seed in request.seeds[len(request.rollouts) :][:count]]

    @property
    def starts(self) -> list[int]:
        return [seed for request, count in self.parts for seed in request.starts[len(request.rollouts) :][:count]]

    @property
    def is_cancelled(self) -> bool:
        """Whether every request of it was cancelled."""
        return all(request.done.cancelled() for request, _ in self.parts)


def next_batch(waiting: Sequence[Request], room: int, *, shift: float, version: int) -> Batch:
    """Return up to `room` samples of `waiting`, in order, that take the same steps as those of the first request.

    A request that the batch does not complete stays in the queue.
    """
    head = waiting[0]
    plan = head.sampling.plan(shift=shift, version=version, seed=head.seed)
    parts: list[tuple[Request, int]] = []
    for request in waiting:
        if room and request.sampling == head.sampling:
            own = request.sampling.plan(shift=shift, version=version, seed=request.seed)
            if own.steps == plan.steps:
                parts.append((request, min(room, request.left)))
                room -= parts[-1][1]
    return Batch(parts=tuple(parts), plan=plan, sampling=head.sampling)
