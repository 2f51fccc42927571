"""Torch tensors as plain numbers and the other way round, without a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_rl_transfer.content.digest import Raw

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_width(tensor: Tensor) -> Raw:
    """View a CPU tensor as unsigned integers of the same width: a hash must not extend a sign."""
    return tensor.view(_SAME_WIDTH[tensor.element_size()]).numpy().view(f"u{tensor.element_size()}")


def raw_bytes(tensor: Tensor) -> Raw:
    """View a contiguous CPU tensor as bytes uint8 [n]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def torch_view(memory: Raw, at: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """View bytes [at, ...) of uint8 `memory` as a torch tensor [*shape]."""
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = torch.Size(shape).numel() * kind.itemsize
    return torch.from_numpy(memory[at : at + num_bytes]).view(kind).view(shape)
