"""Parallelises a diffusers transformer over the ranks of its replica. Each step needs the previous ones:

    float8 -> tokens (cp) -> recomputation, offload, compile -> fully_shard (dp_shard x cp, dp_replicate)

One process takes only the steps that need no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.fsdp import shard_fully
from cosmos_rl_core.parallel.config import MemorySection, ParallelSection
from cosmos_rl_core.parallel.float8 import use_float8
from cosmos_rl_core.parallel.remat import save_memory
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_wfm.parallel.context import cut_tokens

_TIMES = "timestep"
"""Name of the times argument of all diffusers transformers."""


def parallelize(network: nn.Module, setup: ModelSetup, *, compute_dtype: torch.dtype | None = None) -> None:
    """Parallelise `network` in place; every parameter is a DTensor afterwards, adapters too, where there is a mesh.

    Parameters are sharded from the rank's own copy and nothing is sent: all ranks must hold the same values, or fill
    them in later. Add adapters before. All ranks along cp call the network together, as before: latents and velocity
    are whole on every rank; gradients of parameters are sums over all ranks.

    Args:
        compute_dtype: with a mesh, the dtype in which parameters are gathered and the network computes; weights that
            are trained keep theirs. Times are never rounded to it. In one process the model's own autocast does that.

    Raises UserError for a network that does not support `setup`.
    """
    mesh = setup.mesh
    check_axes(setup.parallel, setup.memory)
    blocks = transformer_blocks(network)
    compiled = setup.compiles()
    skipped = _kept_whole(network, blocks)
    use_float8(network, setup.precision.fp8, device=setup.device, skip=skipped, compiled=compiled)
    if mesh is not None and (axis := mesh.axis("cp")) is not None:
        cut_tokens(network, blocks, axis)
    save_memory(blocks, setup.memory, compiled=compiled)
    if mesh is None:
        return
    _hold_in_one_type(network, setup.parameter_dtype(compute_dtype or getattr(torch, setup.precision.parameters)))
    network.register_forward_hook(_own_storage)
    shard_fully(
        network,
        blocks=blocks,
        mesh=mesh,
        parallel=setup.parallel,
        memory=setup.memory,
        precision=setup.precision,
        compute_dtype=compute_dtype,
        cast_inputs=False,  # blocks are given rotary angles and times too, and in bfloat16 the time 937.5 is 936
    )
    if compute_dtype is not None:
        network.register_forward_pre_hook(partial(_cast_all_but_times, compute_dtype), with_kwargs=True)


def check_axes(parallel: ParallelSection, memory: MemorySection | None = None) -> None:
    """Raise one UserError with every option of [policy.parallel] that diffusers' transformers do not support."""
    if problems := list(_refused(parallel, memory or MemorySection())):
        raise UserError("; ".join(problems))


def _refused(parallel: ParallelSection, memory: MemorySection) -> Iterator[str]:
    others = "use dp_shard for parameters that do not fit, and cp for activations that do not"
    for axis in ("tp", "pp", "ep"):
        if (size := getattr(parallel, axis)) > 1:
            yield f"[policy.parallel] {axis} = {size}: world foundation models support only dp and cp; {others}"
    if parallel.sequence_parallel:
        yield "[policy.parallel] sequence_parallel = true goes with tp, which world foundation models do not have"
    if parallel.cp > 1 and memory.compile is True:
        yield (
            f"[policy.memory] compile = true does not go together with [policy.parallel] cp = {parallel.cp}, whose "
            "exchanges it would cut the compiled code at; set one of them off"
        )


def _kept_whole(network: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Linear layers that stay out of float8: those around the blocks, and adapters."""
    inside = {id(module) for block in blocks for module in block.modules()}
    named = ((name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear))
    return [module for name, module in named if id(module) not in inside or ".lora_" in name]


def _hold_in_one_type(network: nn.Module, dtype: torch.dtype) -> None:
    """Cast trained parameters to `dtype`: `fully_shard` reduces one dtype, and diffusers leaves parts in float32."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _own_storage(_: nn.Module, args: Any, output: Any) -> Any:
    """Copy the velocity, a view otherwise: an in-place operation on a view would lose `fully_shard`'s hook on it."""
    if isinstance(output, tuple):
        return tuple(one.clone() for one in output)
    output.sample = output.sample.clone()
    return output


def _cast_all_but_times(
    dtype: torch.dtype, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the network's inputs except its times, as diffusers' pipelines do."""
    assert not args, "call the network with keywords: times are found by name"
    return args, {name: value if name == _TIMES else _cast(value, dtype) for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, tuple):
        return tuple(_cast(one, dtype) for one in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the blocks of a diffusers transformer, in the order they run.

    They are those members of its module lists whose classes it declares indivisible (`_no_split_modules`); for a
    network that declares none, the members of its longest list. Raises UserError for a network without a list.
    """
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    declared = set(getattr(network, "_no_split_modules", None) or ())
    if blocks := [block for members in lists for block in members if type(block).__name__ in declared]:
        return blocks
    if not lists:
        raise UserError(
            f"{type(network).__name__} has no list of transformer blocks, so that it can neither be sharded nor "
            "recomputed by blocks; choose one of diffusers' transformers"
        )
    return list(max(lists, key=len))
