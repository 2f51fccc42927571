"""A model's directory: its location, its weights by the headers of its safetensors, and its sizes. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.config import LoraSection, ends_in
from cosmos_rl_core.plan.estimate import is_expert, layer_of
from cosmos_rl_core.plan.shape import ModelShape
from cosmos_rl_core.settings.problems import neighbour
from cosmos_rl_core.storage import hub
from cosmos_rl_core.storage.json_files import read_json_object
from cosmos_rl_core.storage.safetensors_header import read_header, weight_files
from cosmos_rl_core.types import WeightSpec
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.model.bin_weights import convert_bin_weights
from cosmos_rl_llm.model.vision_parts import part_of

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
"""Files of which a tokenizer has one."""
CHECKPOINT_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}


def resolve(path_or_id: str | os.PathLike[str]) -> str:
    """Return the path or id for transformers, with safetensors. Raises UserError for an incomplete local directory."""
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise UserError(
                f"model.path = {text!r} contains adapters of another model; set it to that model, or to the result of "
                "`cosmos-rl export --merge-adapters`"
            )
        if not (path / "config.json").is_file():
            raise UserError(f"model.path = {text!r} has no config.json; set it to a Hugging Face directory")
        convert_bin_weights(path)
        return str(path)
    looks_local = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or path.exists()
    if looks_local:
        remedy = neighbour(Path(text)) or "set it to one with config.json and *.safetensors, or to a Hugging Face id"
        raise UserError(f"model.path = {text!r} is not a directory; {remedy}")
    return text


def read_specs(directory: Path) -> list[WeightSpec]:
    """Return the weights of the model in `directory`, by name. Raises UserError for a damaged file."""
    specs = [spec for file in weight_files(directory) for spec in _read_header(file)]
    return sorted(specs, key=lambda spec: spec.name)


def _read_header(path: Path) -> list[WeightSpec]:
    try:
        with path.open("rb") as file:
            places = read_header(file, name=f"model.path: {path}")
    except OSError as error:
        raise UserError(f"model.path: {path} cannot be read: {error.strerror}") from error
    return [
        WeightSpec(name=name, shape=place.shape, dtype=_DTYPES.get(place.dtype) or place.dtype)
        for name, place in places.items()
    ]


SCORE_WEIGHT = "score.weight"
"""The head of a reward model in its files: [1, hidden]."""


def check_reward_model(directory: Path) -> None:
    """Raise UserError for a directory of a model without a head of one output: a new one would score at random."""
    heads = [spec for spec in read_specs(directory) if spec.name == SCORE_WEIGHT]
    if not heads:
        raise UserError(
            f"{str(directory)!r} has no {SCORE_WEIGHT} and is no reward model; take the result of a run with "
            'algorithm.name = "reward_model"'
        )
    if heads[0].shape[0] != 1:
        raise UserError(f"{str(directory)!r} is a classifier of {heads[0].shape[0]} outputs; a reward model has one")


def model_folder(path: str, revision: str | None) -> Path | None:
    """Return a model's folder, here or in the hub's cache; None for one that is not on this machine."""
    source = Path(resolve(path))
    return source if source.is_dir() else hub.cached_model(path, revision)


def read_context(directory: Path) -> int | None:
    """Return the model's maximum number of positions; None without a limit."""
    config = read_json_object(directory / "config.json", hint="see model.path")
    text = config.get("text_config")
    limit = (text if isinstance(text, dict) else config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None


SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""Keys of config.json under which most families have the sizes of the decoder."""
_GATE_COPIES = {"gpt_oss": 7}
"""Families whose gated activation is not activation(gate) * up: gpt-oss clamps both and scales the gate."""
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys of config.json under which families have the number of routed experts."""


def read_shape(
    directory: Path, model: LLMModelConfig, weights: Sequence[WeightSpec] | None = None
) -> ModelShape | None:
    """Return the shape of the model in `directory`; None for a family with other config keys for its sizes.

    `weights`: of the model; None: by its safetensors.
    """
    weights = read_specs(directory) if weights is None else weights
    model_config = read_json_object(directory / "config.json", hint="see model.path")
    config = model_config.get("text_config", model_config)
    if not weights or not all(isinstance(config.get(key), int) for key in SIZES):
        return None
    layers, hidden, heads, vocabulary = (config[key] for key in SIZES)
    latent_head = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
    head_dim = latent_head or config.get("head_dim") or hidden // heads
    parts = {spec.name: part_of(spec.name) for spec in weights}
    beside = {name: part for name, part in parts.items() if part != "language_model"}
    tower = {name: layer_of(name) if part == "tower" else None for name, part in beside.items()}
    in_full = frozenset(name for name, part in parts.items() if model.lora is not None and part in model.lora.whole)
    adaptable = [spec for spec in weights if spec.name not in in_full and parts[spec.name] not in model.freeze]
    are_frozen = partial(_are_frozen, weights, model.lora)
    return ModelShape(
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=config.get("intermediate_size") or 0,
        vocabulary=vocabulary,
        stream_norms=sum(
            "norm" in spec.name and spec.shape == (hidden,)
            for spec in weights
            if layer_of(spec.name) == 0 and spec.name not in tower
        ),
        head_norms=any("q_norm" in spec.name for spec in weights),
        latent=(config.get("q_lora_rank") or 0) + config.get("kv_lora_rank", 0) if latent_head else 0,
        sinks=any(spec.name.endswith(".sinks") for spec in weights),
        gate_copies=_GATE_COPIES.get(config.get("model_type", ""), 4) - are_frozen("down_proj"),
        compute_dtype=model.dtype,
        reference_dtype=model.dtype,
        weights=tuple(weights),
        frozen=frozenset(name for name, part in parts.items() if part in model.freeze),
        tower=tower,
        adapter_parameters=_adapter_parameters(adaptable, model.lora, experts=_first(config, EXPERT_KEYS))
        + sum(math.prod(spec.shape) for spec in weights if spec.name in in_full),
        whole=in_full,
        unread_inputs=heads * head_dim * are_frozen("o_proj")
        + hidden * are_frozen("gate_proj", "up_proj", "gate_up_proj"),
        **_expert_sizes(config, weights),
    )


def _expert_sizes(config: Mapping[str, Any], weights: Iterable[WeightSpec]) -> dict[str, Any]:
    """Additional sizes of a mixture of experts; empty for a dense model."""
    number = _first(config, EXPERT_KEYS)
    with_experts = sorted(
        {layer for spec in weights if is_expert(spec.name) and (layer := layer_of(spec.name)) is not None}
    )
    if not number or not with_experts:
        return {}
    width = expert_width(config)
    return {
        "experts": number,
        "experts_per_token": config.get("num_experts_per_tok", 1),
        "expert_intermediate": width,
        "shared_intermediate": (config.get("n_shared_experts") or 0) * width
        or config.get("shared_expert_intermediate_size", 0),
        "dense_layers": with_experts[0],
    }


def expert_width(config: Mapping[str, Any]) -> int:
    return config.get("moe_intermediate_size") or config.get("intermediate_size") or 0


def _first(config: Mapping[str, Any], keys: Sequence[str]) -> int:
    return next((config[key] for key in keys if config.get(key)), 0)


def _adapter_parameters(weights: Iterable[WeightSpec], lora: LoraSection | None, *, experts: int) -> int:
    """Number of parameters in the low-rank updates of linear layers: rank x (inputs + outputs) each."""
    if lora is None:
        return 0
    adapted = (spec for spec in weights if _is_adapted(spec, lora, experts=experts))
    return sum(lora.rank_of(spec.name.removesuffix(".weight")) * sum(spec.shape) for spec in adapted)


def _are_frozen(weights: Iterable[WeightSpec], lora: LoraSection | None, *layers: str) -> bool:
    """Whether the model has linear layers of these names, and they are neither trained nor adapted.

    The backward pass needs their inputs no longer.
    """
    specs = [spec for spec in weights if ends_in(spec.name.removesuffix(".weight"), layers)]
    return lora is not None and len(specs) > 0 and not any(_is_adapted(spec, lora, experts=0) for spec in specs)


def _is_adapted(spec: WeightSpec, lora: LoraSection, *, experts: int) -> bool:
    if len(spec.shape) != 2 or layer_of(spec.name) is None or is_expert(spec.name) or spec.shape[0] == experts:
        return False
    return lora.target_modules == "all-linear" or ends_in(spec.name.removesuffix(".weight"), lora.target_modules)


def template_text(template: str) -> str:
    """Return `data.chat_template`: Jinja text as it is, or that of a .jinja file. Raises UserError without the file."""
    if not template.endswith(".jinja"):
        return template
    file = Path(template).expanduser()
    if not file.is_file():
        raise UserError(f"data.chat_template = {template!r}: no such file")
    return file.read_text(encoding="utf-8")


def legacy_template(directory: Path) -> str | None:
    """Return the chat template of a model's chat_template.json, the older place of one for pictures."""
    file = directory / "chat_template.json"
    if not file.is_file():
        return None
    template = read_json_object(file, hint="see model.path").get("chat_template")
    return template if isinstance(template, str) else None


def checkpoint_of(model: LLMModelConfig) -> str:
    """The source of model and tokenizer: the path itself, or the files of one revision on the hub."""
    if model.revision is None:
        return model.path
    if Path(model.path).expanduser().is_dir():
        raise UserError(f"model.revision is for a Hugging Face model id; {model.path} is a directory here")
    return fetch(model)


def fetch(model: LLMModelConfig) -> str:
    """Fetch the files of a model from the hub; return their directory. Raises UserError."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(
            model.path, revision=model.revision, allow_patterns=CHECKPOINT_FILES, ignore_patterns=["consolidated*"]
        )
    except (OSError, ValueError) as error:
        where = f"model.path = {model.path!r} at model.revision = {model.revision!r}"
        raise UserError(f"{where} cannot be fetched from the hub: {error}") from error


def model_directory(model: LLMModelConfig) -> Path:
    """Return the directory of the model's files, fetched from the hub if necessary."""
    source = Path(resolve(checkpoint_of(model)))
    return source if source.is_dir() else Path(fetch(model))
