"""Low-rank adapters of diffusers' networks.

Their names, first values, scales and merging are core's (`parallel/lora.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from cosmos_rl_core.errors import UserError
from cosmos_rl_core.parallel.device import lent_random_state
from cosmos_rl_core.parallel.lora import fill_adapters, peft_config
from cosmos_rl_wfm.models.config import LoraSection

if TYPE_CHECKING:
    from diffusers.loaders import PeftAdapterMixin
    from peft import LoraConfig


def add_adapters(
    network: nn.Module, section: LoraSection, *, targets: Sequence[str], base: str = "", seed: int = 0
) -> None:
    """Put adapters on linear layers of `network`, in place, and freeze the rest.

    Args:
        targets: ends of the layers' names where the section says "family".
        base: path or id of the model, for those who load the adapters later.
        seed: of the values of A, which depend on nothing else but the layer's name.

    Raises UserError for layers that the network does not have, and where peft is not installed.
    """
    config = _peft_config(network, section, targets)
    with lent_random_state():  # peft draws values of its own
        _adapted(network).add_adapter(config, "default")
    config.base_model_name_or_path = base
    fill_adapters(network, seed=seed)


def write_adapter_config(network: nn.Module, directory: Path) -> None:
    """Write the adapter_config.json that peft looks for beside adapter_model.safetensors."""
    _settings(network).save_pretrained(str(directory))


def _adapted(network: nn.Module) -> PeftAdapterMixin:
    from diffusers.loaders import PeftAdapterMixin

    if not isinstance(network, PeftAdapterMixin):
        raise UserError(f"[model.lora] {type(network).__name__} takes no adapters in diffusers; remove the section")
    return network


def _settings(network: nn.Module) -> LoraConfig:
    return cast(Any, network).peft_config["default"]  # peft puts it there


def _peft_config(network: nn.Module, section: LoraSection, family: Sequence[str]) -> LoraConfig:
    return peft_config(
        rank=section.rank,
        alpha=section.alpha,
        target_modules=_targets(network, section, family),
        package="cosmos-rl-wfm",
    )


def _targets(network: nn.Module, section: LoraSection, family: Sequence[str]) -> list[str]:
    """Full names of the layers to adapt."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if section.target_modules == "all-linear":
        return linear
    wanted = list(family if section.target_modules == "family" else section.target_modules)
    chosen = {end: [name for name in linear if f".{name}".endswith(f".{end}")] for end in wanted}
    unknown = sorted(end for end, names in chosen.items() if not names)
    if unknown or not wanted:
        ends = sorted({re.sub(r"^.*\.\d+\.(?=.*[a-z])", "", name) for name in linear})
        raise UserError(
            f"[model.lora] target_modules: {type(network).__name__} has no linear layer whose name ends in "
            f"{', '.join(unknown) or 'anything'}; it has {', '.join(ends)}"
        )
    return sorted({name for names in chosen.values() for name in names})
