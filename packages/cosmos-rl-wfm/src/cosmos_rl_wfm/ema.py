"""A second set of weights that follows the trained ones, and how to compute with it.

    follower.follow(version)      after each optimizer step:  held <- d held + (1 - d) trained
    with follower.counting():     the network computes with the held weights inside
    follower.weights()            what a checkpoint keeps, and engines are sent, by the names of the trained ones

    old       draws the rollouts, and DiffusionNFT contrasts the two (arXiv 2509.16117, section 3.3)
    average   is exported and generated with, and may be the reference of a KL term (its decays are below)

Of a network with adapters these alone are held; of one that is spread over ranks, each rank's own parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from cosmos_rl_core.interfaces import Policy
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_wfm.models.config import EmaSection
from cosmos_rl_wfm.models.weights import named_weights


class Follower:
    """Holds float32 copies, whatever the type of the trained weights: in bfloat16 1 - d = 0.001 would be lost."""

    def __init__(self, network: nn.Module, *, decay: Callable[[int], float]) -> None:
        """Follow a network that is spread over its ranks already; `decay` gives d after the step to a version."""
        self._live = named_weights(network)
        self._decay = decay
        self._counts = False
        """Whether the network computes with the held weights."""

    @cached_property
    def _held(self) -> dict[str, Tensor]:
        """Made when it is first asked for: of a policy that is but a reference, never."""
        return {name: _held_in_float32(tensor) for name, tensor in self._live.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the held tensors by checkpoint name; the first call makes them, equal to the trained ones."""
        return self._held

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Move towards the trained weights after the step that made `version`."""
        assert "_held" in vars(self), "made of the weights before the first step"
        share = 1.0 - self._decay(version)
        for name, tensor in self._live.items():
            if tensor.is_floating_point():
                self._held[name].lerp_(tensor.float(), share)
            else:
                self._held[name].copy_(tensor)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Compute with the held weights, copied in and out: sharded modules hold on to their parameters' memory.

        Meanwhile nobody may read the network's own weights, such as engines that are sent them. Inside of itself it
        does nothing.
        """
        if self._counts:
            yield
            return
        with torch.no_grad():
            trained = {name: tensor.clone() for name, tensor in self._live.items()}
            self._put(self._held)
        self._counts = True
        try:
            yield
        finally:
            self._counts = False
            with torch.no_grad():
                self._put(trained)

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._live.items():
            tensor.copy_(weights[name])


class FollowerReference:
    """A policy with a follower's weights inside: for one forward pass, or for all inside of `prepared`.

    Implements `interfaces.Reference` and `interfaces.Prepares`.
    """

    def __init__(self, policy: Policy, follower: Follower) -> None:
        self._policy, self._follower = policy, follower

    def prepared(self) -> AbstractContextManager[None]:
        """Put the held weights in place once for many passes."""
        return self._follower.counting()

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """As the policy's, with the held weights."""
        with self._follower.counting():
            return self._policy.forward(microbatch, with_entropy=with_entropy)


def _held_in_float32(tensor: Tensor) -> Tensor:
    """A copy; of integers, such as counters among the buffers, in their own type."""
    return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


MAX_WIDTH = 12**-0.5
"""Relative width of the plain mean, gamma = 0: the widest there is."""


def average_decay(section: EmaSection) -> Callable[[int], float]:
    """Return what gives d_t for t = 1, 2, ..."""
    if section.width is not None:
        exponent = power_gamma(section.width) + 1.0
        return lambda step: (1.0 - 1.0 / step) ** exponent
    assert section.decay is not None, "the config wants decay or width"
    most, power = section.decay, section.warmup_power
    if power is None:
        return lambda step: most
    return lambda step: min(most, 1.0 - step**-power)


def power_gamma(width: float) -> float:
    """Return the gamma >= 0 whose power function has the relative width s. Raises ValueError outside (0, 0.288]."""
    if not 0.0 < width <= MAX_WIDTH:
        raise ValueError(f"an average's relative width is above 0 and at most {MAX_WIDTH:.3f}, not {width}")
    low, high = 0.0, 2.0 / width  # the width falls with gamma, and is below 1 / (gamma + 2) there
    for _ in range(200):
        middle = (low + high) / 2
        too_wide = (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > width**2
        low, high = (middle, high) if too_wide else (low, middle)
    return (low + high) / 2
