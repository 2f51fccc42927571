"""Plans, per class of networks, of the tensors and modules to shard over video tokens with cp.

    latents [B, C, f, h, w] -- patches --> tokens [B, L, H]        whole on every rank
                                              |  cut               before the first block
                                           [B, l, H]               blocks, last norm, output projection
                                              |  gather
    velocity [B, C, f, h, w] <-----------  [B, L, C p]             whole on every rank

Positions are of the whole video: rotary angles are computed for all tokens, and cut. Everything before the cut is
computed by all ranks and used for their own tokens, so that each rank has a partial gradient of every parameter; the
sum over cp is the whole. After the gather all ranks compute the same loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cosmos_rl_core.errors import UserError

BLOCKS = "blocks"
"""Key of a plan for each of a network's blocks."""


@dataclass(frozen=True, slots=True)
class Along:
    """The dim of tokens, in tensors that have one."""

    dim: int
    of: int
    """Number of dims of such a tensor; a tensor with another number has no token dim and is left whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """The plan of one class of diffusers. Tokens [B, L, H] are the first block's `hidden_states`."""

    attention: tuple[str, ...]
    """Modules of a block that attend across video tokens."""
    arguments: Mapping[str, Mapping[str, Along]] = field(default_factory=dict)
    """Module ("": the network; `BLOCKS`) -> its arguments with a value for each token."""
    outputs: Mapping[str, Along] = field(default_factory=dict)
    """Modules that return values for each token."""
    head: str = "proj_out"
    """Module that maps the last hidden states to [B, l, C p]."""


_TIMES = {"embedded_timestep": Along(1, of=3), "temb": Along(1, of=3)}
"""Cosmos: a time for each token where frames are given, one per sample [B, ...] elsewhere."""

PLANS: Mapping[str, TokenPlan] = {
    "WanTransformer3DModel": TokenPlan(
        attention=("attn1",),
        arguments={"": {"timestep": Along(1, of=2)}},  # Wan 2.2 has a time for each token
        outputs={"rope": Along(1, of=4)},
    ),
    "CosmosTransformer3DModel": TokenPlan(
        attention=("attn1",),
        arguments={BLOCKS: _TIMES, "norm_out": _TIMES},
        outputs={"rope": Along(0, of=2), "learnable_pos_embed": Along(1, of=3)},
    ),
    "SD3Transformer2DModel": TokenPlan(attention=("attn", "attn2")),
}
"""Plans by class name."""


def plan_of(class_name: str, *, cp: int) -> TokenPlan:
    """Return the plan of a class. Raises UserError, with the supported classes, for a class without one."""
    if (plan := PLANS.get(class_name)) is None:
        raise UserError(
            f"[policy.parallel] cp = {cp}: {class_name} has no plan for its tokens; set cp = 1, or use one "
            f"of {', '.join(sorted(PLANS))}"
        )
    return plan
