"""Memory as unsigned integers, without a copy: torch tensors and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Raw = np.ndarray[Any, Any]
Block = Any
"""Bytes uint8 [n]: a `Raw` in host memory, or a Tensor on a GPU, by the transport."""
_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def same_width(tensor: Tensor) -> Raw:
    """View a CPU tensor as unsigned integers of the same width: a hash must not extend a sign."""
    return tensor.view(SAME_WIDTH[tensor.element_size()]).numpy().view(f"u{tensor.element_size()}")


def torch_view(memory: Raw, at: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """View bytes [at, ...) of uint8 `memory` as a torch tensor [*shape]."""
    kind: torch.dtype = getattr(torch, dtype)
    num_bytes = torch.Size(shape).numel() * kind.itemsize
    return torch.from_numpy(memory[at : at + num_bytes]).view(kind).view(shape)


def raw_view(memory: Raw, at: int, shape: tuple[int, ...], item_bytes: int) -> Raw:
    """View bytes [at, ...) of `memory` as unsigned integers [*shape] of `item_bytes` each."""
    return np.ndarray(shape, _UINT[item_bytes], memory.data, at)


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Contiguous bytes, and their position in a packed bucket."""

    data: Block
    """uint8 [n], contiguous."""
    at: int
    """First byte in the packed bucket."""
