"""A trainable policy out of a recipe's model: loaded, adapted, spread over the ranks of its replica."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.chat import Chat
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.load import has_same_names, read_parts
from cosmos_rl_llm.lora import add_adapters
from cosmos_rl_llm.model import empty_model, load_model
from cosmos_rl_llm.pipelined import PipelinedPolicy
from cosmos_rl_llm.text_policy import TextPolicy


def build_policy(
    model: LLMModelConfig,
    *,
    source: str,
    chat: Callable[[PreTrainedModel], Chat],
    temperature: float,
    seed: int,
    setup: ModelSetup,
) -> TextPolicy | PipelinedPolicy:
    """Load the model at `source` and spread it as `setup` says. All ranks of a replica call this together.

    Args:
        chat: makes what supervised training encodes rows with, from the model.
        temperature: log-probabilities are of softmax(logits / temperature).
        seed: of the first values of adapters.

    Raises UserError for a model that cannot be loaded, or spread that way.
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
    pipelined = setup.mesh is not None and setup.mesh.dims.pp > 1
    policy = (PipelinedPolicy if pipelined else TextPolicy)(
        whole, chat=chat(whole), temperature=temperature, compute_dtype=compute_dtype, setup=setup
    )
    if in_parts:
        read_parts(policy.module, source)
    return policy


def _dtypes(model: LLMModelConfig, setup: ModelSetup) -> tuple[torch.dtype, torch.dtype | None]:
    """Type of the trained weights, and of matrix products where it is another."""
    if setup.precision.parameters == "bfloat16" and model.dtype == "float32":
        raise UserError(
            '[policy.precision] parameters = "bfloat16" computes in bfloat16: set model.dtype = "bfloat16" too, or '
            'parameters = "float32"'
        )
    held, computed = getattr(torch, setup.precision.parameters), getattr(torch, model.dtype)
    return held, None if held == computed else computed
