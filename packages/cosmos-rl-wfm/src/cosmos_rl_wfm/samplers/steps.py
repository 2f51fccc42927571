"""One denoising step as a Gaussian over the next state, with its log-density and divergence for training.

Let dt = t_next - t < 0, and let the network's velocity v give two estimates:

    clean = x - t v          noise = x + (1 - t) v          score = -noise / t          x = (1 - t) clean + t noise

    ode         mean = x + v dt = (1 - t_next) clean + t_next noise              std = 0
    flow_sde    mean = x + (v + sigma^2 / (2 t) noise) dt                        std = sigma sqrt(-dt)
                with sigma = level sqrt(t / (1 - t))
    dance_sde   the same, with sigma = level
    cps         mean = (1 - t_next) clean + t_next cos(a) noise                  std = t_next sin(a)
                with a = level pi / 2

The two SDEs are Euler-Maruyama steps of dx = (v - sigma^2 score / 2) dt + sigma dw, whose marginals are the ODE's
for any sigma. CPS keeps the proportions of clean and noise of the network's training exact in every step.

Everything is computed in float32, coefficients in float64: bfloat16 cannot hold the difference of two means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl_wfm.samplers import RuleName


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGaussian:
    """The distribution of next states of B samples, with D elements each, independent of one another.

    Log-densities and divergences are *means* over the D elements, not sums, as in FlowGRPO: the scale of a ratio then
    does not depend on resolution, and clip ranges are small (1e-4 to 1e-5).
    """

    mean: Tensor
    """[B, ...] float32, with the velocity's gradient."""
    std: Tensor
    """[B] float32, the same for every element of a sample; 0 for a step of the ODE."""

    def sample(self, noise: Tensor) -> Tensor:
        """Return the next state [B, ...] for standard normal `noise` of that shape."""
        return self.mean + spread(self.std, self.mean) * noise

    def logprob(self, next_state: Tensor) -> Tensor:
        """Return [B]: mean over elements of log N(next_state; mean, std^2), with gradient. `std` must be above 0."""
        distance = (next_state.float() - self.mean) / spread(self.std, self.mean)
        constant = (self.std.double().log() + 0.5 * math.log(2 * math.pi)).float()
        return -0.5 * distance.square().flatten(1).mean(1) - constant

    def whitened(self) -> Tensor:
        """Return w [B, D] = mean / (std sqrt(D)), with gradient.

        Between Gaussians a and b of equal std, |w_a - w_b|^2 / 2 = KL(a || b) = KL(b || a), as a mean over elements.
        """
        flat = self.mean.flatten(1)
        return flat / (self.std[:, None] * math.sqrt(flat.shape[1]))


def step(
    rule: RuleName,
    x: Tensor,
    v: Tensor,
    *,
    t: Tensor,
    t_next: Tensor,
    t_first: float,
    noise_level: float,
) -> StateGaussian:
    """Return the distribution of the state at `t_next` [B], given state x [B, ...] and velocity v at times t [B].

    `t_first` is the second time of the rollout's schedule: flow_sde divides by 1 - t_first where t is 1.
    `noise_level` is FlowGRPO's a (0.7), DanceGRPO's eta (0.25 to 0.3), or that of CPS, from 0 (none) to 1 (all noise
    is sampled again).

    Sources: flow_sde FlowGRPO's update rule (arXiv 2505.05470, section 4.2); dance_sde DanceGRPO's reverse SDE with
    epsilon_t = eta (arXiv 2505.07818, section 3); cps Coefficients-Preserving Sampling (arXiv 2509.05952).

    Raises:
        ValueError: unknown rule, or a noise level out of its range.
    """
    if rule not in RULES:
        raise ValueError(f"unknown rule of denoising steps {rule!r}; there are {', '.join(map(repr, RULES))}")
    if rule != "ode" and not 0 < noise_level <= (1.0 if rule == "cps" else math.inf):
        raise ValueError(f"{rule} does not accept noise_level = {noise_level}; use a value above 0 (cps: at most 1)")
    # A rule is linear in state and velocity: its coefficients, one a sample, are computed in float64, where differences
    # of times near 1 cancel, and applied to the elements in float32.
    times = _Times(now=t.double(), then=t_next.double(), first=t_first)
    on_x, on_v, std = RULES[rule](times, noise_level)
    mean = spread(on_x.float(), x) * x.float() + spread(on_v.float(), x) * v.float()
    return StateGaussian(mean=mean, std=std.float())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Times of a step, float64 [B]."""

    now: Tensor
    then: Tensor
    first: float


def _ode(times: _Times, _: float) -> tuple[Tensor, Tensor, Tensor]:
    step = times.then - times.now
    return torch.ones_like(step), step, torch.zeros_like(step)


def _flow_sde(times: _Times, level: float) -> tuple[Tensor, Tensor, Tensor]:
    below_one = torch.where(times.now == 1, times.first, times.now)
    return _sde(times, level * (times.now / (1 - below_one)).sqrt())


def _dance_sde(times: _Times, level: float) -> tuple[Tensor, Tensor, Tensor]:
    return _sde(times, torch.full_like(times.now, level))


def _sde(times: _Times, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x + (v + c (x + (1 - t) v)) dt = (1 + c dt) x + (1 + c (1 - t)) dt v with c = sigma^2 / (2 t)."""
    step = times.then - times.now
    pull = sigma.square() / (2 * times.now)
    return 1 + pull * step, (1 + pull * (1 - times.now)) * step, sigma * (-step).sqrt()


def _cps(times: _Times, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """(1 - u) (x - t v) + k (x + (1 - t) v) = (1 - u + k) x + (k (1 - t) - (1 - u) t) v with u = t_next, k = u cos."""
    kept = times.then * math.cos(level * math.pi / 2)
    on_x = 1 - times.then + kept
    on_v = kept * (1 - times.now) - (1 - times.then) * times.now
    return on_x, on_v, times.then * math.sin(level * math.pi / 2)


RULES: Mapping[RuleName, Callable[[_Times, float], tuple[Tensor, Tensor, Tensor]]] = {
    "flow_sde": _flow_sde,
    "dance_sde": _dance_sde,
    "cps": _cps,
    "ode": _ode,
}
"""Times and noise level -> coefficients of x and of v in the mean, and std; float64 [B]."""


def spread(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...], to go with `like` [B, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))
