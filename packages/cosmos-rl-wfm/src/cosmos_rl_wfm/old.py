"""A second copy of the trained weights that follows them: it draws the rollouts, and DiffusionNFT contrasts the two.

    old.follow(version)        after each optimizer step:  old <- d old + (1 - d) new
    with old.counting():       the network computes with the old weights inside
    old.weights()              what engines are sent, by the names of the trained ones

Source: DiffusionNFT (arXiv 2509.16117, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from cosmos_rl_core.parallel.lora import adapter_weights, counting
from cosmos_rl_wfm.models import adapters
from cosmos_rl_wfm.models.weights import named_weights
from cosmos_rl_wfm.objectives.formulas import OLD_WEIGHT_DECAYS
from cosmos_rl_wfm.sampling import OldDecay

OLD = "old."
"""What the names of old weights begin with in a checkpoint."""


class OldWeights(Protocol):
    """Either of the two below."""

    def follow(self, version: int) -> None:
        """Move towards the trained weights after the step that made `version`."""
        ...

    def counting(self) -> AbstractContextManager[None]:
        """Compute with the old weights inside."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Live tensors by checkpoint name."""
        ...


def old_weights(network: nn.Module, decay: OldDecay) -> OldWeights:
    """Make the copy. A network with adapters needs its second pair before it is sharded (`adapters.add_old`)."""
    at = OLD_WEIGHT_DECAYS[decay].at
    return OldAdapters(network, at) if adapter_weights(network) else OldCopy(network, at)


class OldAdapters:
    """The second pair of adapters."""

    def __init__(self, network: nn.Module, decay: Callable[[int], float]) -> None:
        self._network, self._decay = network, decay

    def follow(self, version: int) -> None:
        adapters.follow(self._network, decay=self._decay(version))

    def counting(self) -> AbstractContextManager[None]:
        return counting(self._network, "old")

    def weights(self) -> dict[str, Tensor]:
        return adapter_weights(self._network, "old")


class OldCopy:
    """A copy of all weights."""

    def __init__(self, network: nn.Module, decay: Callable[[int], float]) -> None:
        self._decay = decay
        self._live = named_weights(network)
        self._held = {name: tensor.clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def follow(self, version: int) -> None:
        share = 1.0 - self._decay(version)
        for name, tensor in self._live.items():
            if tensor.is_floating_point():
                self._held[name].lerp_(tensor, share)
            else:
                self._held[name].copy_(tensor)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Copied in and out: sharded modules hold on to the memory of their parameters."""
        with torch.no_grad():
            stored = {name: tensor.clone() for name, tensor in self._live.items()}
            self._put(self._held)
        try:
            yield
        finally:
            with torch.no_grad():
                self._put(stored)

    def weights(self) -> dict[str, Tensor]:
        return self._held

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._live.items():
            tensor.copy_(weights[name])
