"""The sizes of a recipe's network, read from its configuration: for `cosmos-rl plan` and checks of [policy.parallel].

No torch: the controller calls this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_wfm.data.config import WFMDataConfig
from cosmos_rl_wfm.models.classes import ATTENTION, compression, network_class
from cosmos_rl_wfm.models.config import WFMLoraSection, WFMModelConfig
from cosmos_rl_wfm.models.folder import is_here, network_of, open_source, vae_of


def read_shape(model: WFMModelConfig, data: WFMDataConfig) -> ModelShape | None:
    """Return the shape of a model; None if it is not known before the model is built.

    Raises UserError for a model on this machine that is not supported.
    """
    if not is_here(model):
        return None
    folder = open_source(model)
    class_name, config = network_of(model, folder)
    shape = model_shape(
        {**config, "_class_name": class_name},
        dtype=model.dtype,
        lora_rank=0 if model.lora is None else model.lora.rank,
        lora_targets=_lora_targets(model.lora, class_name),
    )
    if shape is None:
        return None
    _, frames, pixels = (1, 1, 1) if model.codec == "pixels" else compression(*vae_of(model, folder))
    size = data.size
    latents = (1, (size.frames - 1) // frames + 1, size.height // pixels, size.width // pixels)
    return replace(
        shape,
        tokens_per_term=num_tokens(_complete({**config, "_class_name": class_name}), latents),
        axes=frozenset({"cp"}),
    )


def _lora_targets(lora: WFMLoraSection | None, class_name: str) -> tuple[str, ...] | None:
    """Name suffixes of adapted layers; None for all linear layers."""
    row = network_class(class_name)
    family = ATTENTION if row is None else row.lora_targets
    targets = family if lora is None else lora.targets(family)
    return None if targets == "all-linear" else targets


_JOINT = {"SD3Transformer2DModel"}
"""Classes that attend to text and video at once, and have no cross-attention."""
_FEED_FORWARD_COPIES = 2
"""Tensors of a feed-forward's width that its backward pass needs: before and after the activation; no gate. The second
is the input of a linear layer: it is not needed if that is frozen without an adapter."""


def model_shape(
    config: Mapping[str, Any],
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    lora_rank: int = 0,
    lora_targets: Sequence[str] | None = (),
) -> ModelShape | None:
    """Return the shape of the network of a diffusers config.json; None for an unknown class.

    `vocabulary` is the number of outputs for each token. Activations of cross-attention and of a block's gates
    count as `latent`, which fits measured activations. With adapters all other parameters are frozen.

    Args:
        dtype: dtype of matrix products.
        lora_rank: rank of adapters; 0 for none.
        lora_targets: ends of the names of the linear layers that have them, such as "to_q" or "to_out.0"; None: all.
    """
    if not (shapes := parameter_shapes(config)):
        return None
    config = _complete(config)
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
        reference_dtype=dtype,
        weights=tuple(WeightSpec(name=name, shape=shape, dtype="float32") for name, shape in sorted(shapes.items())),
        adapter_parameters=_adapter_parameters(shapes, rank=lora_rank, targets=lora_targets),
        stream_norms=2 if joint else 3,
        head_norms=any(name.endswith("norm_q.weight") for name in shapes),
        gate_copies=_FEED_FORWARD_COPIES - _is_frozen(shapes, "net.2", rank=lora_rank, targets=lora_targets),
        unread_inputs=_unread_inputs(shapes, hidden, rank=lora_rank, targets=lora_targets),
        latent=3 * hidden // 4 if joint else 2 * hidden,
        exchanges=0 if joint else 2,
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


def _is_frozen(shapes: Mapping[str, Any], layer: str, *, rank: int, targets: Iterable[str] | None) -> bool:
    """Whether linear layers whose names end with `layer` are neither trained nor adapted."""
    if not rank or targets is None:
        return False
    ends = tuple(f".{target}" for target in targets)
    return not any(f".{name.removesuffix('.weight')}".endswith(ends) for name in shapes if f"{layer}.weight" in name)


def _unread_inputs(shapes: Mapping[str, Any], hidden: int, *, rank: int, targets: Iterable[str] | None) -> int:
    """Numbers a token that a block with adapters does not keep: the inputs of its feed-forward and of its two gates."""
    return hidden * (_is_frozen(shapes, "net.0.proj", rank=rank, targets=targets) + (2 if rank else 0))


def _adapter_parameters(shapes: Mapping[str, tuple[int, ...]], *, rank: int, targets: Iterable[str] | None) -> int:
    """Numbers in the low-rank updates: rank x (inputs + outputs) of each adapted layer."""
    ends = ".weight" if targets is None else tuple(f".{target}.weight" for target in targets)
    adapted = (shape for name, shape in shapes.items() if f".{name}".endswith(ends))
    return rank * sum(sum(shape) for shape in adapted if len(shape) == 2)


Config = Mapping[str, Any]
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def parameter_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter by checkpoint name; empty for an unknown class.

    Args:
        config: of diffusers, with `_class_name`; what it leaves out is as in diffusers.
    """
    shapes = _CLASSES.get(config.get("_class_name", ""))
    return dict(shapes(_complete(config))) if shapes is not None else {}


def _complete(config: Config) -> Config:
    return {**DEFAULTS[config["_class_name"]], **config}


def _wan(config: Config) -> Shapes:
    hidden = _hidden(config)
    patch, channels = tuple(config["patch_size"]), config["in_channels"]
    yield "scale_shift_table", (1, 2, hidden)
    yield "patch_embedding.weight", (hidden, channels, *patch)
    yield "patch_embedding.bias", (hidden,)
    embedder = "condition_embedder"
    yield from _linear(f"{embedder}.time_embedder.linear_1", config["freq_dim"], hidden)
    yield from _linear(f"{embedder}.time_embedder.linear_2", hidden, hidden)
    yield from _linear(f"{embedder}.time_proj", hidden, 6 * hidden)
    yield from _linear(f"{embedder}.text_embedder.linear_1", config["text_dim"], hidden)
    yield from _linear(f"{embedder}.text_embedder.linear_2", hidden, hidden)
    if image := config.get("image_dim"):
        yield from _wan_image(f"{embedder}.image_embedder", image, hidden, tokens=config.get("pos_embed_seq_len"))
    for layer in range(config["num_layers"]):
        block = f"blocks.{layer}"
        yield f"{block}.scale_shift_table", (1, 6, hidden)
        for attention in ("attn1", "attn2"):
            yield from _attention(f"{block}.{attention}", hidden, keys=hidden, norm=hidden, bias=True)
        if added := config.get("added_kv_proj_dim"):
            yield from _linear(f"{block}.attn2.add_k_proj", added, hidden)
            yield from _linear(f"{block}.attn2.add_v_proj", added, hidden)
            yield f"{block}.attn2.norm_added_k.weight", (hidden,)
        if config["cross_attn_norm"]:
            yield from _norm(f"{block}.norm2", hidden)
        yield from _feed_forward(f"{block}.ffn", hidden, config["ffn_dim"], bias=True)
    yield from _linear("proj_out", hidden, (config["out_channels"] or channels) * math.prod(patch))


def _wan_image(name: str, image: int, hidden: int, *, tokens: int | None) -> Shapes:
    if tokens is not None:
        yield f"{name}.pos_embed", (1, tokens, image)
    yield from _norm(f"{name}.norm1", image)
    yield from _linear(f"{name}.ff.net.0.proj", image, image)
    yield from _linear(f"{name}.ff.net.2", image, hidden)
    yield from _norm(f"{name}.norm2", hidden)


def _cosmos(config: Config) -> Shapes:
    hidden, narrow = _hidden(config), config["adaln_lora_dim"]
    patch = tuple(config["patch_size"])
    channels = config["in_channels"] + bool(config["concat_padding_mask"])
    yield "patch_embed.proj.weight", (hidden, channels * math.prod(patch))
    if config["extra_pos_embed_type"] == "learnable":
        for axis, size, along in zip("thw", config["max_size"], patch):
            yield f"learnable_pos_embed.pos_emb_{axis}", (size // along, hidden)
    yield "time_embed.t_embedder.linear_1.weight", (hidden, hidden)
    yield "time_embed.t_embedder.linear_2.weight", (3 * hidden, hidden)
    yield "time_embed.norm.weight", (hidden,)
    for layer in range(config["num_layers"]):
        block = f"transformer_blocks.{layer}"
        for norm in ("norm1", "norm2", "norm3"):
            yield f"{block}.{norm}.linear_1.weight", (narrow, hidden)
            yield f"{block}.{norm}.linear_2.weight", (3 * hidden, narrow)
        keys = {"attn1": hidden, "attn2": config["text_embed_dim"]}
        for attention, width in keys.items():
            head = config["attention_head_dim"]
            yield from _attention(f"{block}.{attention}", hidden, keys=width, norm=head, bias=False)
        if config.get("img_context_dim_in"):
            for part in "qkv":
                yield f"{block}.attn2.{part}_img.weight", (hidden, hidden)
            yield f"{block}.attn2.q_img_norm.weight", (config["attention_head_dim"],)
            yield f"{block}.attn2.k_img_norm.weight", (config["attention_head_dim"],)
        yield from _feed_forward(f"{block}.ff", hidden, int(hidden * config["mlp_ratio"]), bias=False)
    yield "norm_out.linear_1.weight", (narrow, hidden)
    yield "norm_out.linear_2.weight", (2 * hidden, narrow)
    yield "proj_out.weight", (math.prod(patch) * config["out_channels"], hidden)
    if config.get("use_crossattn_projection"):
        outputs = config["encoder_hidden_states_channels"]
        yield from _linear("crossattn_proj.0", config["crossattn_proj_in_channels"], outputs)
    if image := config.get("img_context_dim_in"):
        yield from _linear("img_context_proj.0", image, config["img_context_dim_out"])


def _sd3(config: Config) -> Shapes:
    hidden, size = _hidden(config), config["patch_size"]
    yield "pos_embed.proj.weight", (hidden, config["in_channels"], size, size)
    yield "pos_embed.proj.bias", (hidden,)
    for part, inputs in {"timestep": 256, "text": config["pooled_projection_dim"]}.items():
        yield from _linear(f"time_text_embed.{part}_embedder.linear_1", inputs, hidden)
        yield from _linear(f"time_text_embed.{part}_embedder.linear_2", hidden, hidden)
    yield from _linear("context_embedder", config["joint_attention_dim"], config["caption_projection_dim"])
    for layer in range(config["num_layers"]):
        last = layer == config["num_layers"] - 1
        yield from _sd3_block(f"transformer_blocks.{layer}", config, last=last, dual=layer in _dual(config))
    yield from _linear("norm_out.linear", hidden, 2 * hidden)
    yield from _linear("proj_out", hidden, size * size * (config["out_channels"] or config["in_channels"]))


def _sd3_block(block: str, config: Config, *, last: bool, dual: bool) -> Shapes:
    """The last block has no use for text behind its attention."""
    hidden = _hidden(config)
    norm = config["attention_head_dim"] if config.get("qk_norm") else 0
    yield from _linear(f"{block}.norm1.linear", hidden, (9 if dual else 6) * hidden)
    yield from _linear(f"{block}.norm1_context.linear", hidden, (2 if last else 6) * hidden)
    yield from _attention(f"{block}.attn", hidden, keys=hidden, norm=norm, bias=True)
    for part in "qkv":
        yield from _linear(f"{block}.attn.add_{part}_proj", hidden, hidden)
    for part in "qk" if norm else "":
        yield f"{block}.attn.norm_added_{part}.weight", (norm,)
    if dual:
        yield from _attention(f"{block}.attn2", hidden, keys=hidden, norm=norm, bias=True)
    yield from _feed_forward(f"{block}.ff", hidden, 4 * hidden, bias=True)
    if not last:
        yield from _linear(f"{block}.attn.to_add_out", hidden, hidden)
        yield from _feed_forward(f"{block}.ff_context", hidden, 4 * hidden, bias=True)


def _linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Shapes:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _attention(name: str, hidden: int, *, keys: int, norm: int, bias: bool) -> Shapes:
    """keys: width of what keys and values are made from; norm: width of a norm of queries and keys, 0 for none."""
    inputs = {"to_q": hidden, "to_k": keys, "to_v": keys, "to_out.0": hidden}
    for part, width in inputs.items():
        yield from _linear(f"{name}.{part}", width, hidden, bias=bias)
    for part in "qk" if norm else "":
        yield f"{name}.norm_{part}.weight", (norm,)


def _feed_forward(name: str, hidden: int, inner: int, *, bias: bool) -> Shapes:
    yield from _linear(f"{name}.net.0.proj", hidden, inner, bias=bias)
    yield from _linear(f"{name}.net.2", inner, hidden, bias=bias)


def _hidden(config: Config) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def _dual(config: Config) -> tuple[int, ...]:
    return tuple(config.get("dual_attention_layers") or ())


_CLASSES: Mapping[str, Callable[[Config], Shapes]] = {
    "CosmosTransformer3DModel": _cosmos,
    "SD3Transformer2DModel": _sd3,
    "WanTransformer3DModel": _wan,
}

_PATCH = (1, 2, 2)
DEFAULTS: Mapping[str, Config] = {
    "CosmosTransformer3DModel": {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 32,
        "attention_head_dim": 128,
        "num_layers": 28,
        "mlp_ratio": 4.0,
        "text_embed_dim": 1024,
        "adaln_lora_dim": 256,
        "max_size": (128, 240, 240),
        "patch_size": _PATCH,
        "concat_padding_mask": True,
        "extra_pos_embed_type": "learnable",
        "crossattn_proj_in_channels": 1024,
        "encoder_hidden_states_channels": 1024,
        "img_context_dim_out": 2048,
    },
    "SD3Transformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "num_layers": 18,
        "attention_head_dim": 64,
        "num_attention_heads": 18,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1152,
        "pooled_projection_dim": 2048,
        "out_channels": 16,
    },
    "WanTransformer3DModel": {
        "patch_size": _PATCH,
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": 13824,
        "num_layers": 40,
        "cross_attn_norm": True,
    },
}
"""Of diffusers' constructors: the values of keys that a config.json leaves out."""
