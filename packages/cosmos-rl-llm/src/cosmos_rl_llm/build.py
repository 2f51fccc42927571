"""Builds a trainable policy from [model]: adds adapters, shards over the ranks of a replica, loads weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.dtensor import fill_own_part, materialise
from cosmos_rl_core.parallel.lora import base_name, fill_adapters
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.config import LLMModelConfig
from cosmos_rl_llm.data.chat import Chat
from cosmos_rl_llm.model.causal_lm import empty_model, load_model
from cosmos_rl_llm.model.vision_parts import freeze
from cosmos_rl_llm.model.weights import Weight, find_weights, open_weights
from cosmos_rl_llm.policy.kernels import log_kernels
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.policy import TextPolicy
from cosmos_rl_llm.policy.rank_probe import check_ranks
from cosmos_rl_llm.policy.truncation import Truncation

if TYPE_CHECKING:
    from cosmos_rl_llm.policy.pipelined import PipelinedPolicy

log = logging.getLogger(__name__)


def build_policy(
    model: LLMModelConfig,
    *,
    source: str,
    chat: Callable[[PreTrainedModel], Chat],
    temperature: float,
    truncation: Truncation | None = None,
    seed: int,
    setup: ModelSetup,
) -> TextPolicy | PipelinedPolicy:
    """Load the model at `source` and shard it according to `setup`. All ranks of a replica call this together.

    Args:
        chat: returns the encoder of supervised rows for the loaded model.
        temperature: log-probabilities are of softmax(logits / temperature).
        truncation: top-k and top-p of the rollouts.
        seed: of the initial values of adapters.

    Raises UserError for a model that cannot be loaded or sharded that way.
    """
    dtype, compute_dtype = _dtypes(model, setup)
    if setup.mesh is None:
        network, weights = load_model(source, dtype=dtype), None
        network.to(own_device())  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    else:
        network = empty_model(source, dtype=dtype)
        weights = find_weights(network, source)
    if "language_model" in model.freeze and setup.parallel.pp > 1:
        raise UserError(
            f'[policy.parallel] pp = {setup.parallel.pp}: model.freeze = ["language_model"] leaves stages without a '
            "parameter to train; set pp = 1"
        )
    if model.lora is not None and model.lora.whole and setup.parallel.pp > 1:
        raise UserError(
            f"[policy.parallel] pp = {setup.parallel.pp}: stages after the first have none of the weights of "
            "model.lora.whole; set pp = 1"
        )
    prepare = partial(_prepare, model=model, seed=seed)
    prepare(network)
    check_ranks(network, setup, prepare=prepare)
    log_kernels(network, device=setup.mesh.device if setup.mesh else own_device(), dtype=compute_dtype or dtype)
    policy = _kind(pipelined=setup.mesh is not None and setup.mesh.dims.pp > 1)(
        network,
        chat=replace(chat(network), ranks=cache(RankGroup.of_all)),
        temperature=temperature,
        truncation=truncation,
        compute_dtype=compute_dtype,
        setup=setup,
    )
    if setup.mesh is not None:
        materialise(policy.module, device=torch.device("cpu") if setup.memory.parameter_offload else setup.mesh.device)
        fill_adapters(policy.module, seed=seed)
        fill_model(policy.module, source, weights)
    return policy


def _prepare(module: PreTrainedModel, *, model: LLMModelConfig, seed: int) -> None:
    """Freeze parts of `module` and add adapters, in place."""
    freeze(module, model.freeze)
    if model.lora is not None:
        add_adapters(module, model.lora, base=model.path, seed=seed, without=model.freeze)


def _kind(*, pipelined: bool) -> type[TextPolicy | PipelinedPolicy]:
    if pipelined:
        from cosmos_rl_llm.policy.pipelined import PipelinedPolicy  # with torch's schedules, which others do not need

        return PipelinedPolicy
    return TextPolicy


def _dtypes(model: LLMModelConfig, setup: ModelSetup) -> tuple[torch.dtype, torch.dtype | None]:
    """Dtype of the trained weights, and of matrix products if it differs."""
    if setup.precision.parameters == "bfloat16" and model.dtype == "float32":
        raise UserError(
            '[policy.precision] parameters = "bfloat16" computes in bfloat16: set model.dtype = "bfloat16" too, or '
            'parameters = "float32"'
        )
    computed = getattr(torch, model.dtype)
    parameter_dtype = setup.parameter_dtype(computed)
    return parameter_dtype, None if parameter_dtype == computed else computed


@torch.no_grad()
def fill_model(module: nn.Module, source: str, weights: Mapping[str, Weight] | None) -> None:
    """Fill this rank's shards of the parameters and persistent buffers, except adapters.

    Args:
        weights: of the whole model, read box by box; None: the whole model is loaded in the host's memory.
    """
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
    targets = {base: tensor for name, tensor in tensors.values() if (base := base_name(name)) is not None}
    if weights is None:
        log.warning("weights: every rank loads the whole model on the host, as its safetensors cannot be read by parts")
        state = load_model(source, dtype=next(module.parameters()).dtype).state_dict()
        for name, tensor in targets.items():
            fill_own_part(tensor, state[name].__getitem__)
        return
    with open_weights(source) as reader:
        for name, tensor in targets.items():  # tied tensors once, under their first name
            fill_own_part(tensor, reader(weights[name]))
