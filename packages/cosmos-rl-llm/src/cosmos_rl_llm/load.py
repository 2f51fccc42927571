"""Weights for a model that is spread over ranks: each reads its own parts of the files, and no rank holds the whole.

    model.empty_model(source)    the module tree; its parameters are memory that nobody has touched yet
    ... cut, spread, shard       each rank keeps its parts of them
    read_parts(module, source)   fills those from the safetensors, by name

That needs checkpoints whose names and shapes are the model's. Families that transformers renames or fuses while it
loads (experts, often) are loaded whole by each rank into the host's memory and then cut: `has_same_names` tells.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from cosmos_rl_core.parallel.lora import base_name
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
                _fill(tensor, wanted, sources)


def _fill(tensor: Tensor, name: str, sources: Mapping[str, safe_open]) -> None:
    whole = sources[name].get_slice(name)
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole[...])
        return
    local = tensor.to_local()
    if local.numel():
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local.copy_(whole[tuple(slice(start, start + size) for start, size in zip(offset, shape))])
