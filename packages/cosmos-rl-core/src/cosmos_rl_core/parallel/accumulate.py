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

    Where the module is fully sharded, whole copies (dp_replicate) exchange sums in the last microbatch alone;
    `reduce_once` leaves the sum over shards to it too.
    """
    module = policy.module
    for index, microbatch in enumerate(microbatches):
        if isinstance(module, FSDPModule):
            last = index == len(microbatches) - 1
            module.set_requires_gradient_sync(last or not reduce_once)
            module.set_requires_all_reduce(last)  # the call before sets both
        loss(policy.forward(microbatch, with_entropy=with_entropy), microbatch).backward()
