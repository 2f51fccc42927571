"""Low-rank adapters of language models: which layers get them, and what is written beside them.

Their names, first values and merging are core's (`parallel/lora.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import lent_random_state
from cosmos_rl_core.parallel.lora import adapter_weights, fill_adapters, peft_config
from cosmos_rl_llm.config import LoraSection

if TYPE_CHECKING:
    from peft import LoraConfig

MERGED = "merged"
"""Folder, in a directory of adapters, with the files of the merged model that are not those of the adapters."""

_ADAPTER = "default"
"""peft's name of a model's one adapter; it is part of the parameters' names and not of the files'."""
_NAMES_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Linear layers that are left out beside stacked experts: peft would adapt the experts and the router instead."""


def add_adapters(model: PreTrainedModel, section: LoraSection, *, base: str, seed: int = 0) -> None:
    """Put adapters on the linear layers of `model`, in place, and freeze the rest.

    Args:
        base: the model's path or id, for those who load the adapters later.
        seed: of the values of A, which depend on nothing else but the layer's name.

    Raises UserError for layers that the model does not have, and where peft is not installed.
    """
    config = _peft_config(model, section)
    with lent_random_state(seed=seed):  # peft draws values of its own
        model.add_adapter(config, _ADAPTER)
    path = Path(base).expanduser()
    config.base_model_name_or_path = str(path.resolve()) if path.is_dir() else base
    fill_adapters(model, seed=seed)


def with_adapters(plan: Mapping[str, str]) -> dict[str, str]:
    """Extend a tensor-parallel plan (layer -> "colwise", "rowwise", ...) to the parts of adapted layers.

    In columns W and B are cut along out and A is whole; in rows W and A are cut along in and B is whole.
    """
    matrix = {"colwise": "lora_B", "rowwise": "lora_A"}
    extended = dict(plan)
    for layer, style in plan.items():
        if style in matrix:
            extended |= {f"{layer}.base_layer": style, f"{layer}.{matrix[style]}.{_ADAPTER}": style}
    return extended


def write_config(model: PreTrainedModel, directory: Path, *, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Write what loads a model beside its weights: configuration, with adapters theirs, and the tokenizer if any.

    adapter_config.json sends transformers to the base model, which a config.json beside it would not; that of the
    merged model therefore lies in merged/.
    """
    if adapter_weights(model):
        model.peft_config[_ADAPTER].save_pretrained(str(directory))
        model.config.save_pretrained(directory / MERGED)
    else:
        model.config.save_pretrained(directory)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's safetensors, one in memory at a time."""
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file, no mapping
                yield name, file.get_tensor(name)


def _peft_config(model: PreTrainedModel, section: LoraSection) -> LoraConfig:
    targets, excluded = _targets(model, section.target_modules)
    return peft_config(
        rank=section.rank,
        alpha=section.alpha,
        target_modules=targets,
        package="cosmos-rl-llm",
        exclude_modules=excluded or None,
        task_type="CAUSAL_LM",
    )


def _targets(model: PreTrainedModel, wanted: str | tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Last names of the linear layers to adapt, and full names of other modules that are called the same."""
    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    if any(parameter.ndim == 3 for parameter in model.parameters()):
        linear = {name for name in linear if _last(name) not in _NAMES_OF_EXPERTS}
    known = sorted({_last(name) for name in linear})
    targets = known if isinstance(wanted, str) else list(wanted)
    unknown = sorted(set(targets) - set(known))
    if unknown or not targets:
        raise UserError(
            f"[model.lora] target_modules: {type(model).__name__} has no linear layer called "
            f"{', '.join(unknown) or 'anything'}; it has {', '.join(known) or 'none'}"
        )
    return targets, [name for name in modules if _last(name) in targets and name not in linear]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
