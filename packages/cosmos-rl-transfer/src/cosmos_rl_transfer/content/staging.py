"""The seam between live tensors and host memory: all bytes that are sent or received pass through these two.

host_memory    allocates slots, receive buffers and copies of weights
LivePart       reads and writes boxes of one live tensor, casting where its dtype is not the wire dtype

A tensor in host memory with the wire dtype is read and written in one pass with its hash. One of another dtype is
copied by torch and hashed in host memory. A tensor on a GPU is read by publish/staged.py, and written here out of
pinned memory without waiting, on the stream of the caller (`gpu.SideStream`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.content.digest import copy_sum, tensor_sum
from cosmos_rl_transfer.content.gpu import pinned, typed
from cosmos_rl_transfer.content.raw import Raw, raw_view, same_width
from cosmos_rl_transfer.layout.dtensor import dtype_name, local
from cosmos_rl_transfer.layout.manifest import Box


def host_memory(num_bytes: int, *, lazy: bool = False) -> Raw:
    """Return zeros uint8 [num_bytes]. The page faults happen now, or with `lazy` at the first write."""
    memory = np.zeros(num_bytes, np.uint8)
    if not lazy:
        memory.fill(0)
    return memory


def as_torch(packed: Raw, dtype: str) -> Tensor:
    """View writable unsigned integers of the width of `dtype` as a torch tensor of the same shape."""
    return torch.from_numpy(packed).view(getattr(torch, dtype))


class LivePart:
    """One rank's part of a live tensor. Packed elements are unsigned integers of the wire dtype's width."""

    __slots__ = ("box", "dtype", "host", "shape", "tensor")

    def __init__(self, tensor: Tensor, box: Box, *, shape: tuple[int, ...], dtype: str) -> None:
        """View `tensor`, which holds `box` of a tensor of `shape`. dtype: on the wire."""
        self.tensor = local(tensor)
        self.box, self.shape, self.dtype = box, shape, dtype
        is_plain = self.tensor.device.type == "cpu" and dtype_name(self.tensor) == dtype
        self.host = same_width(self.tensor) if is_plain else None
        """The same memory [*box.shape] where its bytes are those on the wire."""

    @property
    def flat(self) -> Raw | None:
        """The bytes on the wire uint8 [n], in place; None where they are not contiguous in host memory."""
        if self.host is None or not self.host.flags.c_contiguous:
            return None
        return self.host.reshape(-1).view(np.uint8)

    def at(self, box: Box) -> Tensor:
        """View the elements of `box`."""
        return self.tensor[box.within(self.box).slices()]

    def read(self, box: Box, out: Raw) -> int:
        """Copy `box` into `out` [*box.shape] and return its additive hash."""
        if self.host is not None:
            return copy_sum(self.host[(*box.within(self.box).slices(), ...)], out, box, self.shape)
        as_torch(out, self.dtype).copy_(self.at(box))
        return tensor_sum(out, box, self.shape)

    def write(self, box: Box, packed: Raw) -> int:
        """Copy `packed` [*box.shape] into `box` and return the additive hash of the bytes that were written."""
        if self.host is not None:
            return copy_sum(packed, self.host[(*box.within(self.box).slices(), ...)], box, self.shape)
        if self.tensor.device.type == "cuda":
            mine = pinned(packed.nbytes)  # the caller's buffer is used again before the GPU has read it
            found = copy_sum(packed, raw_view(mine.numpy(), 0, packed.shape, packed.itemsize), box, self.shape)
            self.at(box).copy_(typed(mine, 0, box.shape, self.dtype), non_blocking=True)
            return found
        if not packed.flags.writeable:  # a publisher's slot, which may be reused between the hash and the copy
            packed = packed.copy()
        found = tensor_sum(packed, box, self.shape)
        self.at(box).copy_(as_torch(packed, self.dtype))
        return found

    def store(self, box: Box, packed: Raw) -> None:
        """Copy verified `packed` [*box.shape] in host memory into `box`; on a GPU without waiting."""
        if self.host is not None:
            np.copyto(self.host[(*box.within(self.box).slices(), ...)], packed)
        else:
            self.at(box).copy_(as_torch(packed, self.dtype), non_blocking=True)
