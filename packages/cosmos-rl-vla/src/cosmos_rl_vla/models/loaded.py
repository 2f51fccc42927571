"""A policy: the network, its normalisation statistics and its tokenizer.

loaded = make(config, on_meta=...)   a directory's model has uninitialised parameters, over ranks none
... cast, adapt, shard, materialise  each rank has memory for its shards of them
loaded.fill()                        reads those shards
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.parallel.lora import adapter_weights, base_name, write_adapter_config
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.models.instructions import Instructions

if TYPE_CHECKING:
    from cosmos_rl_vla.models.base import ActionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy and its files."""

    model: ActionModel
    stats: ActionStats
    instructions: Instructions
    public_name: Callable[[str], str]
    """Name of a parameter -> its name in the family's public checkpoints."""
    write_config: Callable[[Path], None]
    """Writes config.json."""
    fill: Callable[[], object]
    """Fills the module, or this rank's shards, with the directory's weights; does nothing for a random model."""
    is_choice: bool = False
    """Whether an action is one of several, with one log-probability for all of its components."""
    aux_dim: int = 0
    """Dimensions of the auxiliary target of supervised training."""
    blocks: tuple[nn.Module, ...] = ()
    """Layers that are sharded, checkpointed and compiled one by one, in the order they run."""
    root_blocks: tuple[nn.Module, ...] = ()
    """Those of them whose inner tensors are also read from outside: sharded with the root module."""
    exact: tuple[tuple[nn.Module, ...], ...] = ()
    """Modules that compute in float32 if the rest is in bfloat16, in groups that always run together."""
    lora: LoraSection | None = None
    """Options of its adapters; None without."""

    @property
    def module(self) -> nn.Module:
        return cast(nn.Module, self.model)

    def weights(self) -> dict[str, Tensor]:
        """Return live tensors by public name, tied ones once; only the trained ones for a model with adapters."""
        if self.lora is not None:
            return self.trained_weights()
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        persistent = self.module.state_dict(keep_vars=True)
        return {self.public_name(name): tensor for name, tensor in named.items() if name in persistent}

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the trained tensors; adapters by their names in peft's files."""
        named = self.module.named_parameters()
        trained = {name: tensor for name, tensor in named if tensor.requires_grad and base_name(name) is not None}
        return adapter_weights(self.module) | {self.public_name(name): tensor for name, tensor in trained.items()}

    def cast_parameters(self, dtype: torch.dtype) -> None:
        """Cast the parameters to `dtype`, in place, except for those of the modules in `exact`."""
        kept = {id(parameter) for group in self.exact for module in group for parameter in module.parameters()}
        for parameter in self.module.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.to(dtype)

    def save_config(self, directory: Path) -> None:
        """Write the files other than weights that load the model."""
        directory.mkdir(parents=True, exist_ok=True)
        self.write_config(directory)
        if self.lora is not None:
            write_adapter_config(self.module, directory)
        self.stats.save(directory)
        self.instructions.save(directory)


def nothing_to_fill() -> None:
    """`LoadedPolicy.fill` of a randomly initialised model."""
