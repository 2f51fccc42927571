"""Causal language models from transformers: loading, making, and naming their weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils import logging

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import forked_rng
from cosmos_rl_core.parallel.dtensor import parameters_on_meta
from cosmos_rl_core.parallel.lora import adapter_weights, whole_weights
from cosmos_rl_llm.model.checkpoint import SCORE_WEIGHT, VOCABULARIES, resolve
from cosmos_rl_llm.model.vision_parts import part_of

LOADING = threading.Lock()
"""transformers changes global defaults while it builds a model; policy and engine may load theirs in two threads."""


def load_model(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    attention: str | None = None,
    scores: bool = False,
    new_head: bool = True,
) -> PreTrainedModel:
    """Load a causal language model from a local directory or a hub id; safetensors only, no remote code.

    scores: load a reward model, transformers' sequence classification with one output; the head of a causal language
    model's directory is new, with the same values in every process. new_head: false to refuse that.

    Raises UserError when it cannot be found, read or is not a causal language model, or lacks weights.
    """
    source = resolve(path_or_id)
    logging.disable_progress_bar()  # it would fill a worker's log
    try:
        config = _config(source, scores=scores)
        with LOADING, forked_rng(seed=0):
            loaded = _auto_class(config, scores=scores).from_pretrained(
                source,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        raise UserError(_explain(source, error)) from error
    model, report = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    missing = sorted(report["missing_keys"])
    if scores and not new_head and SCORE_WEIGHT in missing:
        raise UserError(
            f"{source!r} has no {SCORE_WEIGHT}: it is no reward model, and a new head would score at random; name the "
            'result of a run with algorithm.name = "reward_model"'
        )
    if missing and not (scores and missing == [SCORE_WEIGHT]):
        raise UserError(
            f"model.path = {source!r}: the checkpoint lacks {len(missing)} weights of {type(model).__name__} "
            f"({', '.join(missing[:5])}); check that config.json and the weights belong together"
        )
    return model


def empty_model(path_or_id: str | os.PathLike[str], *, dtype: torch.dtype, scores: bool = False) -> PreTrainedModel:
    """Make the model of a checkpoint without its weights: parameters are on meta.

    Computed buffers are set, such as rotary frequencies. scores: as of `load_model`. Raises UserError when there is no
    such model.
    """
    source = resolve(path_or_id)
    try:
        config = _config(source, scores=scores)
        with LOADING, no_init_weights(), parameters_on_meta():
            kind = _auto_class(config, scores=scores)
            model: PreTrainedModel = kind.from_config(config, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(_explain(source, error)) from error
    model.tie_weights()
    if (Path(source) / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise UserError(f"{source}/generation_config.json: {error}; mend or remove the file") from error
    return model


def read_config(source: str) -> tuple[PreTrainedConfig, GenerationConfig]:
    """Return the configurations of the model of `source` and of its generation, without loading the model.

    Raises UserError if there is no such model.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path = {source!r}: no model could be read: {error}") from error
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # no such file: transformers reads the model's own config instead
        generation = GenerationConfig.from_model_config(config)
    except ValueError as error:
        raise UserError(f"{source}/generation_config.json: {error}; mend or remove the file") from error
    return config, generation


def make_model(config: Mapping[str, Any], *, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """Make a randomly initialised model from config values like {"model_type": "qwen3", "hidden_size": 128}.

    The same seed gives the same weights; the caller's random state is left alone.
    Raises UserError for an unknown model_type or impossible values.
    """
    values = dict(config)
    kind = values.pop("model_type", None)
    if kind is None:
        raise UserError('model config needs the key model_type, for example model_type = "qwen3"')
    try:
        built = AutoConfig.for_model(kind, **values)
        with LOADING, forked_rng(seed=seed):
            return _auto_class(built).from_config(built, dtype=dtype)
    except (ValueError, StrictDataclassError) as error:
        raise UserError(f"model config: {_first_line(error)}") from error


def sees(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is of a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def _auto_class(config: PreTrainedConfig, *, scores: bool = False) -> Any:
    if scores:
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def _config(source: str, *, scores: bool) -> PreTrainedConfig:
    """The model's configuration; of a reward model with one output. Raises UserError for a head of several outputs."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    if not scores:
        return config
    is_classifier = any("ForSequenceClassification" in name for name in config.architectures or ())
    if is_classifier and config.num_labels != 1:
        raise UserError(f"{source!r} is a classifier of {config.num_labels} outputs; a reward model has one")
    config.num_labels = 1
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if sees(config):
        raise UserError(
            f"{source!r}: a {config.model_type} reads pictures, and reward models read text; choose another"
        )
    if kind is None:
        raise UserError(f"{source!r}: transformers has no {config.model_type} that scores texts; choose another model")
    config.architectures = [cast(type[PreTrainedModel], kind).__name__]
    return config


def score_layer(model: PreTrainedModel) -> nn.Linear | None:
    """Return the head of a reward model, one output at a token; None for a language model."""
    layer = getattr(model, "score", None)
    return layer if isinstance(layer, nn.Linear) else None


def load_tokenizer(path_or_id: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model. Raises UserError when there is none."""
    source = resolve(path_or_id)
    directory = Path(source)
    # For a directory without tokenizer files transformers returns an empty tokenizer of the model's class.
    if directory.is_dir() and not any((directory / name).is_file() for name in VOCABULARIES):
        raise UserError(f"model.path = {source!r} has no tokenizer; add one of {', '.join(VOCABULARIES)}")
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(_explain(source, error, what="tokenizer")) from error


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers by checkpoint name; tied tensors once, under their first name.

    Of a model with adapters only these and the weights trained beside them, by their names in peft's files.
    """
    if adapters := adapter_weights(model):
        return adapters | whole_weights(model)
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """`named_weights` without those of frozen parts: an engine has these from the model's own files.

    A parameter that a family itself never trains (the routers' biases of ERNIE 4.5) goes with the rest of its part.
    """
    parameters = dict(model.named_parameters())
    trained = {part_of(name) for name, parameter in parameters.items() if parameter.requires_grad}
    frozen = {name for name in parameters if part_of(name) not in trained}
    return {name: tensor for name, tensor in named_weights(model).items() if name not in frozen}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's decoder layers, by any family's name. Raises UserError for a model without one."""
    decoder = language_model(model)
    lists = [child for child in (*decoder.children(), *decoder.modules()) if isinstance(child, nn.ModuleList)]
    if decoder is model or not lists:
        raise UserError(f"model.path: {type(model).__name__} has no list of decoder layers; choose another model")
    return lists[0]


def language_model(model: PreTrainedModel) -> nn.Module:
    """Return the decoder without the output head; of a vision-language model the part that reads the text."""
    base = model.base_model
    return getattr(base, "language_model", None) or getattr(base, "text_model", None) or base


def context_length(model: PreTrainedModel) -> int | None:
    """Maximum number of positions, or None if the config has no limit."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _explain(source: str, error: Exception, *, what: str = "model") -> str:
    """Error message for any exception of transformers and the hub."""
    return (
        f"model.path = {source!r}: no {what} could be loaded ({_first_line(error)}). "
        "Set it to a local directory in Hugging Face format (config.json, *.safetensors, tokenizer files), "
        "or an id of a hub that this machine can reach"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
