"""Speeds up a network of diffusers that runs eagerly; compiled networks do not need it.

float32 matrix products on a CPU     oneDNN, where it is faster than MKL
rotary positions of Wan              one complex product in place of ten operations on every other column
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.kernel_choice import fastest
from cosmos_rl_core.parallel.axes.linear import use_onednn


def speed_up(network: nn.Module) -> None:
    """Change `network` in place, before it is sharded. Names and weights stay; outputs change in their last bits.

    On a CPU a measurement decides whether a kernel is changed; on meta, the processor of this process is measured.
    """
    use_onednn(network, many_rows=True)
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    for module in network.modules():
        to_itself = isinstance(module, WanAttention) and not module.is_cross_attention
        if not to_itself or type(module.processor) is not WanAttnProcessor:
            continue
        weight, heads = cast(nn.Linear, module.to_q).weight, cast(int, module.heads)
        if weight.device.type == "cuda" or complex_wins(len(weight) // heads, torch.get_num_threads()):
            cast(Any, module).processor = ComplexRotary()


@cache
def complex_wins(head_dim: int, threads: int) -> bool:
    """Return whether `ComplexRotary` is faster on this CPU than the processor of diffusers, backward pass included."""
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    heads, tokens = 2, 64
    same = nn.Identity()
    attention = SimpleNamespace(
        **{"heads": heads, "add_k_proj": None, "fused_projections": False, "to_out": [same, same]},
        **dict.fromkeys(("to_q", "to_k", "to_v", "norm_q", "norm_k"), same),
    )

    def run(processor: Any, states: Tensor, angles: Tensor) -> None:
        processor(attention, states, None, None, (angles, angles)).sum().backward()

    def choose() -> str:
        # In a thread of its own, which has none of the caller's modes of torch.
        torch.set_num_threads(threads)
        states = torch.full((4, tokens, heads * head_dim), 0.01, requires_grad=True)
        angles = torch.full((1, tokens, 1, head_dim), 0.5)
        kernels = {"diffusers": WanAttnProcessor(), "complex product": ComplexRotary()}
        return fastest(
            f"rotary positions, head dim {head_dim}, {threads} threads",
            {name: partial(run, processor, states, angles) for name, processor in kernels.items()},
            code=[__file__],
        )

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(choose).result() == "complex product"


class ComplexRotary:
    """A processor of diffusers: Wan's attention of video tokens to one another."""

    def __init__(self) -> None:
        self._attention_backend = None  # diffusers sets it, by this name
        self._parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        attention_mask: Tensor | None,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """[B, L, W] and cosines and sines [1, L, 1, D], each twice -> [B, L, W]."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        cosines, sines = rotary_emb
        angles = torch.complex(cosines[..., 0::2].float(), sines[..., 1::2].float())
        by_head = (attn.heads, -1)
        query = turned(attn.norm_q(attn.to_q(hidden_states)).unflatten(2, by_head), angles)
        key = turned(attn.norm_k(attn.to_k(hidden_states)).unflatten(2, by_head), angles)
        attended = dispatch_attention_fn(
            query,
            key,
            attn.to_v(hidden_states).unflatten(2, by_head),
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        return attn.to_out[1](attn.to_out[0](attended.flatten(2, 3).type_as(query)))


def turned(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate each pair of columns of [B, L, heads, D] by the unit complex number in `angles` [1, L, 1, D / 2]."""
    pairs = torch.view_as_complex(states.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).type_as(states)
