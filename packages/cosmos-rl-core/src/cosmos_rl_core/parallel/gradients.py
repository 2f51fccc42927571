"""Gradients: summed over the microbatches of a step, and clipped by their joint norm over all ranks.

    norm^2 = sum over ranks, parameters of |local part|^2 / copies of that part

A part's copies are the ranks that hold the same box: those along mesh axes where the parameter is replicated, and those
of its stage that its mesh leaves out. Dividing by them makes one sum over all ranks right for any mixture of meshes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from cosmos_rl_core.interfaces import MicrobatchLoss, Policy
from cosmos_rl_core.parallel.dtensor import local_part
from cosmos_rl_core.types import Microbatch


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    *,
    max_norm: float,
    num_stages: int = 1,
    device: torch.device | None = None,
    elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm` (0: only measure).

    Returns the norm before, a float32 scalar on the gradients' device, without waiting for the device. Gradients whose
    norm is not finite stay unchanged. All ranks of a replica call this together and get the same norm.

    Args:
        num_stages: of the pipeline: a parameter is on the ranks of one stage.
        device: of the mesh, on which all ranks add their sums, also those without gradients; None for one rank.
        elsewhere: parameters that another stage counts, such as the second copy of a tied matrix.
    """
    trained = [p for p in parameters if p.grad is not None]
    skipped = {id(p) for p in elsewhere}
    distributed = device is not None or num_stages > 1 or any(isinstance(p, DTensor) for p in trained)
    counted = [p.grad for p in trained if p.grad is not None and id(p) not in skipped]
    norm = _norm_over_ranks(counted, num_stages=num_stages, device=device) if distributed else get_total_norm(counted)
    if max_norm > 0:
        _scale([p.grad for p in trained if p.grad is not None], max_norm, norm)
    return norm


def _norm_over_ranks(gradients: Sequence[Tensor], *, num_stages: int, device: torch.device | None) -> Tensor:
    # A gradient that is cut into n boxes is on each of the stage's ranks, stage_size / n times the same box. All boxes
    # with as many copies share one norm, which the sum over ranks then counts that often.
    stage_size = dist.get_world_size() // num_stages
    parts: defaultdict[float, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        local = local_part(gradient)
        parts[stage_size / num_shards(gradient)].append(local)
        device = local.device if device is None else device
    squares = [get_total_norm(tensors).double().square() / copies for copies, tensors in parts.items()]
    # A rank without gradients, such as one whose stage is frozen, has to take part in the sum.
    none = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack([s.to(device) for s in squares]).sum() if squares else none
    dist.all_reduce(total)
    return total.sqrt().float()


def num_shards(tensor: Tensor) -> int:
    """Return the number of boxes that a tensor is cut into; 1 for a plain one."""
    if not isinstance(tensor, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in tensor.placements), "a gradient was not reduced"
    sizes = zip(tensor.placements, tensor.device_mesh.shape)
    return math.prod(size for placement, size in sizes if placement.is_shard())


def _scale(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).where(norm.isfinite(), 1.0)
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        local = local_part(gradient)
        by_device[local.device].append(local)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))


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
