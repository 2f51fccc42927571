"""Builds policies and engines from [model] and [data].

policy          empty or loaded model -> adapters -> checked against one process -> sharded -> weights
torch engine    loaded model -> adapters
vLLM            the model's directory -> processes of its own
all of them     `load_chat`: the tokenizer beside the model, with the template of [data]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.observe.startup import READING, phase
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_core.parallel.dtensor import fill_own_part, materialise
from cosmos_rl_core.parallel.lora import base_name, fill_adapters, ranks_of
from cosmos_rl_core.parallel.rank_group import RankGroup
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_core.types import Sampling
from cosmos_rl_llm.config import PLAIN_TEXT, LLMDataConfig, LLMModelConfig, LLMTorchOptions
from cosmos_rl_llm.data.chat import Chat, find_end_ids, set_chat_template
from cosmos_rl_llm.data.continuation import ChatContinuation
from cosmos_rl_llm.engines.torch.engine import TorchEngine
from cosmos_rl_llm.engines.vllm.engine import VllmEngine
from cosmos_rl_llm.engines.vllm.options import VllmEngineOptions, no_pictures
from cosmos_rl_llm.engines.vllm.start import check_rope, start
from cosmos_rl_llm.media.vision import Vision, find_family
from cosmos_rl_llm.model.causal_lm import empty_model, load_model, load_tokenizer, read_config, sees
from cosmos_rl_llm.model.checkpoint import checkpoint_of, legacy_template, resolve
from cosmos_rl_llm.model.vision_parts import freeze
from cosmos_rl_llm.model.weights import Weight, find_weights, open_weights
from cosmos_rl_llm.over_ranks import policy_over
from cosmos_rl_llm.policy.kernels import log_kernels
from cosmos_rl_llm.policy.lora import add_adapters
from cosmos_rl_llm.policy.policy import CausalLMPolicy
from cosmos_rl_llm.policy.rank_probe import check_ranks
from cosmos_rl_llm.policy.token_model import TermOptions
from cosmos_rl_llm.policy.truncation import Truncation

if TYPE_CHECKING:
    from cosmos_rl_llm.policy.pipelined import PipelinedPolicy

log = logging.getLogger(__name__)


def build_policy(
    model: LLMModelConfig, *, data: LLMDataConfig, sampling: Sampling | None, seed: int, setup: ModelSetup
) -> CausalLMPolicy | PipelinedPolicy:
    """Load the model to train and shard it according to `setup`. All ranks of a replica call this together.

    sampling: of the rollouts, which decides the distribution of the log-probabilities; None in supervised training.
    seed: of the initial values of adapters; all others come from a checkpoint.

    Raises UserError for a model that cannot be loaded or sharded that way.
    """
    phase(READING)
    source = checkpoint_of(model)
    dtype, compute_dtype = _dtypes(model, setup)
    if setup.mesh is None:
        network, weights = load_model(source, dtype=dtype, scores=model.scores), None
        network.to(own_device())  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    else:
        network = empty_model(source, dtype=dtype, scores=model.scores)
        weights = find_weights(network, source)
    _check_stages(model, pp=setup.parallel.pp)
    prepare = partial(_prepare, model=model, seed=seed)
    prepare(network)
    check_ranks(network, setup, prepare=prepare)
    log_kernels(network, device=setup.mesh.device if setup.mesh else own_device(), dtype=compute_dtype or dtype)
    chat = load_chat(source, data, max_length=model.max_length)
    chat = replace(chat, ranks=cache(RankGroup.of_all), scores=model.scores)
    if model.scores and network.config.pad_token_id is None:  # transformers scores no batch without
        network.config.pad_token_id = chat.tokenizer.pad_token_id or chat.tokenizer.eos_token_id
    options = TermOptions(
        temperature=1.0 if sampling is None else sampling.temperature,
        truncation=Truncation.of(sampling),
        compute_dtype=compute_dtype,
        vision=None if chat.vision is None else chat.vision.family,
    )
    policy = policy_over(network, options, chat=chat, setup=setup)
    if setup.mesh is not None:
        materialise(policy.module, device=torch.device("cpu") if setup.memory.parameter_offload else setup.mesh.device)
        fill_adapters(policy.module, seed=seed)
        fill_model(policy.module, source, weights, scores=model.scores)
    return policy


def _check_stages(model: LLMModelConfig, *, pp: int) -> None:
    """Raise UserError for parts of [model] that leave stages of a pipeline without parameters or adapters."""
    if "language_model" in model.freeze and pp > 1:
        raise UserError(
            f'[policy.parallel] pp = {pp}: model.freeze = ["language_model"] leaves stages without a parameter to '
            "train; set pp = 1"
        )
    if model.scores and pp > 1:
        raise UserError(f"[policy.parallel] pp = {pp}: a reward model has no stages; set pp = 1")
    if model.lora is not None and model.lora.whole and pp > 1:
        raise UserError(
            f"[policy.parallel] pp = {pp}: stages after the first have none of the weights of model.lora.whole; set "
            "pp = 1"
        )


def _prepare(module: PreTrainedModel, *, model: LLMModelConfig, seed: int = 0) -> None:
    """Freeze parts of `module` and add adapters, in place."""
    freeze(module, model.freeze)
    if model.lora is not None:
        add_adapters(module, model.lora, base=model.path, seed=seed, without=model.freeze)


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
def fill_model(module: nn.Module, source: str, weights: Mapping[str, Weight] | None, *, scores: bool = False) -> None:
    """Fill this rank's shards of the parameters and persistent buffers, except adapters.

    Args:
        weights: of the whole model, read box by box; None: the whole model is loaded in the host's memory.
    """
    tensors = {id(tensor): (name, tensor) for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
    targets = {base: tensor for name, tensor in tensors.values() if (base := base_name(name)) is not None}
    if weights is None:
        log.warning("weights: every rank loads the whole model on the host, as its safetensors cannot be read by parts")
        state = load_model(source, dtype=next(module.parameters()).dtype, scores=scores).state_dict()
        for name, tensor in targets.items():
            fill_own_part(tensor, state[name].__getitem__)
        return
    with open_weights(source) as reader:
        for name, tensor in targets.items():  # tied tensors once, under their first name
            fill_own_part(tensor, reader(weights[name]))


def build_torch_engine(model: LLMModelConfig, *, data: LLMDataConfig, options: LLMTorchOptions) -> TorchEngine:
    """Load the model into an engine of this process, with adapters as the policy has them."""
    phase(READING)
    source, device = checkpoint_of(model), own_device()
    module = load_model(source, dtype=torch.bfloat16 if model.dtype == "bfloat16" else torch.float32)
    module.to(device)  # pyright: ignore[reportArgumentType] transformers wraps it without `self`
    log_kernels(module, device=device, dtype=module.dtype)
    _prepare(module, model=model)
    chat = load_chat(source, data, max_length=model.max_length)
    return TorchEngine(module, chat, options, version=-1)  # nothing is served before the policy's weights have arrived


def build_vllm_engine(model: LLMModelConfig, *, data: LLMDataConfig, options: VllmEngineOptions) -> VllmEngine:
    """Start vLLM with the model, whose weights are replaced before anything is served."""
    source = resolve(checkpoint_of(model))
    config, _ = read_config(source)
    pictures = sees(config)
    if pictures and (why := no_pictures(config.model_type)):
        raise UserError(f'rollout.engine = "vllm" {why}; set it to "torch"')
    chat = load_chat(source, data, max_length=options.max_model_len or model.max_length)
    check_rope(config, chat.max_length)
    phase("starting vLLM")
    adapters = None
    if model.lora is not None and model.lora.serve == "adapter":
        network = empty_model(source, dtype=torch.float32)
        _prepare(network, model=model)
        adapters = ranks_of(network)
    # No variable has vLLM here: what `start` imports keeps this frame, and vLLM's `__del__` fails when Python exits.
    return VllmEngine(
        start(
            source,
            options=options,
            dtype=model.dtype,
            max_length=chat.max_length,
            pictures=pictures,
            adapters=adapters,
        ),
        chat,
        recompute_kv=options.recompute_kv,
        records_routes=options.record_routes,
        adapters=tuple(adapters or ()),
    )


def build_continuation(model: LLMModelConfig, *, data: LLMDataConfig, single_turn: bool = False) -> ChatContinuation:
    """Load the tokenizer, and prove that its chat template can be continued turn by turn, except for `single_turn`."""
    chat = load_chat(checkpoint_of(model), data, max_length=model.max_length)
    return ChatContinuation(chat, plain=data.chat_template == PLAIN_TEXT, single_turn=single_turn)


def load_chat(source: str, data: LLMDataConfig, *, max_length: int | None) -> Chat:
    """Load the tokenizer beside a model, with the template of [data] and the context limit: at most the model's own.

    Raises UserError for a limit above it, and for columns that the model cannot take.
    """
    config, generation = read_config(source)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    tokenizer = load_tokenizer(source)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = legacy_template(Path(resolve(source)))
    set_chat_template(tokenizer, data.chat_template)
    if max_length is not None and limit is not None and max_length > limit:
        raise UserError(f"model.max_length = {max_length} is above the model's own limit of {limit} tokens")
    family = find_family(resolve(source), config) if sees(config) else None
    for kind, column in (("image", data.image_column), ("video", data.video_column)):
        if column is not None and (family is None or kind not in family.token_ids):
            raise UserError(
                f"data.{kind}_column = {column!r}: the model of model.path = {source!r} takes no {kind}s; choose "
                "another model (docs/vision.md), or remove the column"
            )
    return Chat(
        tokenizer=tokenizer,
        end_ids=find_end_ids(tokenizer, generation.eos_token_id),
        max_length=max_length or limit,
        overlong=data.overlong,
        vision=None if family is None else Vision(family=family, limits=data.media),
    )
