"""The rollout engine: denoises samples of the waiting prompts in batches, in the engine's thread.

    generate(prompt) -- condition, noise --> steps of the sampler --> clean latents --> decoded video
                                               ^ posts are taken before each: weights may change between steps

A batch has as many samples of the first request as fit; requests behind it join where their plan has the same steps.
Each term records the weight version that sampled it. The thread is `rollout/engine_thread.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from cosmos_rl_core.errors import SampleError
from cosmos_rl_core.parallel.offload.swap import Swap
from cosmos_rl_core.rollout.engine_thread import EngineRequest, ThreadedEngine
from cosmos_rl_core.types import Prompt, Rollout
from cosmos_rl_wfm.conditions import Conditions, arrays_of, joined
from cosmos_rl_wfm.models.base import ClipSize, Condition
from cosmos_rl_wfm.models.weights import named_weights
from cosmos_rl_wfm.policy import GuidedVelocity
from cosmos_rl_wfm.samplers.sampler import DenoisingPlan, DenoisingTrajectory, sample, sample_noise
from cosmos_rl_wfm.samplers.times import sample_times
from cosmos_rl_wfm.sampling import FlowSampling, WFMTorchOptions

if TYPE_CHECKING:
    from torch import Tensor

    from cosmos_rl_wfm.models.model import DiffusersModel
    from cosmos_rl_wfm.samplers.sampler import Velocity


_SEEDS = 2**63 - 1


@dataclass(eq=False, slots=True, kw_only=True)
class ClipRequest(EngineRequest):
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
class DenoisingBatch:
    """Samples that are denoised together."""

    parts: tuple[tuple[ClipRequest, int], ...]
    """Requests, each with the number of its samples in the batch."""
    plan: DenoisingPlan
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


def next_batch(waiting: Sequence[ClipRequest], room: int, *, shift: float, version: int) -> DenoisingBatch:
    """Return up to `room` samples of `waiting`, in order, that take the same steps as those of the first request.

    A request that the batch does not complete stays in the queue.
    """
    head = waiting[0]
    plan = head.sampling.plan(shift=shift, version=version, seed=head.seed)
    parts: list[tuple[ClipRequest, int]] = []
    for request in waiting:
        if room and request.sampling == head.sampling:
            own = request.sampling.plan(shift=shift, version=version, seed=request.seed)
            if own.steps == plan.steps:
                parts.append((request, min(room, request.left)))
                room -= parts[-1][1]
    return DenoisingBatch(parts=tuple(parts), plan=plan, sampling=head.sampling)


class _Cancelled(Exception):
    """Every request of the batch was cancelled."""


class FlowEngine(ThreadedEngine[ClipRequest]):
    """Implements `interfaces.Sleeps` over a model of diffusers."""

    def __init__(
        self, model: DiffusersModel, *, size: ClipSize, conditions: Conditions, options: WFMTorchOptions
    ) -> None:
        """conditions: makes the condition of a row from embedded captions and given frames."""
        super().__init__("denoise")
        self._model, self._size = model, size
        self._shift = model.traits.shift
        self._conditions = conditions
        self._at_once = options.samples_at_once
        self._swap = Swap(model.tensors)

    def weights(self) -> Mapping[str, Tensor]:
        return named_weights(self._model.network)

    async def sleep(self) -> None:
        """Move network, codec and encoders to the host's memory."""
        await self._call(self._swap.out)

    async def wake(self) -> None:
        await self._call(self._swap.back)

    async def generate(
        self, prompt: Prompt, *, num_samples: int, sampling: FlowSampling, seed: int
    ) -> tuple[str, list[Rollout]]:
        request = ClipRequest(prompt=prompt, num_samples=num_samples, sampling=sampling, seed=seed)
        await self._ask(request)
        return prompt.row["caption"], request.rollouts

    def _is_busy(self) -> bool:
        return False

    def _work(self) -> None:
        """Denoise one batch of the queue; a cancelled one is dropped."""
        if not self._waiting:
            return
        batch = next_batch(self._waiting, self._at_once, shift=self._shift, version=self._version)
        with suppress(_Cancelled):
            self._sample(batch)

    def _sample(self, batch: DenoisingBatch) -> None:
        """Denoise a batch and finish the requests that it completes."""
        batch = replace(batch, parts=tuple(part for part in batch.parts if self._has_condition(part[0])))
        if not batch.parts:
            return
        rollouts = self._denoise(batch)
        for request, count in batch.parts:
            request.rollouts += rollouts[:count]
            del rollouts[:count]
            if not request.left and request.condition is not None:
                first = request.rollouts[0]
                request.rollouts[0] = replace(first, arrays={**first.arrays, **arrays_of(request.condition)})
                request.finish()

    def _has_condition(self, request: ClipRequest) -> bool:
        """Make a request's condition; an invalid row fails only its own request."""
        if request.condition is None:
            try:
                request.condition = self._conditions.of(request.prompt)
            except SampleError as error:
                request.fail(error)
                return False
        return True

    def _denoise(self, batch: DenoisingBatch) -> list[Rollout]:
        device = next(self._model.network.parameters()).device
        conditions = [(request.condition, count) for request, count in batch.parts if request.condition is not None]
        condition = joined([one for one, _ in conditions], [count for _, count in conditions]).to(device)
        sampling, plan, seeds = batch.sampling, batch.plan, batch.seeds
        without = None if sampling.guidance is None else self._conditions.unconditional.to(device)
        inner = GuidedVelocity.of(self._model, condition, without, guidance=sampling.guidance)
        versions: list[int] = []
        noise = sample_noise(batch.starts, self._model.latent_shape(self._size), device=device)
        trajectory = sample(partial(self._step, inner, versions, batch), noise, plan=plan, seeds=seeds)
        video = self._model.decode(trajectory.clean).cpu().numpy()
        terms = np.array(versions, np.int32)
        if sampling.trains_steps:
            return _of_steps(trajectory, video, terms[list(plan.steps.trained)])
        return _of_clean(trajectory, video, int(terms.min()), seeds, sampling, shift=self._shift)

    def _step(self, velocity: Velocity, versions: list[int], batch: DenoisingBatch, x: Tensor, times: Tensor) -> Tensor:
        if not self._take_posts() or batch.is_cancelled:
            raise _Cancelled
        versions.append(self._version)
        self._progress += 1
        return velocity(x, times)


def _of_steps(trajectory: DenoisingTrajectory, video: np.ndarray, versions: np.ndarray) -> list[Rollout]:
    shared = {
        "path_from": trajectory.path_from.numpy().astype(np.int32),
        "path_to": trajectory.path_to.numpy().astype(np.int32),
        "times": trajectory.times.numpy(),
        "next_times": trajectory.next_times.numpy(),
    }
    paths, logprobs = trajectory.path.cpu().numpy(), trajectory.logprobs.cpu().numpy()
    return [
        Rollout(
            arrays={"path": paths[i], **shared},
            rollout_logprobs=logprobs[i],
            versions=versions,
            loss_mask=np.ones(len(versions), bool),
            media={"video": video[i]},
        )
        for i in range(len(video))
    ]


def _of_clean(
    trajectory: DenoisingTrajectory,
    video: np.ndarray,
    version: int,
    seeds: Sequence[int],
    sampling: FlowSampling,
    *,
    shift: float,
) -> list[Rollout]:
    clean, count = trajectory.clean.cpu().numpy(), sampling.times_per_rollout
    rollouts = []
    for i, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        times = sample_times(count, generator=generator, density=sampling.density, shift=shift)
        noise_seeds = torch.randint(2**63 - 1, (count,), generator=generator)
        rollouts.append(
            Rollout(
                arrays={"clean": clean[i], "times": times.numpy(), "noise_seeds": noise_seeds.numpy()},
                rollout_logprobs=np.zeros(count, np.float32),
                versions=np.full(count, version, np.int32),
                loss_mask=np.ones(count, bool),
                media={"video": video[i]},
            )
        )
    return rollouts
