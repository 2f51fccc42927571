"""Optimizers by name, with weight decay kept off vectors (norms and biases)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; frozen parameters are left out.

    Distributed parameters of different meshes, such as experts, get groups of their own: one fused update takes one.
    """
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim >= 2, mesh), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), parameters in sorted(groups.items(), key=lambda item: not item[0][0])
    ]


def build_optimizer(
    name: str,
    module: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """`adamw`, `adam` or `sgd` (momentum = betas[0]) over the module's trained parameters."""
    groups = parameter_groups(module, weight_decay=weight_decay)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=betas[0], weight_decay=weight_decay)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return kind(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
