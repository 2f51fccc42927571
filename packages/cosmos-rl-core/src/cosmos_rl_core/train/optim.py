"""Optimizers by name, with weight decay kept off vectors (norms and biases)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def parameter_groups(module: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; frozen parameters are left out."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


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


def clip_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float) -> tuple[float, bool]:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`. Returns (norm before, finite)."""
    trained = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
    finite = bool(torch.isfinite(norm))
    if finite and max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm)
    return float(norm), finite
