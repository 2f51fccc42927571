"""Casts a model's parameters to a dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def cast_parameters(model: nn.Module, dtype: torch.dtype, *, exact: Iterable[Iterable[nn.Module]]) -> None:
    """Cast the parameters of `model` to `dtype`, in place, except for those of the modules in `exact`."""
    kept = {id(parameter) for group in exact for module in group for parameter in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
