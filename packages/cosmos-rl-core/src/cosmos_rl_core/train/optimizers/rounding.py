"""Adam for weights in bfloat16: computed in float32, and rounded stochastically.

bfloat16 has 8 bits of mantissa. Rounded to nearest, an update below 2^-9 of a weight vanishes (with a weight of 0.02
all below 4e-5), and a second moment with beta2 = 0.999 never decays. Here a value is rounded up with the probability of
its distance to the lower neighbour, so that its expectation is exact:

    round(x) = truncate_16(bits(x) + r),    r uniform in 0 .. 2^16 - 1

Weights and both moments are rounded so. The numbers r depend on the step alone: ranks with copies of the same shard
round them alike, and a resumed run continues bit by bit. Source: Zamirai et al., arXiv:2010.06192.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core.parallel.dtensor import local_part


class StochasticAdam(torch.optim.Adam):
    """Adam, or AdamW with `decoupled_weight_decay`, whose bfloat16 weights and moments are rounded stochastically.

    State and groups are those of torch's class; other types are updated in float32 and rounded to nearest.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient; `closure` is not supported."""
        assert closure is None, "no closure"
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            parameters, gradients, means, squares, _, steps = lists
            for parameter, gradient, mean, square, count in zip(parameters, gradients, means, squares, steps):
                count += 1
                weight, g, m, v = (local_part(tensor) for tensor in (parameter, gradient, mean, square))
                _update(weight, g, m, v, int(count), group)


def _update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, group: dict[str, Any]) -> None:
    """One step of Adam on local tensors, in place."""
    beta1, beta2 = group["betas"]
    w, g = weight.float(), gradient.float()
    if group["decoupled_weight_decay"]:
        w = w * (1 - group["lr"] * group["weight_decay"])
    elif group["weight_decay"]:
        g = g + group["weight_decay"] * w
    m = torch.lerp(mean.float(), g, 1 - beta1)
    v = torch.lerp(square.float(), g * g, 1 - beta2)
    root = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
    w = torch.addcdiv(w, m, root, value=-group["lr"] / (1 - beta1**step))
    generator = torch.Generator(weight.device).manual_seed(step)
    for kept, exact in ((weight, w), (mean, m), (square, v)):
        kept.copy_(stochastic(exact, generator) if kept.dtype is torch.bfloat16 else exact)


def stochastic(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 `values` to bfloat16, up or down at random so that the expectation is exact; keeps inf and nan."""
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = ((values.contiguous().view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
