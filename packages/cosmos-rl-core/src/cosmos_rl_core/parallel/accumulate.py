"""Gradients of a step's microbatches, one after another: what a policy without a pipeline does."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.fsdp import FSDPModule

from cosmos_rl_core.interfaces import MicrobatchLoss, Policy
from cosmos_rl_core.types import Microbatch


def accumulate(
    policy: Policy,
    microbatches: Sequence[Microbatch],
    *,
    loss: MicrobatchLoss,
    with_entropy: bool,
    reduce_once: bool = False,
) -> None:
    """Add the gradient of `loss` over each microbatch.

    `reduce_once` leaves the sum over ranks to the last microbatch, where the module is fully sharded.
    """
    module = policy.module
    for index, microbatch in enumerate(microbatches):
        if reduce_once and isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(index == len(microbatches) - 1)
        loss(policy.forward(microbatch, with_entropy=with_entropy), microbatch).backward()
