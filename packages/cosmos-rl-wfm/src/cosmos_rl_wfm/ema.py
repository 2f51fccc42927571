"""A second set of weights that follows the trained ones (EMA), and forward passes with it.

    follower.follow(version)      after each optimizer step:  held <- d held + (1 - d) trained
    with follower.counting():     the network computes with the held weights
    follower.weights()            for checkpoints and engines, by the names of the trained ones

    old       samples the rollouts; DiffusionNFT contrasts the two (arXiv 2509.16117, section 3.3)
    average   for export and generation, and as the reference of a KL term (its decays are below)

A network with adapters has only these copied; of a sharded network each rank copies its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn

from cosmos_rl_core.interfaces import Policy, Reference
from cosmos_rl_core.types import Microbatch, PolicyOutputs
from cosmos_rl_wfm.models.config import EmaSection
from cosmos_rl_wfm.models.weights import named_weights


class Follower:
    """Holds float32 copies, whatever the dtype of the trained weights: bfloat16 would round 1 - d = 0.001 away."""

    def __init__(self, network: nn.Module, *, decay: Callable[[int], float]) -> None:
        """Follow a network that is already sharded; `decay` maps a version to d after the step to it."""
        self._live = named_weights(network)
        self._decay = decay
        self._counts = False
        """Whether the network holds these weights at present."""

    @cached_property
    def _copies(self) -> dict[str, Tensor]:
        """Made at first use; a policy that only serves as a reference never makes it."""
        return {name: _float32_copy(tensor) for name, tensor in self._live.items()}

    def weights(self) -> Mapping[str, Tensor]:
        """Return the held tensors by checkpoint name; the first call makes them, equal to the trained ones."""
        return self._copies

    def tensors(self) -> Iterable[Tensor]:
        """Return the held tensors, none before they are made."""
        return vars(self).get("_copies", {}).values()

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Move towards the trained weights after the step that made `version`."""
        assert "_copies" in vars(self), "made of the weights before the first step"
        share = 1.0 - self._decay(version)
        for name, tensor in self._live.items():
            if tensor.is_floating_point():
                self._copies[name].lerp_(tensor.float(), share)
            else:
                self._copies[name].copy_(tensor)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Compute with the held weights. They are copied in and out: sharded modules keep their parameters' memory.

        Meanwhile the trained weights must not be read from the network, for example to send them to engines. Nested
        calls do nothing.
        """
        if self._counts:
            yield
            return
        with torch.no_grad():
            trained = {name: tensor.clone() for name, tensor in self._live.items()}
            self._put(self._copies)
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


class FollowerReference(Reference):
    """A policy that computes with a follower's weights: in one forward pass, or in all within `prepared`."""

    def __init__(self, policy: Policy, follower: Follower) -> None:
        self._policy, self._follower = policy, follower

    def prepared(self) -> AbstractContextManager[None]:
        """Put the held weights in place once for many passes."""
        return self._follower.counting()

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """Run the policy's forward pass with the held weights."""
        with self._follower.counting():
            return self._policy.forward(microbatch, with_entropy=with_entropy)


def _float32_copy(tensor: Tensor) -> Tensor:
    """A float32 copy; integers, such as counters among the buffers, keep their dtype."""
    return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)


MAX_WIDTH = 12**-0.5
"""Relative width of the plain mean, gamma = 0; the maximum."""


def average_decay(section: EmaSection) -> Callable[[int], float]:
    """Return the function t -> d_t, t = 1, 2, ..."""
    if section.width is not None:
        exponent = power_gamma(section.width) + 1.0
        return lambda step: (1.0 - 1.0 / step) ** exponent
    assert section.decay is not None, "the config requires decay or width"
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
