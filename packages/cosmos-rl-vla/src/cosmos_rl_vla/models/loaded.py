"""A policy: the network, its normalisation statistics and its tokenizer.

loaded = make(config, on_meta=...)   a directory's model has uninitialised parameters, over ranks none
... cast, adapt, shard, materialise  each rank has memory for its shards of them
loaded.fill()                        reads those shards
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cosmos_rl_core.parallel.config import LoraSection
from cosmos_rl_core.parallel.lora import adapter_weights, base_name, write_adapter_config
from cosmos_rl_vla.actions import ActionStats
from cosmos_rl_vla.models import checkpoint
from cosmos_rl_vla.models.base import ActionModel
from cosmos_rl_vla.models.instructions import Instructions


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A policy and its files."""

    model: ActionModel
    stats: ActionStats
    instructions: Instructions
    directory: Path | None
    """The directory with its weights; None for a randomly initialised model."""
    lora: LoraSection | None = None
    """Options of its adapters; None without."""

    def fill(self) -> None:
        """Fill the model, or this rank's shards, with the directory's weights; nothing for a random model.

        Raises UserError for weights that do not belong to the model.
        """
        if self.directory is not None:
            checkpoint.fill(self.model, checkpoint.weight_files(self.directory))

    def weights(self) -> dict[str, Tensor]:
        """Return live tensors by public name, tied ones once; only the trained ones for a model with adapters."""
        if self.lora is not None:
            return self.trained_weights()
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        persistent = self.model.state_dict(keep_vars=True)
        return {self.model.names.public_name(name): tensor for name, tensor in named.items() if name in persistent}

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the trained tensors; adapters by their names in peft's files."""
        named = self.model.named_parameters()
        trained = {name: tensor for name, tensor in named if tensor.requires_grad and base_name(name) is not None}
        return adapter_weights(self.model) | {
            self.model.names.public_name(name): tensor for name, tensor in trained.items()
        }

    def cast_parameters(self, dtype: torch.dtype) -> None:
        """Cast the parameters to `dtype`, in place, except for those of the modules in `exact`."""
        kept = {id(parameter) for group in self.model.exact() for module in group for parameter in module.parameters()}
        for parameter in self.model.parameters():
            if id(parameter) not in kept:
                parameter.data = parameter.data.to(dtype)

    def save_config(self, directory: Path) -> None:
        """Write the files other than weights that load the model."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model.write_config(directory, self.stats)
        if self.lora is not None:
            write_adapter_config(self.model, directory)
        self.stats.save(directory)
        self.instructions.save(directory)
