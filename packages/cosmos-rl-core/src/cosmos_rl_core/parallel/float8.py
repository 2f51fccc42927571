"""Matrix products of linear layers in float8, forward and backward, through torchao.

    y = round8(x / s_x) round8(W / s_W)^T s_x s_W        and likewise for the gradients of x and W

The weights themselves keep their type and names: they are the master weights. "tensorwise" takes one scale a tensor
(e4m3 forward, e5m2 for gradients), "rowwise" one a row (e4m3, scales that are powers of two), which is more exact and
somewhat slower. Without a GPU that multiplies float8 (compute capability 8.9) the products are emulated: values are
rounded to 8 bits and multiplied in the tensors' own type. Source: Micikevicius et al., arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.imports import pip_install

MULTIPLE = 16
"""Divides both dims of a weight: the size of the hardware's tiles."""


def use_float8(
    module: nn.Module,
    recipe: Literal["none", "tensorwise", "rowwise"],
    *,
    device: torch.device,
    skip: Collection[nn.Module | None] = (),
    compiled: bool = True,
) -> int:
    """Run the linear layers inside `module` in float8, in place, before it is spread over ranks.

    Args:
        device: where they will compute; the module may still be on the CPU or on meta.
        skip: layers to leave alone, such as the output head, which the loss is most sensitive to.
        compiled: whether the module is; the log has a remark otherwise.

    Returns:
        The number of converted layers; layers of other sizes are left alone.

    Raises UserError where torchao is not installed, or no layer can be taken.
    """
    if recipe == "none":
        return 0
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"[policy.precision] fp8 needs torchao ({error}); {pip_install('cosmos-rl-llm[fp8]')}, or torchao>=0.18"
        ) from error
    taken = [layer for layer in module.modules() if _fits(layer) and not any(layer is other for other in skip)]
    if not taken:
        raise UserError(
            f'[policy.precision] fp8 = "{recipe}": no linear layer has both dims divisible by {MULTIPLE}; '
            'set fp8 = "none"'
        )
    chosen = {id(layer) for layer in taken}
    emulate = not has_float8(device)
    slow = "" if emulate or compiled else "; not compiled, each tensor is scaled in passes of its own: compile = true"
    log_choice(f"float8: {'emulated' if emulate else 'hardware'} ({recipe}, {device.type}){slow}")
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, pad_inner_dim=True)
    convert_to_float8_training(module, module_filter_fn=lambda layer, _: id(layer) in chosen, config=config)
    return len(taken)


def _fits(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0


def has_float8(device: torch.device) -> bool:
    """Whether the device multiplies float8: a GPU of compute capability 8.9 or above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
