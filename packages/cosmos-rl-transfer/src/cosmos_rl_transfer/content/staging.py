"""The seam between live tensors and host memory: all bytes that are sent or received pass through these two.

host_memory    allocates slots, receive buffers and copies of weights; Spare keeps blocks for copies of buckets
LivePart       reads and writes boxes of one live tensor, casting where its dtype is not the wire dtype

A tensor in host memory with the wire dtype is copied and hashed by proof.py. One of another dtype is cast by torch
from or to host memory, where it is hashed. A tensor on a GPU is read by publish/memory.py, and written here out of
pinned memory without waiting, on the stream of the caller (`gpu.SideStream`).
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.content.digest import tensor_sum
from cosmos_rl_transfer.content.gpu import pinned, typed
from cosmos_rl_transfer.content.proof import Part
from cosmos_rl_transfer.content.raw import Raw, raw_view, same_width
from cosmos_rl_transfer.layout.dtensor import dtype_name, local
from cosmos_rl_transfer.layout.manifest import Box


def host_memory(num_bytes: int, *, lazy: bool = False) -> Raw:
    """Return zeros uint8 [num_bytes], aligned to a page. The page faults happen now, or with `lazy` at first writes."""
    if not num_bytes:
        return np.zeros(0, np.uint8)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    if not lazy:
        memory.fill(0)
    return memory


class Spare:
    """Blocks of one size. Any thread may call."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Raw] = []
        self._taken: set[int] = set()
        self._guard = threading.Lock()

    def take(self, num_bytes: int) -> Raw:
        """Return uint8 [num_bytes] with any content; at most a block."""
        with self._guard:
            block = self._blocks.pop() if self._blocks else host_memory(self._block_bytes, lazy=True)
            self._taken.add(id(block))
        return block[:num_bytes]

    def give(self, taken: Raw) -> None:
        """Return what `take` returned, for the next `take`; other memory, such as a shared copy, is left alone."""
        with self._guard:
            if isinstance(taken.base, np.ndarray) and id(taken.base) in self._taken:
                self._taken.discard(id(taken.base))
                self._blocks.append(taken.base)

    def shrink(self) -> None:
        """Free half of the blocks: the last fence needed none."""
        with self._guard:
            del self._blocks[len(self._blocks) // 2 :]


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

    def sum(self) -> int:
        """Return the part of the tensor's hash that the live elements contribute, in the dtype on the wire."""
        packed = same_width(self.tensor.to(device="cpu", dtype=getattr(torch, self.dtype)))
        return tensor_sum(packed, self.box, self.shape)

    def reading(self, box: Box, out: Raw) -> Part:
        """Return the copy of `box` into `out` [*box.shape]; where the dtype is another one it is made at once."""
        if self.host is not None:
            return Part(self._host(box), out, box, self.shape)
        as_torch(out, self.dtype).copy_(self.at(box))
        return Part(out, None, box, self.shape)

    def writing(self, box: Box, packed: Raw) -> tuple[Part, Callable[[], object]]:
        """Return the copy of `packed` [*box.shape] into `box`, and a function to be called after it.

        Where the dtype or the device is another one, the copy goes to memory of its own, and the function casts that
        into the tensor: the caller's memory may be reused meanwhile.
        """
        if self.host is not None:
            return Part(packed, self._host(box), box, self.shape), _nothing
        if self.tensor.device.type == "cuda":
            mine = pinned(packed.nbytes)
            copy = raw_view(mine.numpy(), 0, packed.shape, packed.itemsize)
            typed_copy = typed(mine, 0, box.shape, self.dtype)
            return Part(packed, copy, box, self.shape), lambda: self.at(box).copy_(typed_copy, non_blocking=True)
        copy = np.empty(packed.shape, packed.dtype)
        return Part(packed, copy, box, self.shape), lambda: self.at(box).copy_(as_torch(copy, self.dtype))

    def _host(self, box: Box) -> Raw:
        assert self.host is not None, "its bytes are not those on the wire"
        return self.host[(*box.within(self.box).slices(), ...)]

    def store(self, box: Box, packed: Raw) -> None:
        """Copy verified `packed` [*box.shape] in host memory into `box`; on a GPU without waiting."""
        if self.host is not None:
            np.copyto(self._host(box), packed)
        else:
            self.at(box).copy_(as_torch(packed, self.dtype), non_blocking=True)


def _nothing() -> None:
    pass
