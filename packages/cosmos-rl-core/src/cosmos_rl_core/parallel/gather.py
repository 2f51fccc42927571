"""Whole tensors out of the parts that ranks hold."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return the tensor with all its elements, without gradient; all ranks that hold parts of a DTensor call it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
