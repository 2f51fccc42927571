"""A matrix that the first and the last stage of a pipeline both hold: the embedding that is also the head.

Its gradient is the sum of two parts, one from each stage. With the same weights at the start, the same sum, the same
optimizer state and the same learning rate both copies stay the same, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.parallel.mesh import ReplicaMesh


@contextmanager
def tied_gradients(parameters: Sequence[nn.Parameter], *, mesh: ReplicaMesh) -> Iterator[None]:
    """Sum the gradients of `parameters` that both end stages compute inside; earlier gradients are added unsummed.

    with tied_gradients(tied, mesh=mesh):
        pipeline.forward_backward(microbatches, loss=loss, with_entropy=False)

    Args:
        parameters: in the same order and cut in the same way on the ranks of the first and last stage; none on others.
    """
    trained = [p for p in parameters if p.requires_grad]
    before = [p.grad for p in trained]
    for parameter in trained:
        parameter.grad = None
    yield
    if computed := [p for p in trained if p.grad is not None]:  # none on both ends where there was no microbatch
        sum_tied_gradients(computed, mesh=mesh)
    for parameter, gradient in zip(trained, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def sum_tied_gradients(parameters: Sequence[nn.Parameter], *, mesh: ReplicaMesh) -> None:
    """Add the other end's part to the gradient of each parameter, in place; the ranks of both ends call this."""
    axis = mesh.axis("pp")
    assert axis is not None and mesh.stage in (0, axis.size() - 1)
    group, other = axis.get_group(), axis.size() - 1 - mesh.stage
    mine = [_local_gradient(p) for p in parameters]
    theirs = [torch.empty_like(gradient) for gradient in mine]
    exchange = [dist.P2POp(dist.isend, gradient, group=group, group_peer=other) for gradient in mine]
    exchange += [dist.P2POp(dist.irecv, gradient, group=group, group_peer=other) for gradient in theirs]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    for gradient, part in zip(mine, theirs, strict=True):
        gradient.add_(part)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return local_part(gradient)
