"""Optimizers by name, with weight decay kept off vectors (norms and biases), and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import MuonSection
from cosmos_rl_core.train.optimizers.muon import MuonWithAdamW, ShardedMuon, hidden_matrices
from cosmos_rl_core.train.optimizers.rounding import StochasticAdam


def parameter_groups(
    module: nn.Module, *, weight_decay: float, learning_rate: float, rates: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not; frozen parameters are left out. `rates`: learning rates by name pattern.

    Distributed parameters of different meshes, such as experts, get groups of their own: a fused update takes one mesh.
    Raises UserError for a pattern that matches no trained parameter.
    """
    groups: dict[tuple[bool, float, DeviceMesh | None], list[nn.Parameter]] = {}
    named = {_plain(name): parameter for name, parameter in module.named_parameters()}
    unused = set(rates)
    for name, parameter in named.items():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            pattern = next((pattern for pattern in rates if fnmatchcase(name, pattern)), None)
            unused.discard(pattern or "")
            rate = learning_rate if pattern is None else rates[pattern]
            groups.setdefault((parameter.ndim >= 2, rate, mesh), []).append(parameter)
    if unused:
        patterns = sorted({f"{name.partition('.')[0]}.*" for name in named})
        raise UserError(
            f"[policy.optimizer] rates: no trained parameter is called {' or '.join(sorted(unused))}; "
            f"there are {', '.join(patterns)}"
        )
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "lr": rate}
        for (decays, rate, _), parameters in sorted(
            groups.items(), key=lambda item: (item[0][1] != learning_rate, not item[0][0])
        )
    ]


def _plain(name: str) -> str:
    """A parameter's name without the prefixes of wrappers for compiling and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def build_optimizer(
    name: str,
    module: nn.Module,
    *,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    rates: Mapping[str, float] | None = None,
    muon: MuonSection | None = None,
) -> torch.optim.Optimizer:
    """`adamw`, `adam`, `sgd` (momentum = betas[0]) or `muon` over the module's trained parameters.

    Where some are bfloat16, adamw and adam round stochastically (`train.optimizers.rounding`).
    """
    groups = parameter_groups(module, weight_decay=weight_decay, learning_rate=learning_rate, rates=rates or {})
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate, momentum=betas[0], weight_decay=weight_decay)
    if name == "muon":
        muon = muon or MuonSection()
        hidden = hidden_matrices(module, but=muon.adamw)
        matrices, others = (_only(groups, of_hidden, hidden) for of_hidden in (True, False))
        keys = muon.model_dump(exclude={"adamw"})
        return MuonWithAdamW(
            ShardedMuon(matrices, weight_decay=weight_decay, **keys) if matrices else None,
            torch.optim.AdamW(others, betas=betas, eps=eps, fused=True) if others else None,
        )
    if any(parameter.dtype is torch.bfloat16 for group in groups for parameter in group["params"]):
        decoupled = name == "adamw"
        return StochasticAdam(
            groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=decoupled
        )
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    return kind(groups, lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def _only(groups: list[dict[str, Any]], member: bool, of: set[nn.Parameter]) -> list[dict[str, Any]]:
    """The groups with those of their parameters that are, or are not, members of a set."""
    cut = [{**group, "params": [p for p in group["params"] if (p in of) is member]} for group in groups]
    return [group for group in cut if group["params"]]


def factor(name: str, step: int, *, warmup_steps: int, total_steps: int | None, min_ratio: float) -> float:
    """Multiplier of the base learning rate at optimizer step `step` (0-based).

    Linear warm-up from 1/warmup_steps to 1, then `constant`, `linear` or `cosine` down to `min_ratio` at
    `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if name == "constant":
        return 1.0
    assert total_steps is not None, "the config requires max_steps for a decaying schedule"
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    shape = 1.0 - progress if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_ratio + (1.0 - min_ratio) * shape
