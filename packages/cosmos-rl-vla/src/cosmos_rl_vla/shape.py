"""Sizes of a recipe's model, read from its config.json and the headers of its weights. No torch.

A model from scratch is small; its sizes are known once it is built. The tokens of a term are its part of a decision's
tokens: all of them if a term is a chunk or a frame of a demonstration. Tokens are counted for one camera.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_rl_core.parallel.config import LoraSection, ends_in
from cosmos_rl_core.plan.estimate import layer_of
from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_core.storage.safetensors_header import read_header, weight_files
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_vla.config import VLAModelConfig, VLASampling
from cosmos_rl_vla.models.pi.config import full

_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CHUNK = {"horizon": 8, "action_dim": 7}
"""Defaults where neither a public directory nor the recipe has them."""
_TEXT = 64
"""Approximate number of tokens of an instruction."""
_VELOCITY = 32
"""Output dimensions per action of a pi model, in place of a vocabulary."""
_TRUNK = "paligemma_with_expert.paligemma."
"""Part of the names of the weights of a pi model's language and vision model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """Sizes of the layers that receive gradients."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tokens: int
    """Tokens of a decision with one camera, in these layers."""


def read_shape(model: VLAModelConfig, sampling: VLASampling | None) -> ModelShape | None:
    """Return the shape of the model in a directory; None from scratch, and for a family without transformer.

    sampling: None in supervised training.
    """
    if not model.path:
        return None
    directory = Path(model.path).expanduser()
    decoder = _decoder(directory, model)
    weights = read_weights(directory)
    if decoder is None or not weights:
        return None
    lora = model.lora
    adapted = () if lora is None else (spec.shape for spec in weights if _is_adapted(spec, lora))
    return ModelShape(
        num_layers=decoder.layers,
        hidden=decoder.hidden,
        heads=decoder.heads,
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        intermediate=decoder.intermediate,
        vocabulary=decoder.vocabulary,
        compute_dtype=model.dtype,
        reference_dtype=model.dtype,
        weights=weights,
        tokens_per_term=-(-decoder.tokens // _terms_of_a_decision(directory, model, sampling)),
        axes=frozenset(),
        adapter_parameters=0 if lora is None else lora.rank * sum(map(sum, adapted)),
        frozen=frozenset(spec.name for spec in weights if model.train == "expert" and _TRUNK in spec.name),
    )


def _terms_of_a_decision(directory: Path, model: VLAModelConfig, sampling: VLASampling | None) -> int:
    if sampling is None or sampling.terms == "chunk":
        return 1
    config = {**_CHUNK, **read_json_object(directory / "config.json", hint="see model.path")}
    actions = model.horizon or config["horizon"]
    return actions if sampling.terms == "action" else actions * (model.action_dim or config["action_dim"])


def _decoder(directory: Path, model: VLAModelConfig) -> _Decoder | None:
    path = directory / "config.json"
    if not path.is_file():
        return None  # building the model reports the error
    config = read_json_object(path, hint="see model.path")
    match config.get("model_type", config.get("type")):
        case "openvla":
            return _llama(config)
        case "cosmos_rl_mlp":
            return None
    size = full("pi05", horizon=1, action_dim=1)
    sizes, vision = (size.expert if model.train == "expert" else size.language), size.vision
    part = "expert" if model.train == "expert" else "language"
    gemma = config[part] if part in config else {name: getattr(sizes, name) for name in sizes.__slots__}
    image, patch = (config.get("vision", {}).get(name, getattr(vision, name)) for name in ("image_size", "patch_size"))
    horizon = config.get("model_horizon", config.get("chunk_size", config.get("action_horizon", size.model_horizon)))
    return _Decoder(
        layers=gemma["depth"],
        hidden=gemma["width"],
        heads=gemma["heads"],
        kv_heads=gemma["kv_heads"],
        head_dim=gemma["head_dim"],
        intermediate=gemma["mlp"],
        vocabulary=_VELOCITY,
        tokens=horizon if model.train == "expert" else (image // patch) ** 2 + _TEXT,
    )


def _llama(config: Mapping[str, Any]) -> _Decoder:
    """Read the sizes of a public config; the defaults, as in transformers, are those of Llama 2 7B."""
    sizes = {
        "vocab_size": 32_064,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        **config.get("text_config", {}),
    }
    heads = sizes["num_attention_heads"]
    return _Decoder(
        layers=sizes["num_hidden_layers"],
        hidden=sizes["hidden_size"],
        heads=heads,
        kv_heads=sizes.get("num_key_value_heads") or heads,
        head_dim=sizes["hidden_size"] // heads,
        intermediate=sizes["intermediate_size"],
        vocabulary=sizes["vocab_size"],
        tokens=(config.get("image_sizes", [224])[0] // 14) ** 2 + _TEXT,
    )


def _is_adapted(spec: WeightSpec, lora: LoraSection) -> bool:
    if len(spec.shape) != 2 or layer_of(spec.name) is None:
        return False
    return lora.target_modules == "all-linear" or ends_in(spec.name.removesuffix(".weight"), lora.target_modules)


def read_weights(directory: Path) -> tuple[WeightSpec, ...]:
    """Read names and shapes from the headers of a directory's safetensors files."""
    specs = {}
    for path in weight_files(directory, "*model*.safetensors"):
        with path.open("rb") as file:
            for name, place in read_header(file, name=f"model.path: {path}").items():
                if (dtype := _TYPES.get(place.dtype)) is not None:
                    specs[name] = WeightSpec(name=name, shape=place.shape, dtype=dtype)
    return tuple(specs[name] for name in sorted(specs))
