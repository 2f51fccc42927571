"""Elements to be written into a live tensor of any strides, prepared so that writing them is one indexed store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.content.delta import Change
from cosmos_rl_transfer.content.positions import outward

_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Patch:
    """New values for some elements."""

    memory: Tensor
    """The live tensor's memory from its first element to its last, gaps included, as integers of its width [n]."""
    index: Tensor
    """int64 [k] on the tensor's device: where they go in `memory`."""
    values: Tensor
    """[k] on the tensor's device, as integers of its width."""

    @classmethod
    def of(cls, live: Tensor, change: Change, *, dtype: str) -> Patch:
        """Prepare a change whose positions are row-major in `live` and whose values are bits of `dtype`.

        Nothing of `change` is kept; the values are cast to the live tensor's dtype.
        """
        strides = live.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(live.shape, strides))
        width = _SAME_WIDTH[live.element_size()]
        at = outward(change.positions, live.shape, strides)
        values = torch.from_numpy(np.array(change.values)).view(getattr(torch, dtype))
        return cls(
            memory=live.as_strided((span,), (1,), live.storage_offset()).view(width),
            index=torch.from_numpy(at).to(live.device),
            values=values.to(device=live.device, dtype=live.dtype).view(width),
        )

    def before(self, dtype: torch.dtype) -> Tensor:
        """Return what is there now, on the host [k]; `dtype` is the live tensor's."""
        return self.memory.gather(0, self.index).view(dtype).cpu()

    def write(self) -> None:
        """Store the values. May be repeated."""
        self.memory.scatter_(0, self.index, self.values)
