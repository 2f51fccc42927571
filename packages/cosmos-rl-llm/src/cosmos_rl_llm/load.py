"""Weights for a model that is spread over ranks: each reads its own parts of the files, and no rank holds the whole.

    model.empty_model(source)    the module tree; its parameters are memory that nobody has touched yet
    ... cut, spread, shard       each rank keeps its parts of them
    read_parts(module, source)   fills those from the safetensors, by name

That needs checkpoints whose names and shapes are the model's. Families that transformers renames or fuses while it
loads (experts, often) are loaded whole by each rank into the host's memory and then cut: `has_same_names` tells.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from cosmos_rl_core.parallel.lora import base_name
from cosmos_rl_core.parallel.own_part import fill_own_part
from cosmos_rl_llm.checkpoint import read_specs, resolve
from cosmos_rl_llm.model import named_weights


def has_same_names(model: PreTrainedModel, path_or_id: str | os.PathLike[str]) -> bool:
    """Whether the safetensors in a local directory have all of the model's weights by name and shape."""
    directory = Path(resolve(path_or_id))
    if not directory.is_dir():
        return False
    found = {spec.name: spec.shape for spec in read_specs(directory)}
    return all(found.get(name) == tuple(tensor.shape) for name, tensor in named_weights(model).items())


@torch.no_grad()
def read_parts(module: nn.Module, path_or_id: str | os.PathLike[str]) -> None:
    """Fill this rank's part of each parameter and persistent buffer from the safetensors of a local directory."""
    directory = Path(resolve(path_or_id))
    with ExitStack() as files:
        sources = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = files.enter_context(safe_open(path, framework="pt"))
            sources |= dict.fromkeys(file.keys(), file)
        tensors = {id(tensor): (name, tensor) for name, tensor in reversed(module.state_dict(keep_vars=True).items())}
        for name, tensor in tensors.values():  # tied tensors once, under their first name
            if (wanted := base_name(name)) is not None:  # an adapter has its first values already
                fill_own_part(tensor, sources[wanted].get_slice(wanted).__getitem__)
