"""The sizes of a Hugging Face model, from its config.json and the headers of its weights. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl_core.parallel.config import LoraSection, ends_in
from cosmos_rl_core.parallel.estimate import is_expert, layer_of
from cosmos_rl_core.parallel.shape import ModelShape
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.model.checkpoint import read_specs

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_GATE_COPIES = {"gpt_oss": 7}
"""Families whose gated activation is not activation(gate) * up: gpt-oss clamps both and scales the gate."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def read_shape(directory: Path, model: LLMModelConfig) -> ModelShape | None:
    """Return the shape of the model in `directory`; None for a family with other config keys for its sizes."""
    whole = read_json_object(directory / "config.json", hint="see model.path")
    config = whole.get("text_config", whole)
    weights = read_specs(directory)
    if not weights or not all(isinstance(config.get(key), int) for key in _SIZES):
        return None
    layers, hidden, heads, vocabulary = (config[key] for key in _SIZES)
    latent_head = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=latent_head or config.get("head_dim") or hidden // heads,
        intermediate=config.get("intermediate_size") or 0,
        vocabulary=vocabulary,
        stream_norms=sum(
            "norm" in spec.name and spec.shape == (hidden,) for spec in weights if layer_of(spec.name) == 0
        ),
        head_norms=any("q_norm" in spec.name for spec in weights),
        latent=(config.get("q_lora_rank") or 0) + config.get("kv_lora_rank", 0) if latent_head else 0,
        sinks=any(spec.name.endswith(".sinks") for spec in weights),
        gate_copies=_GATE_COPIES.get(config.get("model_type", ""), 4),
        compute_dtype=model.dtype,
        weights=tuple(weights),
        adapter_parameters=_adapter_parameters(weights, model.lora, experts=_first(config, _EXPERTS)),
        **_expert_sizes(config, weights),
    )


def _expert_sizes(config: Mapping[str, Any], weights: Iterable[WeightSpec]) -> dict[str, Any]:
    """Additional sizes of a mixture of experts; empty for a dense model."""
    number = _first(config, _EXPERTS)
    with_experts = sorted(
        {layer for spec in weights if is_expert(spec.name) and (layer := layer_of(spec.name)) is not None}
    )
    if not number or not with_experts:
        return {}
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        "experts": number,
        "experts_per_token": config.get("num_experts_per_tok", 1),
        "expert_intermediate": width,
        "shared_intermediate": (config.get("n_shared_experts") or 0) * width
        or config.get("shared_expert_intermediate_size", 0),
        "dense_layers": with_experts[0],
    }


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int:
    return next((config[key] for key in keys if config.get(key)), 0)


def _adapter_parameters(weights: Iterable[WeightSpec], lora: LoraSection | None, *, experts: int) -> int:
    """Number of parameters in the low-rank updates of linear layers: rank x (inputs + outputs) each."""
    if lora is None:
        return 0
    return sum(lora.rank * sum(spec.shape) for spec in weights if _is_adapted(spec, lora, experts=experts))


def _is_adapted(spec: WeightSpec, lora: LoraSection, *, experts: int) -> bool:
    if len(spec.shape) != 2 or layer_of(spec.name) is None or is_expert(spec.name) or spec.shape[0] == experts:
        return False
    return lora.target_modules == "all-linear" or ends_in(spec.name.removesuffix(".weight"), lora.target_modules)
