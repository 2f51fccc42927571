"""Experts of a Hugging Face model, sharded over the ranks of the mesh.

    hidden [N, H], chosen experts and gates [N, k]
      tp    its ranks have the same rows: each computes a part of them and leaves the others zero; outputs are summed
      ep    rows travel to the ranks of their experts and back (`parallel.expert`)
      efsdp the weights of a rank's experts are sharded by FSDP over all ranks with the same experts

Works for every family whose experts transformers has fused into [E, ...] weights (its experts interface). Routers and
shared experts are ordinary modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.expert import combine, dispatch, grouped_linear, own_rows
from cosmos_rl_core.parallel.mesh import ReplicaMesh


def spread_experts(model: PreTrainedModel, mesh: ReplicaMesh) -> list[nn.Module]:
    """Shard the experts' weights over ep, in place, and route their tokens over the ranks.

    Weights may be on meta; nothing is communicated.

    Returns:
        The experts modules, for FSDP over `mesh.expert_fsdp`; none for a dense model.

    Raises:
        UserError: ep does not divide the number of experts, or the model has no experts that can be sharded.
    """
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    if mesh.dims.ep > 1 and not experts:
        kind = type(model).__name__
        raise UserError(f"[policy.parallel] ep = {mesh.dims.ep}: {kind} has no experts that can be sharded; set ep = 1")
    for name, module in experts.items():
        num_experts = _cut(name, module, mesh)
        forward = partial(_forward, module, num_experts=num_experts, ep=mesh.axis("ep"), tp=mesh.axis("tp"))
        # Splits differ from pass to pass, so compiling this would not pay off.
        module.forward = torch.compiler.disable(forward)
    return list(experts.values())


def use_mixed_experts(model: PreTrainedModel) -> None:
    """Make experts whose weights are whole compute in the type of autocast, which transformers' own ignore."""
    for module in model.modules():
        if is_experts(module):
            num_experts = next(module.parameters()).shape[0]
            forward = partial(_forward, module, num_experts=num_experts, ep=None, tp=None)
            module.forward = torch.compiler.disable(forward)


def is_experts(module: nn.Module) -> bool:
    """Whether this is the experts module of a layer, with fused weights."""
    return "is_transposed" in vars(module) and "has_gate" in vars(module)


def _cut(name: str, module: nn.Module, mesh: ReplicaMesh) -> int:
    """Keep this rank's experts of each weight [E, ...]; return E."""
    weights = dict(module.named_parameters())
    num_experts = next(iter(weights.values())).shape[0]
    odd = [key for key, weight in weights.items() if weight.shape[0] != num_experts]
    ep = mesh.dims.ep
    if ep == 1:
        return num_experts
    if odd or num_experts % ep:
        raise UserError(
            f"[policy.parallel] ep = {ep}: {name} has {num_experts} experts, which ep must divide"
            + (f", and weights that do not belong to one expert ({', '.join(odd)})" if odd else "")
        )
    axis = mesh.experts["ep"]
    num_own = num_experts // ep
    for key, weight in weights.items():
        mine = weight.detach().narrow(0, num_own * axis.get_local_rank(), num_own).clone()
        spread = DTensor.from_local(mine, axis, [Shard(0)], run_check=False)
        module.register_parameter(key, nn.Parameter(spread, requires_grad=weight.requires_grad))
    return num_experts


def _forward(
    module: nn.Module,
    hidden: Tensor,
    experts: Tensor,
    gates: Tensor,
    *,
    num_experts: int,
    ep: DeviceMesh | None,
    tp: DeviceMesh | None,
) -> Tensor:
    """hidden [N, H], experts and gates [N, k] -> [N, H]; with tp a part whose sum over its ranks is the whole."""
    mine = own_rows(len(hidden), tp)
    rows, ends, exchange = dispatch(hidden[mine], experts[mine], num_experts=num_experts, axis=ep)
    output = combine(run_experts(module, rows, partial(_linear, module, ends)), gates[mine], exchange)
    if tp is None:
        return output
    return nn.functional.pad(output, (0, 0, mine.start, len(hidden) - mine.stop))


def run_experts(module: nn.Module, rows: Tensor, linear: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Run rows [R, H], sorted by expert, through experts; `linear` multiplies rows by the weights of a name."""
    family = cast(Any, module)  # has the attributes set by transformers' `use_experts_implementation`
    if family.has_gate:
        rows = family._apply_gate(linear("gate_up_proj", rows))
    else:
        rows = family.act_fn(linear("up_proj", rows))
    rows = linear("down_proj", rows)
    # transformers 5.19 has no family with such a norm and does not set the attribute.
    return family.post_expert_norm(rows) if vars(module).get("has_post_expert_norm") else rows


def _linear(module: nn.Module, ends: Tensor, name: str, rows: Tensor) -> Tensor:
    family = cast(Any, module)
    weight = _local(module.get_parameter(name))
    bias = _local(module.get_parameter(f"{name}_bias")) if family.has_bias else None
    return grouped_linear(rows, weight if family.is_transposed else weight.transpose(1, 2), ends, bias=bias)


def _local(weight: Tensor) -> Tensor:
    """The experts of this rank [local experts, ...]."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
