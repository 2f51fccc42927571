"""Batch-invariant experts, routers and activations on a CPU: a row's bits do not depend on the other rows.

The number of an expert's rows depends on the whole batch, and torch's grouped product uses different kernels for few
and many rows. Here each expert's rows are padded to `MIN_ROWS` and multiplied by `linear.product`. Routers are not
linear modules, but multiply like one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS, GELUActivation, GELUTanh

from cosmos_rl_core.parallel.axes.expert import combine, dispatch
from cosmos_rl_core.parallel.axes.linear import MIN_ROWS, product
from cosmos_rl_llm.policy.experts import is_experts, run_experts
from cosmos_rl_llm.policy.routing import routers


class _SteadyProducts(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (product if func is F.linear else func)(*args, **(kwargs or {}))


def use_steady_experts(model: PreTrainedModel) -> None:
    """On a CPU: the output of experts and routers no longer depends on the batch, to the bit."""
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if is_experts(module):
            module.forward = partial(_forward, module)
    for router in routers(model).values():
        router.forward = partial(_route, router.forward)


def _route(forward: Callable[..., Any], *given: Any) -> Any:
    with _SteadyProducts():
        return forward(*given)


def _forward(module: nn.Module, hidden: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
    """hidden [N, H], experts and gates [N, k] -> [N, H]."""
    num_experts = cast(Any, module).num_experts
    rows, ends, exchange = dispatch(hidden, experts, num_experts=num_experts, axis=None)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return combine(run_experts(module, rows, partial(_linear, module, sizes)), gates, exchange)


def _linear(module: nn.Module, sizes: list[int], name: str, rows: Tensor) -> Tensor:
    """rows [R, in], `sizes` of them for each expert in order -> [R, out]."""
    family = cast(Any, module)
    weight = module.get_parameter(name)
    weight = weight.transpose(1, 2) if family.is_transposed else weight  # [experts, out, in]
    bias = module.get_parameter(f"{name}_bias") if family.has_bias else None
    parts = [
        _steady_product(part, weight[expert], None if bias is None else bias[expert])
        for expert, part in enumerate(rows.split(sizes))
        if len(part)
    ]
    return torch.cat(parts)


def _steady_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = max(0, MIN_ROWS - len(rows))
    return product(F.pad(rows, (0, 0, 0, missing)), weight, bias)[: len(rows)]


_GRAIN = 32768
"""Minimum elements per torch thread (`at::internal::GRAIN_SIZE`)."""
_GELU_GRAIN = 16384
"""`F.gelu` uses all threads above this."""
_GELU = (nn.GELU, GELUActivation, GELUTanh)
_VECTOR = 64
"""Elements of the widest step of torch's vectorised loops, over all dtypes and instruction sets."""


def use_steady_activations(model: nn.Module) -> None:
    """Make the activation modules of a model on the CPU give each element the same bits in any batch."""
    kinds = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
    for module in model.modules():
        if type(module) in kinds:
            module.forward = partial(_steady, module.forward, is_gelu=isinstance(module, _GELU))


def _steady(activation: Callable[[Tensor], Tensor], input: Tensor, *, is_gelu: bool) -> Tensor:
    """Apply `activation` to each element of `input`, of any shape."""
    size = input.numel()
    missing = -size % (_VECTOR * _num_threads(size, is_gelu=is_gelu))
    if input.device.type != "cpu" or (missing == 0 and input.is_contiguous()):
        return activation(input)
    return activation(F.pad(input.reshape(-1), (0, missing)))[:size].view(input.shape)


def _num_threads(size: int, *, is_gelu: bool) -> int:
    """Number of threads that torch uses for `size` elements; unchanged after padding to whole vectors."""
    most = torch.get_num_threads()
    if is_gelu:
        return most if size > _GELU_GRAIN else 1
    return max(1, min(most, -(-size // _GRAIN)))
