"""Causal language models from transformers: loading, making, naming weights, and the output head."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
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
from cosmos_rl_llm.model.checkpoint import resolve
from cosmos_rl_llm.model.vision_parts import part_of

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Config keys that logits are multiplied by: Cohere, Falcon-H1, Muse Glimmer."""
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config keys that logits, or the hidden states before the head, are divided by: Granite and MiniCPM3, Inkling."""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config keys of the soft cap of logits: Gemma 2 and others, RecurrentGemma, xLSTM."""

NEVER = -1e4
"""Added to the logit of a token that is never sampled, in policy and engines."""

LOADING = threading.Lock()
"""transformers changes global defaults while it builds a model; policy and engine may load theirs in two threads."""

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")


def load_model(
    path_or_id: str | os.PathLike[str], *, dtype: torch.dtype, attention: str | None = None
) -> PreTrainedModel:
    """Load a causal language model from a local directory or a hub id; safetensors only, no remote code.

    Raises UserError when it cannot be found, read or is not a causal language model, or lacks weights.
    """
    source = resolve(path_or_id)
    logging.disable_progress_bar()  # it would fill a worker's log
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with LOADING:
            loaded = _auto_class(config).from_pretrained(
                source,
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
    if missing:
        raise UserError(
            f"model.path = {source!r}: the checkpoint lacks {len(missing)} weights of {type(model).__name__} "
            f"({', '.join(missing[:5])}); check that config.json and the weights belong together"
        )
    return model


def empty_model(path_or_id: str | os.PathLike[str], *, dtype: torch.dtype) -> PreTrainedModel:
    """Make the model of a checkpoint without its weights: parameters are on meta.

    Computed buffers are set, such as rotary frequencies. Raises UserError when there is no such model.
    """
    source = resolve(path_or_id)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        with LOADING, no_init_weights(), parameters_on_meta():
            model: PreTrainedModel = _auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(_explain(source, error)) from error
    model.tie_weights()
    if (Path(source) / "generation_config.json").is_file():
        try:
            model.generation_config = GenerationConfig.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise UserError(f"{source}/generation_config.json: {error}; mend or remove the file") from error
    return model


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


def _auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def load_tokenizer(path_or_id: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model. Raises UserError when there is none."""
    source = resolve(path_or_id)
    directory = Path(source)
    # For a directory without tokenizer files transformers returns an empty tokenizer of the model's class.
    if directory.is_dir() and not any((directory / name).is_file() for name in _VOCABULARIES):
        raise UserError(f"model.path = {source!r} has no tokenizer; add one of {', '.join(_VOCABULARIES)}")
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


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The output projection: logits = softcap(scale * (hidden @ weight.T + bias))."""

    weight: Tensor
    """[V, hidden]."""
    bias: Tensor | None
    """[V]."""
    softcap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> OutputHead:
        """Read the head of a causal LM. Raises UserError if it has no linear output layer."""
        config = model.config.get_text_config()
        linear = model.get_output_embeddings()
        if not isinstance(linear, nn.Linear):
            raise UserError(f"model.path: {type(model).__name__} has no linear output layer; choose another model")
        caps = [cap for key in _SOFTCAPS if (cap := getattr(config, key, None))]
        return cls(linear.weight, linear.bias, softcap=caps[0] if caps else None, scale=_logit_scale(config))

    def without(self, banned: Sequence[int]) -> OutputHead:
        """The head that never samples the tokens `banned`, such as placeholders of pictures; others are left out."""
        rows = [token for token in banned if 0 <= token < len(self.weight)]
        if not rows:
            return self
        penalty = torch.zeros(len(self.weight), dtype=self.weight.dtype, device=self.weight.device)
        for row in rows:  # few; a list of indices would be copied to the GPU, which the host waits for
            penalty[row] = NEVER
        return replace(self, bias=penalty if self.bias is None else self.bias + penalty)

    def cast(self, dtype: torch.dtype | None) -> OutputHead:
        """The same head in another dtype; gradients flow back to the original."""
        if dtype is None:
            return self
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden] -> logits [..., V] float32, or float64 of such hidden states."""
        logits = F.linear(hidden, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.scale == 1 else logits.mul_(self.scale)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _logit_scale(config: PreTrainedConfig) -> float:
    """Factor of the logits in a family's forward pass."""
    multipliers, divisors = _MULTIPLIERS, _DIVISORS
    if config.model_type.startswith("hyperclovax"):  # multiplies by the key by which others divide
        multipliers, divisors = ("logits_scaling",), ()
    above = [float(getattr(config, key, None) or 1) for key in multipliers]
    below = [float(getattr(config, key, None) or 1) for key in divisors]
    return math.prod(above) / math.prod(below)


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
