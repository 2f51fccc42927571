"""Muon over ranks: momentum, made orthogonal, for the hidden matrices, and AdamW for all other parameters.

    momentum   m = mu m + (1 - mu) g                 on this rank's part
    direction  O = NS(g + mu (m - g))                of the whole matrix, gathered from the ranks that hold parts
    weights    w = (1 - lr decay) w - lr a O         on this rank's part; a adjusts the rate to the matrix's shape

The Newton-Schulz iteration NS and the adjustment are those of `torch.optim.Muon`. torch's class itself would run the
iteration on sharded matrices, with a rounding to bfloat16 wherever ranks add their parts, so that the direction would
depend on the layout. Here every rank has the bits of one. Source: Jordan et al., https://kellerjordan.github.io/posts/muon;
sharded, and with rates of AdamW: Liu et al., arXiv:2502.16982.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz  # pyright: ignore[reportPrivateUsage]

from cosmos_rl_core.parallel.dtensor import fill_own_part, whole


def hidden_matrices(module: nn.Module, *, but: Sequence[str]) -> set[nn.Parameter]:
    """Return the trained matrices that are no embedding, and whose names match no pattern of `but`."""
    embeddings = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
    return {
        parameter
        for name, parameter in module.named_parameters()
        if parameter.ndim == 2
        and parameter.requires_grad
        and parameter not in embeddings
        and not any(fnmatchcase(name, pattern) for pattern in but)
    }


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for plain parameters and DTensors: to the bit the same update under every layout."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all matrices that have a gradient; all ranks call it together. `closure` is not supported."""
        assert closure is None, "no closure"
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[], [], []]
            self._init_group(group, *lists)
            for parameter, gradient, momentum in zip(*lists, strict=True):
                _update(parameter, gradient, momentum, group)


def _update(parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
    momentum.lerp_(gradient, 1 - group["momentum"])
    update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    direction = _zeropower_via_newtonschulz(whole(update), group["ns_coefficients"], group["ns_steps"], group["eps"])
    own = torch.empty_like(parameter)
    fill_own_part(own, direction.__getitem__)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(own, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape))


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers as one: its groups are those of both, and their state, by parameter, is one dict."""

    def __init__(self, muon: torch.optim.Optimizer | None, adamw: torch.optim.Optimizer | None) -> None:
        """Take over optimizers that have taken no step; None where a module has no parameters for one."""
        self._parts = [part for part in (muon, adamw) if part is not None]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient; all ranks call it together. `closure` is not supported."""
        assert closure is None, "no closure"
        for part in self._parts:
            part.step()
