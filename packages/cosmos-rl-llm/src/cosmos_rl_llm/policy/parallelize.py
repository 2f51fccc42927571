"""Shards a model, or a stage of it, over the ranks of its replica, in this order (each step needs the previous one):

    float8 -> experts (ep) -> matrices (tp) -> recomputation, offload, compile -> fully_shard

A single process runs only the steps that need no other rank.

Tensor parallelism: transformers' `base_model_tp_plan` of each family lists its column-wise and row-wise linear layers.
Every part of a decoder layer with such layers becomes a region (core's `parallel.tensor`), which determines the rest.

    embed_tokens     vocabulary                   layers.i.self_attn   region: q, k, v columns, o rows, others whole
    layers.i.*norm   whole                        layers.i.mlp         region: gate, up columns, down rows
    norm             whole                          with experts       region: experts as they are, the router whole,
    lm_head          vocabulary (`TermModel` reads it)                   shared experts like an mlp

The outputs of a region are summed over the ranks. A module inside that is not sharded must therefore feed those that
are, as `_INSIDE` lists them by name; with any other the part is computed whole by every rank, or refused with experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers import PreTrainedConfig, PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.axes.fsdp import shard_fully
from cosmos_rl_core.parallel.axes.tensor import (
    TensorAxis,
    cut_columns,
    cut_rows,
    cut_vectors,
    cut_vocabulary,
    region,
    replicate,
    whole_sequence,
)
from cosmos_rl_core.parallel.float8 import use_float8
from cosmos_rl_core.parallel.lora import adapter_layers
from cosmos_rl_core.parallel.remat import save_memory
from cosmos_rl_core.parallel.setup import ModelSetup
from cosmos_rl_llm.model.causal_lm import decoder_layers, language_model, score_layer
from cosmos_rl_llm.model.vision_parts import tower_blocks
from cosmos_rl_llm.policy.context import check_heads
from cosmos_rl_llm.policy.experts import is_experts, spread_experts, use_mixed_experts
from cosmos_rl_llm.policy.lora import with_adapters
from cosmos_rl_llm.policy.packing import install_attention
from cosmos_rl_llm.policy.token_model import TermModel

Styles = Mapping[nn.Module, str]
"""Styles of sharded modules: "colwise", "rowwise" or "per_head"."""

_CUT = {"colwise": cut_columns, "rowwise": cut_rows, "per_head": cut_vectors}
_FOLLOWS = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
"""Styles of unsharded modules in a region: no change."""

_INSIDE = {"act_fn", "gate", "router", "moe_statics", "shared_expert_gate"}
_INSIDE |= {"q_norm", "k_norm", "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
"""Unsharded modules, by name, whose outputs go into sharded modules or multiply theirs, and are never added to them."""

_VOCABULARY = ("embed_tokens", "embedding_rowwise")
"""Handled by `_spread_vocabulary`; until 5.20 transformers plans it for every model with a tied head."""

_ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
_GATED = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
_LATENT_ATTENTION = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
_LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": {f"layers.*.self_attn.{name}": style for name, style in _LATENT_ATTENTION.items()},
    "gpt_oss": {f"layers.*.self_attn.{name}": style for name, style in _ATTENTION.items()}
    | {"layers.*.self_attn": "per_head"},  # its sinks
    "qwen3_vl_text": {f"layers.*.self_attn.{name}": style for name, style in _ATTENTION.items()}
    | {f"layers.*.mlp.{name}": style for name, style in _GATED.items()},
}
"""By model_type: entries missing in transformers' plans."""


def spread_tensors(model: PreTrainedModel, axis: TensorAxis, *, experts: Collection[nn.Module] = ()) -> None:
    """Shard the model's parameters over `axis`, in place and without communication; they become DTensors.

    `experts` are skipped: they are already sharded and fit into a region (`experts.spread_experts`). Raises UserError
    for a family without a plan, or sizes that do not divide.
    """
    # Layers are cut part by part; all beside them is whole on each rank, and gets the gradient of that rank's rows
    # only where the sequence is cut between the matrix products.
    styles = _styles(model)
    check_sizes(model.config.get_text_config(), tp=axis.size)
    decoder, embedding = language_model(model), model.get_input_embeddings()
    layers = decoder_layers(model)
    if not any(child is layers for child in decoder.children()):
        raise UserError(
            f"[policy.parallel] tp: {type(model).__name__} has its decoder layers in several stacks; set tp = 1"
        )
    for layer in layers:
        replicate(layer, axis, partial=axis.sequence)
        for part in _parts(layer):
            _spread_part(part, styles, axis, experts=experts, model=model)
    for module in decoder.children():
        if module is not layers and module is not embedding:
            _hold_all(module, axis, partial=axis.sequence)
    beside = [
        module for module in model.base_model.children() if decoder is not model.base_model and module is not decoder
    ]
    for module in beside:
        _hold_all(module, axis, partial=False)
    # The row is whole until pictures are in it: see `context`.
    if (score := score_layer(model)) is not None:
        axis.place(score, "weight", Shard(1))
    _spread_vocabulary(embedding, model.get_output_embeddings(), replace(axis, sequence=axis.sequence and not beside))


def check_sizes(config: PreTrainedConfig, *, tp: int) -> None:
    """Raise UserError with the sizes if a model of `config` cannot be sharded over `tp` ranks."""
    heads = config.num_attention_heads
    sizes = {"attention heads": heads, "key-value heads": getattr(config, "num_key_value_heads", None) or heads}
    for what, number in sizes.items():
        if number % tp:
            raise UserError(
                f"[policy.parallel] tp = {tp} does not divide the model's {number} {what}; choose a tp that does, "
                "and dp_shard or cp for the other ranks"
            )
    if config.vocab_size <= -(-config.vocab_size // tp) * (tp - 1):
        raise UserError(f"[policy.parallel] tp = {tp} leaves ranks without a token of the {config.vocab_size}")


def _styles(model: PreTrainedModel) -> Styles:
    config = model.config.get_text_config()
    named = (config.base_model_tp_plan or {}).items()
    plan = {name: style for name, style in named if ".experts" not in name and (name, style) != _VOCABULARY}
    plan |= _LEFT_OUT.get(config.model_type, {})
    unknown = sorted({style for style in plan.values() if style not in _CUT and style not in _FOLLOWS})
    if unknown or not plan:
        raise UserError(
            f"[policy.parallel] tp: {type(model).__name__} has no supported plan for sharding its matrices "
            f"({', '.join(unknown) or 'it has none'}); set tp = 1"
        )
    patterns = {module: _pattern(name) for name, module in language_model(model).named_modules()}
    plan = with_adapters(_gated(patterns) | _vectors(plan, patterns) | plan)
    styles = {module: plan.get(pattern) for module, pattern in patterns.items()}
    return {module: style for module, style in styles.items() if style in _CUT}


def _gated(patterns: Mapping[nn.Module, str]) -> dict[str, str]:
    """The styles of all gated feed-forward networks: plans leave out shared experts (Qwen2-MoE, GLM-4.7-Flash)."""
    gated = [pattern for module, pattern in patterns.items() if _GATED.keys() <= dict(module.named_children()).keys()]
    return {f"{pattern}.{name}": style for pattern in gated for name, style in _GATED.items()}


def _vectors(plan: Mapping[str, str], patterns: Mapping[nn.Module, str]) -> dict[str, str]:
    """The style of modules with a planned vector of their own, such as the sinks of an attention."""
    planned = [name.rpartition(".") for name, style in plan.items() if style == "colwise"]
    named = {
        (pattern, name) for module, pattern in patterns.items() for name, _ in module.named_parameters(recurse=False)
    }
    return {holder: "per_head" for holder, _, name in planned if (holder, name) in named}


def _pattern(name: str) -> str:
    """layers.3.mlp -> layers.*.mlp"""
    return re.sub(r"\.\d+\b", ".*", name)


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules that a decoder layer calls."""
    for child in layer.children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


def _spread_part(
    part: nn.Module, styles: Styles, axis: TensorAxis, *, experts: Collection[nn.Module], model: PreTrainedModel
) -> None:
    """Shard a part of a decoder layer: a region, a module that every rank computes whole, or a norm."""
    inside = [module for module in part.modules() if module not in experts]
    has_experts = len(inside) < len(list(part.modules()))
    unknown = _unknown(part, styles, experts)
    if unknown and has_experts:
        raise UserError(
            f"[policy.parallel] tp: {type(model).__name__} has {unknown[0]} beside its experts, and whether its output "
            "is a part of their sum is not known; set tp = 1"
        )
    # A region's outputs are summed over the ranks. That is right for every module inside that is cut or feeds one that
    # is; a part with any other module is computed whole by each rank, on the whole sequence if it has matrices.
    if has_experts or (not unknown and any(module in styles for module in inside)):
        for module in inside:
            if module in styles:
                _CUT[styles[module]](module, axis)
            else:
                replicate(module, axis, partial=True)
        region(part, axis)
    elif any(parameter.ndim > 1 for parameter in part.parameters()):
        _hold_all(part, axis, partial=False)
        whole_sequence(part, axis)
    else:
        _hold_all(part, axis, partial=axis.sequence)


def _unknown(part: nn.Module, styles: Styles, experts: Collection[nn.Module]) -> list[str]:
    """Names of modules with parameters that are neither sharded nor known to feed sharded ones."""
    known = {module for module, style in styles.items() if style == "per_head"}
    for name, module in part.named_modules():
        if module in experts or module in styles.keys() - known or name.rpartition(".")[2] in _INSIDE:
            known |= set(module.modules())  # of a layer also its adapters
    return [
        name or type(part).__name__
        for name, module in part.named_modules()
        if module not in known and any(True for _ in module.parameters(recurse=False))
    ]


def _hold_all(module: nn.Module, axis: TensorAxis, *, partial: bool) -> None:
    for inner in module.modules():
        replicate(inner, axis, partial=partial)


def _spread_vocabulary(embedding: nn.Module, head: nn.Module | None, axis: TensorAxis) -> None:
    """Shard embedding and head along the vocabulary; a stage of a pipeline may lack either."""
    # A tied matrix stays one parameter: the head takes the embedding's shard, which is cut along the same dimension.
    tied = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear) and head.weight is embedding.weight
    if isinstance(embedding, nn.Embedding):
        cut_vocabulary(embedding, axis)
    if not isinstance(head, nn.Linear):
        return
    if tied:
        head.weight = embedding.weight  # pyright: ignore[reportAttributeAccessIssue]
    else:
        axis.place(head, "weight", Shard(0))
    if head.bias is not None:
        axis.place(head, "bias", Replicate())


def _check_compiled_experts(terms: TermModel) -> None:
    """Raise UserError for experts in float32 on a GPU: their products wait for the host, which breaks each graph."""
    dtype = terms.compute_dtype or next(terms.parameters()).dtype
    if terms.device.type == "cuda" and dtype == torch.float32:
        raise UserError(
            "[policy.memory] compile = true: products of experts in float32 cannot be compiled on a GPU; set "
            '[model] dtype = "bfloat16", or compile = false'
        )


def _check_shared(terms: TermModel) -> None:
    """Raise UserError for a parameter of two layers (Zamba): FSDP gathers a layer's parameters for it alone."""
    seen: set[nn.Parameter] = set()
    for block in terms.blocks:
        mine = dict(block.named_parameters())
        if shared := [name for name, parameter in mine.items() if parameter in seen]:
            raise UserError(
                f"[policy.parallel] {type(terms.causal_lm).__name__} has layers that share {shared[0]}, which cannot "
                "be sharded over ranks; train it on one rank"
            )
        seen |= set(mine.values())


def parallelize(terms: TermModel, setup: ModelSetup) -> None:
    """Shard `terms` in place; with a mesh, every trained parameter is a DTensor afterwards.

    Parameters are sharded from the rank's own copy without communication: all ranks must have the same values, or load
    them later. Raises UserError for a model that cannot be sharded according to `setup`.
    """
    mesh = setup.mesh
    head = score_layer(terms.causal_lm) or terms.causal_lm.get_output_embeddings()
    has_experts = any(is_experts(module) for module in terms.modules())
    compiled = setup.compiles(obstacle="experts" if has_experts else "")
    if compiled and has_experts:
        _check_compiled_experts(terms)
    skipped = [head, *adapter_layers(terms)]
    use_float8(terms, setup.precision.fp8, device=setup.device, skip=skipped, compiled=compiled)
    if compiled:
        install_attention(terms.causal_lm, traced=False)
    # Each step needs what the ones before it made: experts are skipped by tp, hooks of recomputation enclose the cut
    # layers, and fully_shard gathers what is inside of these hooks.
    experts = []
    if mesh is not None:
        check_heads(terms.config, tp=mesh.dims.tp, cp=mesh.dims.cp)
        experts = spread_experts(terms.causal_lm, mesh)
    elif terms.compute_dtype is not None and terms.device.type == "cuda":
        use_mixed_experts(terms.causal_lm)
    if terms.axis is not None:
        spread_tensors(terms.causal_lm, terms.axis, experts=experts)
    tower = tower_blocks(terms.causal_lm)
    save_memory(tower, setup.memory, compiled=False)  # the lengths of its sequences differ from row to row
    save_memory(terms.blocks, setup.memory, compiled=compiled)
    if mesh is not None:
        _check_shared(terms)
        shard_fully(
            terms,
            blocks=[*tower, *terms.blocks],
            mesh=mesh,
            parallel=setup.parallel,
            memory=setup.memory,
            precision=setup.precision,
            compute_dtype=terms.compute_dtype,
            experts=experts,
        )
