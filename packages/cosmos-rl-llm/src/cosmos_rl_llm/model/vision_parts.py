"""The parts of a vision-language model: the tower, the projector into the decoder's width, and the language model.

    pixels -> tower -> projector -> in place of the placeholders' embeddings -> language model -> logits

Families nest the projector in the tower or put it beside the tower. Names decide, of modules and of weights in files.
No torch at import.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from cosmos_rl_core.errors import UserError
from cosmos_rl_llm.config import Part

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_TOWERS = {"visual", "vision_tower", "vision_model"}
_PROJECTORS = {"merger", "deepstack_merger_list", "multi_modal_projector", "connector"}
"""Qwen's mergers are inside the tower."""


def part_of(name: str) -> Part:
    """Return the part of a module or weight by its full name."""
    names = set(name.split("."))
    if names & _PROJECTORS:
        return "projector"
    return "tower" if names & _TOWERS else "language_model"


def tower_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer layers of the vision tower in order; none of a text model."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = ((name, each) for name, each in model.named_modules() if isinstance(each, GradientCheckpointingLayer))
    return [layer for name, layer in layers if part_of(name) == "tower"]


def freeze(model: PreTrainedModel, frozen: Collection[Part]) -> None:
    """Exclude parts from training, in place. Raises UserError if the model has no such part."""
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    if missing := [part for part in frozen if part not in parts.values()]:
        raise UserError(f"[model] freeze: {type(model).__name__} has no {missing[0]}; remove it from the list")
    for name, parameter in model.named_parameters():
        if parts[name] in frozen:
            parameter.requires_grad_(False)
