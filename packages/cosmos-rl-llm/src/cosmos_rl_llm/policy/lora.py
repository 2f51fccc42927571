"""Low-rank adapters of language models: the layers that have them.

Their names, initial values and merging are in core (`parallel/lora.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel import lora
from cosmos_rl_core.storage.safetensors_header import weight_files
from cosmos_rl_llm.config import LLMLoraSection, Part
from cosmos_rl_llm.model.causal_lm import empty_model, score_layer
from cosmos_rl_llm.model.checkpoint import SCORE_WEIGHT
from cosmos_rl_llm.model.vision_parts import part_of
from cosmos_rl_llm.model.weights import find_weights

_WITH_FUSED_MIXERS = frozenset(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"))
"""Families whose Mamba mixers multiply by out_proj's weight inside a kernel, past an adapter; peft refuses it there."""
_NAMES_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Linear layers excluded if experts are stacked: peft would adapt the experts and the router instead."""


def add_adapters(
    model: PreTrainedModel, section: LLMLoraSection, *, base: str, seed: int = 0, without: Collection[Part] = ()
) -> None:
    """Put adapters on the linear layers of `model`, in place, and freeze the rest.

    Args:
        base: the model's path or id, recorded for loading the adapters later.
        seed: of the values of A, which depend only on it and the layer's name.
        without: parts of a vision-language model whose layers get none, beside those trained in full.

    Raises UserError for layers or parts that the model does not have, and if peft is not installed.
    """
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    if missing := [part for part in section.whole if part not in parts.values()]:
        raise UserError(f"[model.lora] whole: {type(model).__name__} has no {missing[0]}; remove it from the list")
    without = {*without, *section.whole}
    output, path = score_layer(model) or model.get_output_embeddings(), Path(base).expanduser()
    has_experts = any(parameter.ndim == 3 for parameter in model.parameters())
    heads = {name for name, module in model.named_modules() if module is output}

    trained = () if score_layer(model) is None else (SCORE_WEIGHT,)
    is_fused = model.config.model_type in _WITH_FUSED_MIXERS

    def leave_out(name: str) -> bool:
        last = name.rpartition(".")[2]
        skipped = (has_experts and last in _NAMES_OF_EXPERTS) or (is_fused and last == "out_proj")
        return skipped or name in heads or part_of(name) in without

    lora.add_adapters(
        model,
        section,
        layers=lora.pick_layers(model, section.target_modules, leave_out=leave_out),
        package="cosmos-rl-llm",
        base=str(path.resolve()) if path.is_dir() else base,
        task_type="CAUSAL_LM" if score_layer(model) is None else "SEQ_CLS",
        seed=seed,
        whole=[name for name, part in parts.items() if part in section.whole or name in trained],
    )


def with_adapters(plan: Mapping[str, str]) -> dict[str, str]:
    """Extend a tensor-parallel plan (layer -> "colwise", "rowwise", ...) to the parts of adapted layers.

    Column-wise: W and B are sharded along out, A is whole; row-wise: W and A are sharded along in, B is whole.
    """
    matrix = {"colwise": "lora_B", "rowwise": "lora_A"}
    extended = dict(plan)
    for layer, style in plan.items():
        if style in matrix:
            extended |= {f"{layer}.base_layer": style, f"{layer}.{matrix[style]}.{lora.ADAPTER}": style}
    return extended


def merge_adapters(
    base: Path, adapters: Iterable[tuple[str, Tensor]], *, section: LLMLoraSection
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model at `base` with its adapters merged, by their names in its files.

    transformers has other names for some models than their published files, such as those of Qwen2.5-VL.

    adapters: by their names in peft's files. Raises UserError for those of another model.
    """
    weights = find_weights(empty_model(base, dtype=torch.float32), str(base)) or {}
    plain = {name: weight.names[0][0] for name, weight in weights.items() if len(weight.names) == 1}
    named = ((lora.renamed(name, lambda layer: plain.get(layer, layer)), tensor) for name, tensor in adapters)
    head = f"base_model.model.{SCORE_WEIGHT}"  # of a reward model, whose base may be a language model
    named = ((SCORE_WEIGHT if name == head else name, tensor) for name, tensor in named)
    return lora.merge(read_tensors(base), named, scaling=section.scaling)


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's safetensors, one in memory at a time."""
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file, not a mapping
                yield name, file.get_tensor(name)
