"""A policy with what belongs to it: the network, the statistics of its numbers, the tokenizer of its instructions.

loaded = make(config)    of a directory's model no weight is read: its parameters are memory nobody has touched
... hold, adapt, shard   each rank keeps its parts of them
loaded.fill()            reads those parts
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
from cosmos_rl_vla.models.held import hold
from cosmos_rl_vla.models.instructions import Instructions

if TYPE_CHECKING:
    from cosmos_rl_vla.models.base import ActionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a directory holds."""

    model: ActionModel
    stats: ActionStats
    instructions: Instructions
    public_name: Callable[[str], str]
    """Name of a parameter -> that of the family's public checkpoints."""
    write_config: Callable[[Path], None]
    """Writes config.json."""
    fill: Callable[[], object]
    """Fills the module, or this rank's parts of it, with the directory's weights; nothing where they were drawn."""
    aux_dim: int = 0
    """Auxiliary targets that supervised training teaches it to read off the pictures."""
    blocks: tuple[nn.Module, ...] = ()
    """Layers that are sharded, recomputed and compiled one by one, in the order they run."""
    root_blocks: tuple[nn.Module, ...] = ()
    """Those of them whose parts, and not their output alone, are read from outside: sharded with what is around."""
    exact: tuple[tuple[nn.Module, ...], ...] = ()
    """What computes in float32 where the rest is in bfloat16, in groups: a pass that runs one of a group runs all."""
    lora: LoraSection | None = None
    """What its adapters are; None without."""

    @property
    def module(self) -> nn.Module:
        return cast(nn.Module, self.model)

    def weights(self) -> dict[str, Tensor]:
        """Live tensors by public name, shared ones once; of a model with adapters what is trained alone."""
        if self.lora is not None:
            return self.trained_weights()
        named = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        persistent = self.module.state_dict(keep_vars=True)
        return {self.public_name(name): tensor for name, tensor in named.items() if name in persistent}

    def trained_weights(self) -> dict[str, Tensor]:
        """Those that learn; adapters by their names in peft's files."""
        named = self.module.named_parameters()
        trained = {name: tensor for name, tensor in named if tensor.requires_grad and base_name(name) is not None}
        return adapter_weights(self.module) | {self.public_name(name): tensor for name, tensor in trained.items()}

    def hold(self, dtype: torch.dtype) -> None:
        """Hold everything but what is `exact` in `dtype`."""
        hold(self.module, dtype, exact=self.exact)

    def save_config(self, directory: Path) -> None:
        """Write what loads the model beside its weights."""
        directory.mkdir(parents=True, exist_ok=True)
        self.write_config(directory)
        if self.lora is not None:
            write_adapter_config(self.module, directory)
        self.stats.save(directory)
        self.instructions.save(directory)


def nothing_to_fill() -> None:
    """`Loaded.fill` of a model whose values were drawn."""
