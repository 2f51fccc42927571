"""Speeds up networks of diffusers that run eagerly; compiled networks do not need it.

float32 matrix products on a CPU     oneDNN, where it is faster than MKL
RMS norms in float32                 a backward pass of their own
rotary positions of Wan              one complex product in place of ten operations on every other column
GELU's approximation with tanh       on a CPU with a sigmoid, where it is faster than torch's kernel
norms over channels of Wan's VAE     on a CPU a sum of squares, where it is faster than torch's norm of strided values
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cosmos_rl_core.kernel_choice import fastest
from cosmos_rl_core.parallel.axes.linear import use_onednn
from cosmos_rl_core.parallel.axes.norm import use_rms_norms

MIN_SAMPLE = 2**14
"""`tanh_gelu` leaves samples with fewer elements to torch's kernel, which is as fast for them."""
_SCALE, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
"""0.5 x (1 + tanh(_SCALE / 2 (x + _CUBE x^3))), GELU's approximation, equals x sigmoid(_SCALE (x + _CUBE x^3))."""


def speed_up(network: nn.Module) -> None:
    """Change `network` in place, before it is sharded. Names and weights stay; outputs change in their last bits.

    On a CPU a measurement decides whether a kernel is changed; on meta, the processor of this process is measured.
    """
    use_onednn(network, many_rows=True)
    use_rms_norms(network)
    from diffusers.models.activations import GELU
    from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

    for module in network.modules():
        is_tanh = type(module) is GELU and module.approximate == "tanh" and module.proj.weight.device.type != "cuda"
        if is_tanh and sigmoid_wins(torch.get_num_threads()):
            cast(Any, module).gelu = tanh_gelu
        to_itself = isinstance(module, WanAttention) and not module.is_cross_attention
        if not to_itself or type(module.processor) is not WanAttnProcessor:
            continue
        weight, heads = cast(nn.Linear, module.to_q).weight, cast(int, module.heads)
        if weight.device.type == "cuda" or complex_wins(len(weight) // heads, torch.get_num_threads()):
            cast(Any, module).processor = ComplexRotary()


def speed_up_autoencoder(vae: nn.Module) -> None:
    """Change a frozen autoencoder on a CPU in place. Names and weights stay; outputs change in their last bits."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    for module in vae.modules():
        on_cpu = type(module) is WanRMS_norm and module.channel_first and module.gamma.device.type == "cpu"
        if on_cpu and sum_of_squares_wins(len(cast(Tensor, module.gamma)), torch.get_num_threads()):
            cast(Any, module).forward = partial(channel_norm, module)


def channel_norm(norm: Any, x: Tensor) -> Tensor:
    """`WanRMS_norm` over the channels of x [B, C, ...]."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return type(norm).forward(norm, x)
    length = x.square().sum(dim=1, keepdim=True).sqrt().clamp_min(1e-12)
    return x / length * (norm.scale * norm.gamma) + norm.bias


def tanh_gelu(x: Tensor) -> Tensor:
    """Return `F.gelu(x, approximate="tanh")`, x [B, ...]. The bits of a sample do not depend on B."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or x.numel() < MIN_SAMPLE * len(x):
        return F.gelu(x, approximate="tanh")
    return _TanhGelu.apply(x)


class _TanhGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _steepness(x, 1).mul_(x).sigmoid_().mul_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """The output is x s with s = sigmoid(z) and z = x _steepness(x, 1); its derivative is s (1 + x z' (1 - s))."""
        (x,) = ctx.saved_tensors
        s = _steepness(x, 1).mul_(x).sigmoid_()
        slope = _steepness(x, 3).mul_(x)  # x z'
        slope.addcmul_(slope, s, value=-1)
        return s.addcmul_(s, slope).mul_(grad)


def _steepness(x: Tensor, power: int) -> Tensor:
    """_SCALE (1 + power _CUBE x^2)"""
    return torch.addcmul(x.new_tensor(_SCALE), x, x, value=power * _SCALE * _CUBE)


@cache
def sigmoid_wins(threads: int) -> bool:
    """Return whether `tanh_gelu` is faster on this CPU than torch's kernel, backward pass included."""

    def kernels() -> dict[str, Callable[[], object]]:
        x = torch.linspace(-4.0, 4.0, 2**18)[None].requires_grad_()
        torchs = partial(F.gelu, approximate="tanh")
        return {
            name: lambda gelu=gelu: torch.autograd.grad(gelu(x).sum(), x)
            for name, gelu in {"torch": torchs, "sigmoid": tanh_gelu}.items()
        }

    return _chosen("GELU with tanh", kernels, threads) == "sigmoid"


@cache
def sum_of_squares_wins(channels: int, threads: int) -> bool:
    """Return whether `channel_norm` is faster on this CPU than the forward pass of diffusers."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanRMS_norm

    def kernels() -> dict[str, Callable[[], object]]:
        norm, x = WanRMS_norm(channels, images=False), torch.full((1, channels, 4, 16, 16), 0.01)
        return {"diffusers": lambda: norm(x), "sum of squares": lambda: channel_norm(norm, x)}

    return _chosen(f"norm over {channels} channels", kernels, threads) == "sum of squares"


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

    def kernels() -> dict[str, Callable[[], object]]:
        states = torch.full((4, tokens, heads * head_dim), 0.01, requires_grad=True)
        angles = torch.full((1, tokens, 1, head_dim), 0.5)
        processors = {"diffusers": WanAttnProcessor(), "complex product": ComplexRotary()}
        return {name: partial(run, processor, states, angles) for name, processor in processors.items()}

    return _chosen(f"rotary positions, head dim {head_dim}", kernels, threads) == "complex product"


def _chosen(name: str, kernels: Callable[[], dict[str, Callable[[], object]]], threads: int) -> str:
    def choose() -> str:
        torch.set_num_threads(threads)
        return fastest(f"{name}, {threads} threads", kernels(), code=[__file__])

    # In a thread of its own, which has none of the caller's modes of torch.
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(choose).result()


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
