"""Fully sharded data parallelism through torch's `fully_shard`, so that gradients come out as sums.

    root      [ embedding, norm, head, ... ]   gathered for the whole pass: used first in it and last
      block   [ a decoder layer ]              gathered for its own forward and backward
        experts   on a mesh of their own where they are spread over ranks already

Every trained parameter is a DTensor afterwards, over a mesh of size 1 too: [dp_replicate,] dp_shard_cp, and then tp or
ep where it was cut before. A parameter that is cut already is cut here along another dim, so that a rank's part is one
box by the ordinary left-to-right rule and no `_StridedShard` arises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from cosmos_rl_core.config.policy import MemorySection, ParallelSection, PrecisionSection
from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.mesh import ReplicaMesh


def shard_fully(
    root: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    mesh: ReplicaMesh,
    parallel: ParallelSection,
    memory: MemorySection,
    precision: PrecisionSection,
    compute_dtype: torch.dtype | None = None,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Shard `root` in place: `experts`, then `blocks`, each gathered on its own, then what is left.

    Args:
        blocks: modules inside `root`, in the order they run.
        compute_dtype: type that parameters are gathered in and the modules compute in; None: their own.
        experts: modules inside the blocks whose parameters lie on the axes efsdp (cut) and ep (spread already).

    Raises UserError for a parameter that cannot be cut evenly.
    """
    mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=getattr(torch, precision.reduce))
    offload: OffloadPolicy = OffloadPolicy()
    if memory.parameter_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")

    def shard(module: nn.Module, on: DeviceMesh, reshard: bool | None) -> None:
        fully_shard(
            module,
            mesh=on,
            reshard_after_forward=reshard,
            shard_placement_fn=_placement(module, num_shards=on.size(-1)),
            mp_policy=mixed,
            offload_policy=offload,
        )

    for module in experts:
        shard(module, mesh.expert_fsdp, parallel.reshard_after_forward)
    for block in blocks:
        shard(block, mesh.fsdp, parallel.reshard_after_forward)
    shard(root, mesh.fsdp, None)  # None: torch keeps the root gathered, whose head the backward pass needs at once
    sum_gradients(root.modules())


def sum_gradients(modules: Iterable[nn.Module]) -> None:
    """Make sharded modules sum their gradients over ranks, where torch's default is the mean."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales


def reshard(root: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered: `parameters()` are the sharded ones again."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _placement(module: nn.Module, *, num_shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Along which dim each parameter is cut: the first that is whole, and divisible where it is not dim 0."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def choose(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor):
            return None
        taken = {p.dim % parameter.ndim for p in parameter.placements if isinstance(p, Shard)}
        if 0 not in taken:
            return None
        shape = parameter.to_local().shape
        for dim in range(1, parameter.ndim):
            if dim not in taken and shape[dim] % num_shards == 0:
                return Shard(dim)
        raise UserError(
            f"[policy.parallel] {names[id(parameter)]} of shape {tuple(parameter.shape)} is cut over tp or ep already "
            f"and no other of its dims divides by dp_shard x cp = {num_shards}; choose a dp_shard that does"
        )

    return choose
