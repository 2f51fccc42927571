"""Flow matching, and the log-probabilities that reinforcement learning needs of it (pi-RL, arXiv 2510.25889).

openpi's convention: tau runs from 1 (noise) to 0 (action), x_tau = tau noise + (1 - tau) action, and the network
predicts the velocity v = noise - action. K denoising steps begin at tau_i = 1 - i / K, i = 0 .. K - 1, each 1 / K long.

A step in terms of the action and the noise that follow from x and v, with next = tau - 1 / K:

    action = x - tau v        noise = x + (1 - tau) v        x' ~ N(action (1 - next) + noise w, std^2)

    kind      w                                        std
    ode       next                                     0
    sde       next - sigma^2 / (2 K tau)               sigma / sqrt(K),   sigma = level sqrt(tau / (1 - tau))
    cps       next cos(pi level / 2)                   next sin(pi level / 2)
    learned   next                                     a head of the network, between two bounds
    fixed     next                                     level

At tau = 1 the denominator of sigma takes tau_1 instead. Pure functions of tensors; C stands for the shape of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl_vla.config import ActionNoiseSection


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGaussian:
    """A distribution with independent components."""

    mean: Tensor
    """[B, C]."""
    std: Tensor
    """Of that shape or one that broadcasts to it. A component with std 0 is certain."""

    def logprob(self, x: Tensor) -> Tensor:
        """Return the log-density of each component [B, C]; 0 where the std is 0."""
        certain = self.std == 0
        std = self.std.masked_fill(certain, 1.0)
        density = -((x - self.mean) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2
        return density.masked_fill(certain, 0.0)

    def entropy(self) -> Tensor:
        """Return ln(2 pi e std^2) / 2 of each component [B, C]; 0 where the std is 0."""
        certain = self.std == 0
        entropy = (self.std.masked_fill(certain, 1.0).log() + math.log(2 * math.pi * math.e) / 2).masked_fill(
            certain, 0.0
        )
        return entropy.expand_as(self.mean)

    def whitened(self) -> Tensor:
        """Return mean / std [B, C]; 0 where the std is 0."""
        certain = self.std == 0
        return (self.mean / self.std.masked_fill(certain, 1.0)).masked_fill(certain, 0.0)


def times(index: Tensor, *, num_steps: int) -> Tensor:
    """tau at the beginning of denoising step `index`, float32 of its shape."""
    return 1 - index.to(torch.float32) / num_steps


def mix(actions: Tensor, noise: Tensor, tau: Tensor) -> Tensor:
    """x_tau of chunks [B, C] at tau [B]."""
    tau = _beside(tau, actions)
    return tau * noise + (1 - tau) * actions


def transition(
    x: Tensor,
    velocity: Tensor,
    *,
    index: Tensor,
    num_steps: int,
    noise: ActionNoiseSection,
    level: Tensor | None = None,
    std: Tensor | None = None,
) -> ActionGaussian:
    """The distribution of x after the stochastic step `index` [B] int64 from `x` [B, C].

    Args:
        level: [B] in place of the noise's own.
        std: [B, C] of noise "learned", from the network's head.
    """
    # Every kind has the mean action (1 - next) + noise w: w is how much of the old noise stays, the std how much is
    # sampled anew. Weights and stds are [B, 1, ...], since samples of a batch may be at different steps and levels.
    tau = _beside(times(index, num_steps=num_steps), x)
    after = _beside(times(index + 1, num_steps=num_steps), x)
    amount = torch.full_like(tau, noise.level) if level is None else _beside(level, x)
    if noise.kind == "sde":
        # at tau = 1 the variance has no bound: its denominator is that of the next step
        clean = torch.where(index == 0, times(index + 1, num_steps=num_steps), times(index, num_steps=num_steps))
        variance = amount**2 * tau / (1 - _beside(clean, x))
        return _around(x, velocity, tau, after, after - variance / (2 * num_steps * tau), (variance / num_steps).sqrt())
    if noise.kind == "cps":
        angle = math.pi * amount / 2
        return _around(x, velocity, tau, after, after * angle.cos(), after * angle.sin())
    if noise.kind == "learned":
        assert std is not None
        return _around(x, velocity, tau, after, after, std)
    return _around(x, velocity, tau, after, after, amount)


def ode_step(x: Tensor, velocity: Tensor, *, num_steps: int) -> Tensor:
    """x [B, C] after a step without noise."""
    return x - velocity / num_steps


def bounded_std(raw: Tensor, *, noise: ActionNoiseSection) -> Tensor:
    """Map the head's output to a std between the bounds, evenly in its logarithm."""
    low, high = math.log(noise.std_low), math.log(noise.std_high)
    return (low + (high - low) * (raw.tanh() + 1) / 2).exp()


def supervised_times(uniform: Tensor) -> Tensor:
    """tau ~ 0.999 Beta(1.5, 1) + 0.001 from uniform samples of the same shape (openpi): more often near the noise.

    Beta(1.5, 1) has the distribution function x^1.5.
    """
    return 0.999 * uniform ** (2 / 3) + 0.001


def _around(x: Tensor, velocity: Tensor, tau: Tensor, after: Tensor, weight: Tensor, std: Tensor) -> ActionGaussian:
    action, noise = x - tau * velocity, x + (1 - tau) * velocity
    return ActionGaussian(mean=action * (1 - after) + noise * weight, std=std)


def _beside(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 1))
