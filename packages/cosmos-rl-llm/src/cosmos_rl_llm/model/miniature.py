"""A small model of the same family: the model's configuration with small sizes.

    config of 32 layers, 4096 wide      layer_types  c c a c c a ...    experts 64    window 4096
    miniature of 4 layers, 64 wide                   c a c a                     4            6

Every value that selects code is kept: layer types, activations, norms, scales, soft caps, biases. Windows and chunks
become shorter than a probe's sequences, so that they take effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_llm.model.causal_lm import LOADING

VOCABULARY = 61
NUM_LAYERS = 4
_SPREAD = 0.15
"""Standard deviation of initial values: with the usual 0.02 a small model's layers hardly change its logits."""

_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "decoder_layers",
    "encoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
)
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "model_dim", "word_embed_proj_dim", "embedding_size", "emb_dim")
_WIDTH = 64
_NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(_LAYERS, NUM_LAYERS),
    **dict.fromkeys(_WIDTHS, _WIDTH),
    **dict.fromkeys(("lru_width", "embedding_dim", "out_hidden_size", "ple_embed_dim"), _WIDTH),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCABULARY),
    # Feed-forward networks and experts
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "dff", "dim_ff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "router_hidden_size"), 32),
    **dict.fromkeys(_NUM_EXPERTS, 4),
    # Attention
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads", "attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_attention_heads_per_layer",), 4),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "index_head_dim", "global_head_dim", "d_head"), 16),
    **{"v_head_dim": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24, "rotary_dim": 8},
    **{"indexer_head_dim": 16, "indexer_n_heads": 4},
    **{"query_pre_attn_scalar": 16, "q_lora_rank": 24, "kv_lora_rank": 16, "o_lora_rank": 16, "d_rel": 8},
    # Recurrent states: a width of 64 expands to 128
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **{"mamba_expand": 2, "expand": 2, "mamba_d_ssm": 128, "attention_hidden_size": 128, "attention_head_dim": 32},
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "num_mem_blocks"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size", "time_step_rank", "mamba_dt_rank"), 8),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    # Keys of few families
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "adapter_rank", "hc_lowrank", "gated_norm_rank"), 8),
    **{"block_multiple_of": 8, "dim_model_base": 16, "zero_expert_num": 2},
    **{"patch_size": 4, "image_size": 8, "mm_tokens_per_image": 4},
    **{"encoder_hash_byte_group_vocab": 64, "num_layers_per_stack": 2, "moe_layer_end_index": 3},
}
"""Key -> new value, unless it is 0 or missing."""
WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size", "sliding_window_size"),
    *("local_attention", "swa_window_size", "keep_window_size", "local_window_size"),
)
"""Names of the number of tokens that an attention with a window sees."""
_AT_MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "num_kv_shared_layers", "max_window_layers"), 2),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1, "o_groups": 2},
    **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    # Windows
    **dict.fromkeys(WINDOWS, 6),
    **{"sliding_window_pattern": 2, "attention_chunk_size": 8, "rel_extent": 8},
    **{
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "index_topk": 6,
        "index_topk_blocks": 2,
        "index_block_size": 4,
    },
}
_AT_LEAST: Mapping[str, int] = dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64
)
_WIDENED = (
    *_WIDTHS,
    *(
        "lru_width",
        "embedding_dim",
        "out_hidden_size",
        "vocab_size",
        "vocab_size_per_layer_input",
        "decoder_vocab_size",
    ),
    *("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "dff", "dim_ff", "decoder_ffn_dim"),
    *("encoder_ffn_dim", "intermediate_size_mlp", "dense_intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("expert_ffn_hidden_size", "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"),
    *("encoder_attention_heads", "swa_num_attention_heads", "attention_heads", "num_encoder_attention_heads"),
    *("num_decoder_attention_heads", "num_attention_heads_per_layer", "num_key_value_heads", "num_kv_heads"),
    *("swa_num_key_value_heads", "num_global_key_value_heads", "num_query_groups", "q_lora_rank", "kv_lora_rank"),
    *("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "mamba_d_ssm", "attention_hidden_size"),
)
_ORIGINAL = 18
"""Length up to which a rotary embedding that depends on the length stays as it is."""
_SPREADS = ("initializer_range", "init_std", "init_method_std", "initializer_std")
_PLACES = ("moe_layers", "attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers", "ple_layer_ids")
"""Keys with layer numbers."""
_DROPPED = ("quantization_config", "architectures", "dtype", "torch_dtype", "transformers_version", "auto_map")


@dataclass(frozen=True, slots=True)
class MiniatureSize:
    """The size of a miniature; ranks that share one need as many layers, heads and experts at least."""

    layers: int = NUM_LAYERS
    widths: int = 1
    """Multiple of the widths, heads and latents, and of the vocabulary."""
    experts: int = 1
    """Multiple of the experts."""


def miniature(
    kind: type[PreTrainedModel], config: PreTrainedConfig, size: MiniatureSize = MiniatureSize()
) -> PreTrainedModel:
    """Make a small float32 model of the class `kind` from a model's configuration, with random values.

    It uses transformers' eager attention, since its fused attention omits soft caps and sinks. The same
    configuration gives the same values; the caller's random state does not change.
    """
    with LOADING, forked_rng(seed=0):
        shrunk = type(config).from_dict(widen(shrink(config.to_dict(), num_layers=size.layers), size))
        small = kind._from_config(shrunk, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in small.parameters():  # also those that start at zero or one, such as sinks and biases
                parameter.add_(torch.randn_like(parameter), alpha=0.3 * _SPREAD)
    return small


def shrink(values: Mapping[str, Any], *, num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """Return the values of a configuration, with few layers and small sizes; small sizes are unchanged."""
    depth = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), None)
    kept = _kept_layers(values, depth, num_layers)
    shrunk = {
        key: _table(key, value, kept, num_layers) if isinstance(value, Mapping) else _value(key, value, depth, kept)
        for key, value in values.items()
        if key not in _DROPPED
    }
    shrunk |= {key: len(kept) or num_layers for key in _LAYERS if values.get(key) == depth is not None}
    shrunk |= _special_tokens(values) | _heads(values)
    return shrunk | _rotary(values, shrunk)


def _value(key: str, value: Any, depth: int | None, kept: Sequence[int]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if key in _PLACES:
        return [place for place in range(NUM_LAYERS) if place % 2] if value else value
    if _is_by_layer(key, value, depth):
        return [_value(key, value[layer], None, ()) for layer in kept]
    if not isinstance(value, int) or value == 0:
        return _SPREAD if key in _SPREADS else value
    if key in _SIZES:
        return _SIZES[key]
    return max(min(value, _AT_MOST.get(key, value)), _AT_LEAST.get(key, 0))


def _table(key: str, values: Mapping[str, Any], kept: Sequence[int], num_layers: int) -> dict[str, Any]:
    if "model_type" in values:  # the configuration of a part
        return shrink(values, num_layers=num_layers)
    if key == "per_layer_config":
        layers = {str(layer): value for layer, value in values.items()}
        return {str(place): shrink(layers[str(at)]) for place, at in enumerate(kept) if str(at) in layers}
    return dict(values)


def _is_by_layer(key: str, value: Any, depth: int | None) -> bool:
    """Whether a list has a value for each layer: others, such as tokens that end a response, may be as long."""
    named = re.search("layer|block|pattern|types", key) is not None or key in _SIZES or key in _AT_MOST
    return named and key not in _PLACES and isinstance(value, list) and len(value) == depth


def _kept_layers(values: Mapping[str, Any], depth: int | None, num_layers: int) -> list[int]:
    """One layer of each kind, in order, then the first ones again up to `num_layers`; empty without kinds."""
    lists = [value for key, value in values.items() if _is_by_layer(key, value, depth)]
    if not lists:
        return []
    kinds: dict[str, int] = {}
    for layer, kind in enumerate(zip(*lists, strict=True)):
        kinds.setdefault(repr(kind), layer)
    first = sorted(kinds.values())
    return first + [first[i % len(first)] for i in range(num_layers - len(first))]


def widen(values: Mapping[str, Any], size: MiniatureSize) -> dict[str, Any]:
    """Return the values of a small configuration with the widths and the number of experts of `size`."""
    times = dict.fromkeys(_WIDENED, size.widths) | dict.fromkeys(_NUM_EXPERTS, size.experts)
    return {key: _widened(value, times.get(key, 1), size) for key, value in values.items()}


def _widened(value: Any, times: int, size: MiniatureSize) -> Any:
    if isinstance(value, Mapping):
        return widen(value, size)
    if isinstance(value, list):
        return [_widened(each, times, size) for each in value]
    return value * times if type(value) is int else value


def _special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Move special tokens outside of the small vocabulary into it."""
    names = [key for key in values if key.endswith(("_token_id", "_token_index"))]
    high = [key for key in names if isinstance(values[key], int) and values[key] >= VOCABULARY]
    moved = {key: place for place, key in enumerate(sorted(high))}
    return moved | ({"eos_token_id": 2} if isinstance(values.get("eos_token_id"), list) else {})


def _heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that depend on one another."""
    together: dict[str, Any] = {}
    if "qk_rope_head_dim" in values:  # latent attention: every head has its own keys
        together |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in values else {})
    elif values.get("num_key_value_heads") == values.get("num_attention_heads") is not None:
        together["num_key_value_heads"] = _SIZES["num_attention_heads"]
    if {"num_heads", "head_dim", "expand", "state_size"} <= values.keys():  # Mamba-2: all heads together form a state
        together |= {"num_heads": 8, "head_dim": 16}
    return together


def _rotary(values: Mapping[str, Any], shrunk: Mapping[str, Any]) -> dict[str, Any]:
    """Factors of a rotary embedding, and sections of one along several axes: one for each pair of a head's elements."""
    rope = shrunk.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return {}
    if "rope_type" not in rope:  # by kind of layer
        tables = {kind: _rotary(values, {**shrunk, "rope_parameters": table}) for kind, table in rope.items()}
        changes = {kind: table.pop("rope_parameters", rope[kind]) for kind, table in tables.items()}
        return {"rope_parameters": changes} | {k: v for table in tables.values() for k, v in table.items()}
    changed: dict[str, Any] = {}
    if isinstance(rope.get("long_factor"), list):
        kept = round(len(rope["long_factor"]) * _head_dim(shrunk) / _head_dim(values))
        changed = {key: rope[key][:kept] for key in ("short_factor", "long_factor")}
    if isinstance(sections := rope.get("mrope_section"), list):
        pairs = round(sum(sections) * _head_dim(shrunk) / _head_dim(values))
        ends = [round(pairs * sum(sections[: place + 1]) / sum(sections)) for place in range(len(sections))]
        changed["mrope_section"] = [end - start for start, end in zip([0, *ends], ends)]
    if rope["rope_type"] == "longrope":
        changed["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], _ORIGINAL)
    limits = ("max_position_embeddings",) if rope["rope_type"] == "dynamic" else ("original_max_position_embeddings",)
    length_dependent = rope["rope_type"] in ("longrope", "dynamic")
    short = {key: min(values[key], _ORIGINAL) for key in limits if length_dependent and values.get(key)}
    return short | ({"rope_parameters": {**rope, **changed}} if changed else {})


def _head_dim(values: Mapping[str, Any]) -> int:
    dim = values.get("qk_rope_head_dim") or values.get("head_dim")
    return dim or values["hidden_size"] // values["num_attention_heads"]
