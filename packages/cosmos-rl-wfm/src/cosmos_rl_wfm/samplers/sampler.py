"""Samples clean latents from noise, and replays the same steps in training.

    noise --step 0--> state --step 1--> ... --step N-1--> clean          sample: no gradient, once per rollout
                       |  trained steps keep the states before and after, and their log-probability
    state, time, next time --velocity--> Gaussian                        replay: with gradient, once per trained step

Both compute a stochastic step with `steps.step` on the same tensors. Before the first update, and in a batch of the
same shape, the ratio of their probabilities is exactly 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor

from cosmos_rl_core.parallel.device import to_device
from cosmos_rl_wfm.samplers import RuleName
from cosmos_rl_wfm.samplers.steps import StateGaussian, step
from cosmos_rl_wfm.samplers.window import WindowChoice


def sample_noise(
    seeds: Sequence[int], shape: Sequence[int], *, stream: str = "start", device: torch.device | None = None
) -> Tensor:
    """Sample standard normal noise float32 [B, *shape], one sample per seed.

    A sample's noise depends neither on the batch nor on other noise. `stream` names its purpose, such as "start" or
    "step 3": streams of one seed are independent. Sampled on the CPU, so that it is the same on every device. A group
    with shared start noise passes one seed for it, and many for its steps.
    """
    noise = [torch.randn(*shape, generator=_generator(seed, stream)) for seed in seeds]
    device = torch.device("cpu") if device is None else device
    return to_device(torch.stack(noise), device) if noise else torch.empty(0, *shape, device=device)


def _generator(seed: int, stream: str) -> torch.Generator:
    digest = blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


Velocity = Callable[[Tensor, Tensor], Tensor]
"""A network with its condition bound: states x [B, ...] and times [B] -> v of x's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingPlan:
    """The N denoising steps of a batch of rollouts, alike for all samples."""

    times: Tensor
    """[N + 1] float32, descending to 0."""
    rule: RuleName = "ode"
    """Rule of stochastic steps."""
    noise_level: float = 0.0
    steps: WindowChoice = field(default_factory=WindowChoice)
    """The stochastic steps, and the trained ones among them; by default none."""
    order: Literal[1, 2] = 1
    """Order of the ODE steps. 2 also uses the previous velocity: as many passes, a smaller error."""

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    @property
    def t_first(self) -> float:
        """The second time: flow_sde divides by 1 - t_first at t = 1."""
        return float(self.times[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingTrajectory:
    """B rollouts, with the states and log-probabilities of their T trained steps."""

    clean: Tensor
    """[B, C, f, h, w] float32: the last state."""
    path: Tensor
    """[B, M, C, f, h, w] float32: the states that trained steps begin or end with, noisiest first."""
    path_from: Tensor
    """[T] int64: row of `path` before each trained step."""
    path_to: Tensor
    """[T] int64: row of `path` after each trained step."""
    times: Tensor
    """[T] float32: time before."""
    next_times: Tensor
    """[T] float32: time after."""
    logprobs: Tensor
    """[B, T] float32: mean over latent elements of the next state's log-density."""


@torch.no_grad()
def sample(velocity: Velocity, noise: Tensor, *, plan: DenoisingPlan, seeds: Sequence[int]) -> DenoisingTrajectory:
    """Take the plan's steps from standard normal `noise` [B, C, f, h, w].

    Noise of steps depends on each sample's seed and the step's index, not on the batch: the caller may split a batch
    that is too large for the memory.
    """
    assert len(seeds) == len(noise), "one seed per sample"
    times = to_device(plan.times, noise.device)
    state = noise.float() * times[0]  # a schedule that begins below 1 leaves out its small clean part
    path, logprobs = dict[int, Tensor](), list[Tensor]()
    history: Tensor | None = None
    for index in range(plan.num_steps):
        t, t_next = (times[i].expand(len(state)) for i in (index, index + 1))
        # A step outside of the window is the ODE's, of second order where the step before it was the ODE's too.
        stochastic = index in plan.steps.stochastic
        rule = plan.rule if stochastic else "ode"
        v = velocity(state, t).float()
        ahead = v if stochastic or history is None else _ahead(v, history, index=index, plan=plan)
        reached = step(rule, state, ahead, t=t, t_next=t_next, t_first=plan.t_first, noise_level=plan.noise_level)
        before, state, history = state, reached.mean, v
        if stochastic:
            state = reached.sample(sample_noise(seeds, state.shape[1:], stream=f"step {index}", device=state.device))
            history = None  # the previous velocity is stale after added noise
        # The state behind a step is the one before the next: neighbours in the window share it.
        if index in plan.steps.trained:
            path |= {index: before, index + 1: state}
            logprobs.append(reached.logprob(state))
    return _trajectory(state, path, logprobs, plan=plan)


def replay(
    velocity: Velocity,
    states: Tensor,
    *,
    times: Tensor,
    next_times: Tensor,
    rule: RuleName,
    noise_level: float,
    t_first: float,
) -> StateGaussian:
    """Return the distribution of the next states, given states [B, C, f, h, w] at times [B], with gradient.

    Its `logprob` at the rollout's next states is the policy's; steps of many rollouts and times may be mixed.
    """
    v = velocity(states, times)
    return step(rule, states, v, t=times, t_next=next_times, t_first=t_first, noise_level=noise_level)


def _ahead(v: Tensor, before: Tensor, *, index: int, plan: DenoisingPlan) -> Tensor:
    """Extrapolate the velocity to the middle of step `index` from this and the previous one (Adams-Bashforth).

    v + dt / 2 (v - v_before) / dt_before. The last step is of first order: it ends on the network's own estimate.
    """
    if plan.order == 1 or index == plan.num_steps - 1:
        return v
    dt_before, dt = plan.times[index - 1 : index + 2].diff().tolist()
    return v + dt / (2 * dt_before) * (v - before)


def _trajectory(
    clean: Tensor, path: Mapping[int, Tensor], logprobs: Sequence[Tensor], *, plan: DenoisingPlan
) -> DenoisingTrajectory:
    """`path`: states by index, in ascending order; the state before step i has index i."""
    row = {state: place for place, state in enumerate(path)}
    trained = list(plan.steps.trained)
    return DenoisingTrajectory(
        clean=clean,
        path=torch.stack(list(path.values()), dim=1) if path else clean[:, None][:, :0],
        path_from=torch.tensor([row[index] for index in trained], dtype=torch.int64),
        path_to=torch.tensor([row[index + 1] for index in trained], dtype=torch.int64),
        times=plan.times[trained],
        next_times=plan.times[[index + 1 for index in trained]],
        logprobs=torch.stack(list(logprobs), dim=1) if logprobs else clean.new_empty(len(clean), 0),
    )
