"""The sizes of a diffusers transformer, for `cosmos-rl plan` and checks of [policy.parallel]. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from cosmos_rl_core.parallel.shape import ModelShape
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_wfm.parallel.weights import parameter_shapes

_JOINT = {"SD3Transformer2DModel"}
"""Classes that attend to text and video at once, and have no cross-attention."""
_FEED_FORWARD_COPIES = 2
"""Tensors of a feed-forward's width that its backward pass needs: before and after the activation; no gate."""


def model_shape(
    config: Mapping[str, Any],
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    lora_rank: int = 0,
    lora_targets: Sequence[str] | None = (),
) -> ModelShape | None:
    """Return the shape of the network of a diffusers config.json; None for an unknown class, or missing sizes.

    `vocabulary` is the number of outputs for each token. Activations of cross-attention and of a block's gates
    count as `latent`, which fits measured activations. With adapters all other parameters are frozen.

    Args:
        dtype: dtype of matrix products.
        lora_rank: rank of adapters; 0 for none.
        lora_targets: ends of the names of the linear layers that have them, such as "to_q" or "to_out.0"; None: all.
    """
    try:
        shapes = parameter_shapes(config)
    except KeyError:
        return None
    if not shapes:
        return None
    joint = config["_class_name"] in _JOINT
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    hidden = heads * head_dim
    return ModelShape(
        num_layers=config["num_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=_inner(shapes),
        vocabulary=shapes["proj_out.weight"][0],
        compute_dtype=dtype,
        weights=tuple(WeightSpec(name=name, shape=shape, dtype="float32") for name, shape in sorted(shapes.items())),
        adapter_parameters=_adapter_parameters(shapes, rank=lora_rank, targets=lora_targets),
        stream_norms=2 if joint else 3,
        head_norms=any(name.endswith("norm_q.weight") for name in shapes),
        gate_copies=_FEED_FORWARD_COPIES,
        latent=3 * hidden // 4 if joint else 2 * hidden,
    )


def num_tokens(config: Mapping[str, Any], latents: Sequence[int]) -> int:
    """Return the number of tokens of a clip, which cp shards: patches of its latents (C, f, h, w).

    In an estimate of memory one term, a denoising step, counts as this number of tokens.
    """
    patch = config["patch_size"]
    sizes = (1, patch, patch) if isinstance(patch, int) else tuple(patch)
    return math.prod(-(-length // size) for length, size in zip(latents[1:], sizes))


def _inner(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next(
        shape[0] for name, shape in shapes.items() if name.endswith(("ff.net.0.proj.weight", "ffn.net.0.proj.weight"))
    )


def _adapter_parameters(shapes: Mapping[str, tuple[int, ...]], *, rank: int, targets: Iterable[str] | None) -> int:
    """Numbers in the low-rank updates: rank x (inputs + outputs) of each adapted layer."""
    ends = ".weight" if targets is None else tuple(f".{target}.weight" for target in targets)
    adapted = (shape for name, shape in shapes.items() if f".{name}".endswith(ends))
    return rank * sum(sum(shape) for shape in adapted if len(shape) == 2)
