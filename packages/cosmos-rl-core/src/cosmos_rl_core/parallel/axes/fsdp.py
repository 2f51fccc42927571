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
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection, PrecisionSection
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
    exact: Sequence[Sequence[nn.Module]] = (),
    cast_inputs: bool = True,
) -> None:
    """Shard `root` in place: `experts` and `exact`, then `blocks`, each gathered on its own, then the rest.

    Args:
        blocks: modules inside `root`, in the order they run.
        compute_dtype: type that parameters are gathered in and the modules compute in; None: their own.
        experts: modules inside the blocks whose parameters are on the axes efsdp (cut here) and ep (cut already).
        exact: groups of modules that compute in the type of their parameters, each group gathered together for the
            whole pass: a forward pass of `root` that runs one of a group runs all of it.
        cast_inputs: cast the inputs of `root` and of blocks to `compute_dtype`; else the modules do it themselves.

    Raises UserError for a parameter that cannot be cut evenly.
    """
    reduced = getattr(torch, precision.reduce)
    own = MixedPrecisionPolicy(reduce_dtype=reduced)
    mixed = replace(own, param_dtype=compute_dtype, cast_forward_inputs=cast_inputs)
    offload: OffloadPolicy = OffloadPolicy()
    if memory.parameter_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu")

    def shard(*modules: nn.Module, on: DeviceMesh, reshard: bool | None, types: MixedPrecisionPolicy = mixed) -> None:
        fully_shard(
            modules[0] if len(modules) == 1 else list(modules),
            mesh=on,
            reshard_after_forward=reshard,
            shard_placement_fn=_placement(modules, num_shards=on.size(-1)),
            mp_policy=types,
            offload_policy=offload,
        )

    for module in experts:
        shard(module, on=mesh.expert_fsdp, reshard=parallel.reshard_after_forward)
    for group in exact:
        shard(*group, on=mesh.fsdp, reshard=False, types=own)  # small, and used throughout a pass
    for block in blocks:
        shard(block, on=mesh.fsdp, reshard=parallel.reshard_after_forward)
    shard(
        root, on=mesh.fsdp, reshard=None
    )  # None: torch keeps the root gathered, whose head the backward pass needs at once
    sum_gradients(root.modules())


def sum_gradients(modules: Iterable[nn.Module]) -> None:
    """Make sharded modules sum their gradients over ranks, where torch's default is the mean."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that scales


def reshard(root: nn.Module) -> None:
    """Reshard parameters that a forward pass without a backward pass has left gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _placement(modules: Iterable[nn.Module], *, num_shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Choose the dim each parameter is cut along: the first that is whole, and divisible where it is not dim 0."""
    names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}

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
