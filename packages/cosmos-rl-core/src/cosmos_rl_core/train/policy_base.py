"""PolicyBase: the parts of `interfaces.Policy` that most policies implement alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from cosmos_rl_core.interfaces import MicrobatchLoss, Reference
from cosmos_rl_core.parallel.axes.fsdp import reshard
from cosmos_rl_core.parallel.gradients import accumulate
from cosmos_rl_core.parallel.lora import reference_of
from cosmos_rl_core.parallel.offload.swap import tensors_of
from cosmos_rl_core.types import Microbatch, PolicyOutputs

M = TypeVar("M", bound=nn.Module)


class PolicyBase(Reference, ABC, Generic[M]):
    """`interfaces.Policy` over one module: a subclass computes the outputs, names the weights, writes the config."""

    def __init__(self, module: M, *, reduce_once: bool = False) -> None:
        """module: spread over its ranks already. reduce_once: [policy.parallel], see `gradients.accumulate`."""
        self.module = module
        self._reduce_once = reduce_once

    @abstractmethod
    def _outputs(self, microbatch: Microbatch, *, with_entropy: bool) -> PolicyOutputs:
        """The forward pass of one microbatch."""

    def forward(self, microbatch: Microbatch, *, with_entropy: bool = False) -> PolicyOutputs:
        """Return log-probabilities [T] float32 and the policy's other outputs for its terms."""
        outputs = self._outputs(microbatch, with_entropy=with_entropy)
        if not torch.is_grad_enabled():
            reshard(self.module)  # no backward pass follows to do it
        return outputs

    def forward_backward(self, microbatches: Sequence[Microbatch], *, loss: MicrobatchLoss, with_entropy: bool) -> None:
        """Add the gradient of `loss` over each microbatch."""
        accumulate(self, microbatches, loss=loss, with_entropy=with_entropy, reduce_once=self._reduce_once)

    def stepped(self, version: int) -> None:
        """No-op: the policy keeps no average of its weights."""

    def tensors(self) -> Iterable[Tensor]:
        """Parameters and buffers of the module."""
        return tensors_of(self.module)

    def second_copies(self) -> Sequence[nn.Parameter]:
        """Empty: a whole model has its tied matrices once."""
        return ()

    def reference(self) -> Reference | None:
        """The model without its adapters, where adapters are trained; else None: a copy has to be built."""
        return reference_of(self)

    def metrics(self) -> Mapping[str, float]:
        """Empty: no metrics beside those of the loss."""
        return {}

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """Live tensors by checkpoint name, tied ones once."""

    def rollout_weights(self) -> Mapping[str, Tensor]:
        """`weights`: engines sample with the trained ones."""
        return self.weights()

    def before_publish(self) -> None:
        """No-op: live tensors are published."""

    @abstractmethod
    def save_config(self, directory: Path) -> None:
        """Write the files that load the model beside its weights."""
