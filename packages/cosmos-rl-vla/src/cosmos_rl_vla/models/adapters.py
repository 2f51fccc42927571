"""Low-rank adapters of action models: which layers get them, and what is written beside them.

Their names, first values, scales and merging are core's (`parallel/lora.py`). Heads that reinforcement learning adds
have no base to adapt: they are trained, sent and saved whole, beside the adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import lent_random_state
from cosmos_rl_core.parallel.lora import fill_adapters, merge, peft_config
from cosmos_rl_vla.models.checkpoint import Names, read, weight_files
from cosmos_rl_vla.models.config import LoraSection

if TYPE_CHECKING:
    from peft import LoraConfig

_WHOLE = ("value_head.", "aux_head.", "denoiser.noise_head.")
"""Heads."""
_FILED = "base_model.model."
"""Before the names of adapters in peft's files."""
_OUTPUT = "lm_head"
"""No adapter reaches it: OpenVLA reads rows of its weight, and pi models have none."""


def add_adapters(module: nn.Module, section: LoraSection, *, seed: int) -> None:
    """Put adapters on linear layers of `module`, in place, and freeze all but them and the heads.

    seed: of the values of A, which depend on nothing else but the layer's name.

    Raises UserError for layers that the module does not have, and where peft is not installed.
    """
    config = _peft_config(section, targets=_targets(module, section))
    from peft import inject_adapter_in_model

    with lent_random_state(seed=seed):  # peft draws values of its own
        inject_adapter_in_model(config, module, adapter_name="default")
    for name, parameter in module.named_parameters():
        if name.startswith(_WHOLE):
            parameter.requires_grad_(True)
    fill_adapters(module, seed=seed)


def write_adapter_config(module: nn.Module, section: LoraSection, directory: Path, *, base: str) -> None:
    """Write the adapter_config.json that peft looks for beside adapter_model.safetensors."""
    config = _peft_config(section, targets=_targets(module, section))
    config.base_model_name_or_path = base
    config.save_pretrained(str(directory))


def merged(
    tensors: Iterable[tuple[str, Tensor]], directory: Path, *, names: Names, section: LoraSection
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `directory` with adapters merged into them, by public name, and the trained heads."""
    trained = dict(tensors)
    adapters = {name: tensor for name, tensor in trained.items() if name.startswith(_FILED)}
    heads = {name: tensor for name, tensor in trained.items() if name not in adapters}
    base = read(weight_files(directory), names=names)
    for name, tensor in merge(base, adapters, scaling=section.alpha / section.rank):
        public = names.public_name(name)
        if public not in heads:
            yield public, tensor
    yield from heads.items()


def _peft_config(section: LoraSection, *, targets: list[str]) -> LoraConfig:
    return peft_config(rank=section.rank, alpha=section.alpha, target_modules=targets, package="cosmos-rl-vla")


def _targets(module: nn.Module, section: LoraSection) -> list[str]:
    """Full names of the layers to adapt, with or without adapters on them already."""
    linear = sorted(
        {
            name.removesuffix(".base_layer")
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and ".lora_" not in name and not name.startswith(_WHOLE)
        }
    )
    linear = [name for name in linear if name.rpartition(".")[2] != _OUTPUT]
    if section.target_modules == "all-linear" and linear:
        return linear
    wanted = () if section.target_modules == "all-linear" else section.target_modules
    chosen = {end: [name for name in linear if f".{name}".endswith(f".{end}")] for end in wanted}
    unknown = sorted(end for end, names in chosen.items() if not names)
    if unknown or not wanted:
        ends = sorted({re.sub(r"^.*\.\d+\.(?=.*[a-z])", "", name) for name in linear})
        raise UserError(
            f"[model.lora] target_modules: {type(module).__name__} has no linear layer whose name ends in "
            f"{', '.join(unknown) or 'anything'}; it has {', '.join(ends) or 'none'}"
        )
    return sorted({name for names in chosen.values() for name in names})
