"""Shards an action model over the ranks of its replica, and sets its compute dtype.

    recomputation, offload, compile of each block -> fully_shard (dp_shard, dp_replicate)

A model is called by `act`, `evaluate` and `supervised`, each of which gathers and frees parameters as `forward` would.
An expert reads the keys and values of a language model's layers beside their output. The output of the last layer may
be unused, and then nothing would gather that layer for its backward pass: it is sharded with the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.fsdp import shard_fully
from cosmos_rl_core.parallel.config import ParallelSection, PrecisionSection
from cosmos_rl_core.parallel.remat import save_memory
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_vla.models.loaded import LoadedPolicy

CALLS = ("act", "evaluate", "supervised")


def parallelize(loaded: LoadedPolicy, setup: ModelSetup, *, compute_dtype: torch.dtype = torch.float32) -> None:
    """Shard the model in place; with a mesh every parameter is a DTensor afterwards.

    Shards are cut from the rank's own copy without communication: all ranks must have the same values, or fill them in
    later. Gradients are sums over all ranks.

    Args:
        compute_dtype: of all modules outside `exact`, independent of the parameter dtype.

    Raises UserError for a model that cannot be sharded by `setup`.
    """
    check_axes(setup.parallel, setup.precision, compute_dtype=compute_dtype)
    dtype = setup.parameter_dtype(compute_dtype)
    loaded.cast_parameters(dtype)
    compiled = setup.compiles(obstacle="action models")
    save_memory(loaded.model.blocks(), setup.memory, compiled=compiled)
    if setup.mesh is None:
        if dtype != compute_dtype:
            _autocast(loaded, compute_dtype)
        return
    exact = () if compute_dtype == torch.float32 else loaded.model.exact()
    for module in (module for group in exact for module in group):
        module.register_forward_hook(_own_storage)
    alone = {id(block) for block in loaded.model.root_blocks()}
    shard_fully(
        loaded.model,
        blocks=[block for block in loaded.model.blocks() if id(block) not in alone],
        mesh=setup.mesh,
        parallel=setup.parallel,
        memory=setup.memory,
        precision=setup.precision,
        compute_dtype=None if dtype == compute_dtype else compute_dtype,
        exact=exact,
        cast_inputs=False,  # states, actions and their distributions are never rounded
    )
    for name in CALLS:
        register_fsdp_forward_method(loaded.model, name)


def check_axes(parallel: ParallelSection, precision: PrecisionSection, *, compute_dtype: torch.dtype) -> None:
    """Raise one UserError with every option of [policy] that action models do not have."""
    if problems := list(_refused(parallel, precision, compute_dtype)):
        raise UserError("; ".join(problems))


def _refused(parallel: ParallelSection, precision: PrecisionSection, compute_dtype: torch.dtype) -> Iterator[str]:
    for axis in ("tp", "cp", "pp", "ep"):
        if (size := getattr(parallel, axis)) > 1:
            yield (
                f"[policy.parallel] {axis} = {size}: action models support dp_shard and dp_replicate only; "
                "use dp_shard for parameters that do not fit, and fewer microbatch_terms for activations that do not"
            )
    if parallel.sequence_parallel:
        yield "[policy.parallel] sequence_parallel = true needs tp, which action models do not have"
    if precision.fp8 != "none":
        yield f'[policy.precision] fp8 = "{precision.fp8}": action models compute in [model] dtype; set fp8 = "none"'
    if precision.parameters == "bfloat16" and compute_dtype == torch.float32:
        yield (
            '[policy.precision] parameters = "bfloat16" computes in bfloat16: set model.dtype = "bfloat16" too, or '
            'parameters = "float32"'
        )


def _own_storage(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Copy a view: an in-place operation on it would lose `fully_shard`'s hook."""
    return output if output._base is None else output.clone()


def _autocast(loaded: LoadedPolicy, dtype: torch.dtype) -> None:
    """Round weights to `dtype` when they are used, as `fully_shard` does for several ranks."""
    device = next(loaded.model.parameters()).device.type
    for module in (module for group in loaded.model.exact() for module in group):
        module.forward = partial(_under, module.forward, device, None)
    for name in CALLS:
        setattr(loaded.model, name, partial(_under, getattr(loaded.model, name), device, dtype))


def _under(call: Callable[..., Any], device: str, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        return call(*args, **kwargs)
