"""Builds a trainable policy from [model]: adds adapters, shards over the ranks of a replica, loads weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.dtensor import fill_own_part
from cosmos_rl_core.parallel.lora import base_name
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.model.causal_lm import empty_model, load_model, named_weights
from cosmos_rl_llm.model.checkpoint import read_specs, resolve
from cosmos_rl_llm.policy.kernels import log_kernels
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.pipelined import PipelinedPolicy
from cosmos_rl_llm.policy.policy import TextPolicy


def build_policy(
    model: LLMModelConfig,
    *,
    source: str,
    chat: Callable[[PreTrainedModel], Chat],
    temperature: float,
    seed: int,
    setup: ModelSetup,
) -> TextPolicy | PipelinedPolicy:
    """Load the model at `source` and shard it according to `setup`. All ranks of a replica call this together.

    Args:
        chat: returns the encoder of supervised rows for the loaded model.
        temperature: log-probabilities are of softmax(logits / temperature).
        seed: of the initial values of adapters.

    Raises UserError for a model that cannot be loaded or sharded that way.
    """
    dtype, compute_dtype = _dtypes(model, setup)
    whole = empty_model(source, dtype=dtype) if setup.mesh is not None else load_model(source, dtype=dtype)
    in_parts = setup.mesh is not None and has_same_names(whole, source)
    if setup.mesh is not None and not in_parts:
        whole = load_model(source, dtype=dtype)
    if setup.mesh is None:
        whole.to(own_device())  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    if model.lora is not None:
        add_adapters(whole, model.lora, base=model.path, seed=seed)
    log_kernels(whole, device=setup.mesh.device if setup.mesh else own_device(), dtype=compute_dtype or dtype)
    pipelined = setup.mesh is not None and setup.mesh.dims.pp > 1
    policy = (PipelinedPolicy if pipelined else TextPolicy)(
        whole, chat=chat(whole), temperature=temperature, compute_dtype=compute_dtype, setup=setup
    )
    if in_parts:
        read_parts(policy.module, source)
    return policy


def _dtypes(model: LLMModelConfig, setup: ModelSetup) -> tuple[torch.dtype, torch.dtype | None]:
    """Dtype of the trained weights, and of matrix products if it differs."""
    if setup.precision.parameters == "bfloat16" and model.dtype == "float32":
        raise UserError(
            '[policy.precision] parameters = "bfloat16" computes in bfloat16: set model.dtype = "bfloat16" too, or '
            'parameters = "float32"'
        )
    held, computed = getattr(torch, setup.precision.parameters), getattr(torch, model.dtype)
    return held, None if held == computed else computed


def has_same_names(model: PreTrainedModel, path_or_id: str | os.PathLike[str]) -> bool:
    """Whether the safetensors in a local directory have all of the model's weights by name and shape."""
    directory = Path(resolve(path_or_id))
    if not directory.is_dir():
        return False
    found = {spec.name: spec.shape for spec in read_specs(directory)}
    return all(found.get(name) == tuple(tensor.shape) for name, tensor in named_weights(model).items())


@torch.no_grad()
def read_parts(module: nn.Module, path_or_id: str | os.PathLike[str]) -> None:
    """Fill this rank's part of each parameter and persistent buffer from the safetensors of a local directory."""
    directory = Path(resolve(path_or_id))
    with ExitStack() as files:
        sources = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            sources |= dict.fromkeys(file.keys(), file)
        tensors = {id(tensor): (name, tensor) for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
        for name, tensor in tensors.values():  # tied tensors once, under their first name
            if (wanted := base_name(name)) is not None:  # adapters are already initialised
                fill_own_part(tensor, sources[wanted].get_slice(wanted).__getitem__)
