"""An average of the trained weights over the steps, which evaluation may use in place of the weights themselves.

    average.update(step)      after each optimizer step t = 1, 2, ...:   a <- d_t a + (1 - d_t) w
    with average.swapped():   the network has the averages inside

Constant: d_t = decay. Power function: d_t = (1 - 1 / t) ^ (gamma + 1), which weighs step i by i ^ gamma; its width is a
fraction s of the run so far, from which gamma follows by s^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)).
Source: Karras et al., arXiv:2312.02696, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MAX_WIDTH = 12**-0.5
"""Relative width of the plain mean, gamma = 0: the widest there is."""


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


class WeightAverage:
    """Averages of a network's trained parameters, held as float32 tensors by name on the parameters' own devices."""

    def __init__(self, network: nn.Module, *, decay: float | None = None, width: float | None = None) -> None:
        """Begin at the weights as they are.

        Args:
            decay: constant decay in [0, 1).
            width: relative width of the power function instead, 0.1 in Cosmos-Predict2.5's training.

        Raises ValueError for both, neither, or one out of its range.
        """
        if (decay is None) == (width is None):
            raise ValueError("an average of weights takes either decay or width")
        if decay is not None and not 0.0 <= decay < 1.0:
            raise ValueError(f"the decay of an average is at least 0 and below 1, not {decay}")
        self._decay = decay
        self._exponent = 0.0 if width is None else power_gamma(width) + 1.0
        self._trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
        self._held = {name: weight.detach().float().clone() for name, weight in self._trained.items()}
        self._stored: dict[str, Tensor] | None = None

    def decay(self, step: int) -> float:
        """Return d_t of step t = 1, 2, ..."""
        assert step >= 1, f"steps are counted from 1, not {step}"
        return self._decay if self._decay is not None else (1.0 - 1.0 / step) ** self._exponent

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step t."""
        assert self._stored is None, "the network has the averages themselves now"
        share = 1.0 - self.decay(step)
        for name, weight in self._trained.items():
            self._held[name].lerp_(weight.detach().float(), share)

    @torch.no_grad()
    def store(self) -> None:
        """Put the weights aside and give the network the averages."""
        assert self._stored is None, "the weights are stored already"
        self._stored = {name: weight.detach().clone() for name, weight in self._trained.items()}
        for name, weight in self._trained.items():
            weight.copy_(self._held[name])

    @torch.no_grad()
    def restore(self) -> None:
        """Give the network its own weights back."""
        assert self._stored is not None, "no weights are stored"
        for name, weight in self._trained.items():
            weight.copy_(self._stored[name])
        self._stored = None

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Run the network with the averages inside."""
        self.store()
        try:
            yield
        finally:
            self.restore()

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by the parameters' names: what a checkpoint keeps."""
        return dict(self._held)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's averages. Raises ValueError for other names than this network's."""
        if differing := sorted(set(tensors) ^ set(self._held)):
            raise ValueError(f"the averages are those of another network: {', '.join(differing[:5])}")
        for name, tensor in tensors.items():
            self._held[name].copy_(tensor)
