"""Copies between a GPU and pinned host memory on a stream of their own, and the additive hash on the GPU.

Whatever is queued on a `SideStream` neither waits for the computation of the default stream nor delays it. The current
device is a property of each thread, so every thread sets it (`SideStream.current`) before it queues a copy.

Unproven on hardware: tests run on the pretend device of `tests/shared/doubles/pretend_cuda.py`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_transfer.content.digest import BLOCK, FIRST, SECOND, STEP, TABLE
from cosmos_rl_transfer.content.raw import SAME_WIDTH, Raw
from cosmos_rl_transfer.layout.dtensor import local
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Box

log = logging.getLogger(__name__)

MASK = (1 << 64) - 1
_CHUNK = 1 << 22
"""Words, or elements, that are hashed at a time: temporaries of 32 MiB each."""


def gpu_of(tensors: Iterable[Tensor]) -> torch.device | None:
    """Return the GPU of the first tensor that is on one; None where all are in host memory."""
    return next((tensor.device for tensor in map(local, tensors) if tensor.device.type == "cuda"), None)


def computed(device: torch.device | None) -> torch.cuda.Event | None:
    """Return an event after all work that this thread has queued on its stream of `device`; None without a GPU."""
    if device is None:
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    return event


class SideStream:
    """A stream of one GPU for copies. Any thread may use it; copies run in the order in which they are queued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
        self._last: torch.cuda.Event | None = None
        """After the copies of the last `switching`."""
        with self.current():
            table = torch.from_numpy(TABLE.view(np.int64)).pin_memory()
            self.table = table.to(device, non_blocking=True)
            """T of the additive hash: int64 [BLOCK]."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device and the stream this thread's own inside."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    @contextmanager
    def switching(self) -> Iterator[None]:
        """Order what is queued inside after the work that this thread has queued on its stream, and before the next.

        The stream waits on the GPU; the host does not.
        """
        with torch.cuda.device(self.device):
            computing = torch.cuda.current_stream(self.device)
            self.wait_for(computed(self.device))
            yield
            self._last = self.mark()
            computing.wait_event(self._last)

    def settle(self) -> None:
        """Wait until the copies of the last `switching` are done: their source may be written afterwards."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None

    def wait_for(self, event: torch.cuda.Event | None) -> None:
        """Start nothing that is queued later before `event`."""
        if event is not None:
            self._stream.wait_event(event)

    def to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy in pinned memory, cast on the GPU, of the same shape; waits for it alone."""
        with self.current():
            host = pinned(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
            host.copy_(tensor.to(dtype).contiguous(), non_blocking=True)
            done = self.mark()
        done.synchronize()
        return host

    def sums(self, sums: Tensor) -> tuple[int, ...]:
        """Return additive hashes int64 [n] on the GPU; waits for them alone, and for what was queued before."""
        return tuple(value & MASK for value in self.to_host(sums, torch.int64).tolist())

    def mark(self) -> torch.cuda.Event:
        """Return an event after everything queued so far; a thread that waits for it sleeps."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        return event


def pinned(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] in pinned host memory, reused by torch once it is freed and its copies are done.

    Torch rounds the size up to a power of two, as buckets are; see `pin` for other sizes.
    """
    # by name: engines switch inside `with torch.device("cuda")`
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def pin(memory: Raw, device: torch.device) -> None:
    """Pin host memory that numpy allocated, without rounding; it is unpinned when it is freed.

    Where the system refuses (a limit on locked memory), the memory stays pageable, with one warning.
    """
    if not memory.nbytes:
        return
    address = memory.ctypes.data
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        log.warning("%d bytes for weights cannot be pinned (CUDA error %d): copies are slower", memory.nbytes, error)
        return
    weakref.finalize(memory, runtime.cudaHostUnregister, address)


def device_sum(packed: Tensor, box: Box, shape: tuple[int, ...], *, item_bytes: int, table: Tensor) -> Tensor:
    """Return the part of H (digest.py) that `box` of a tensor of `shape` contributes, as int64 [] on its device.

    packed: uint8 [n] on any device, the box's elements row-major, from a multiple of 8 bytes on. table: T on the same
    device. Integers wrap mod 2^64 as in digest.py; compare with `& MASK`. Nothing waits for the device.
    """
    total = torch.zeros((), dtype=torch.int64, device=packed.device)
    dims, lanes = box.merged(shape), 8 // item_bytes
    elements = packed[: box.numel * item_bytes].view(SAME_WIDTH[item_bytes])
    if not any(number % lanes for number in dims[-1]):  # rows of whole words: eight bytes at a time
        size, offset, extent = dims[-1]
        dims[-1], lanes = (size // lanes, offset // lanes, extent // lanes), 1
        elements = elements.view(torch.int64)
    bits = 64 // lanes
    for low in range(0, len(elements), _CHUNK):
        part = elements[low : low + _CHUNK].to(torch.int64)
        index = _tensor_index(torch.arange(low, low + len(part), device=packed.device), dims)
        if lanes > 1:
            part = (part & ((1 << bits) - 1)) << (index % lanes) * bits  # unsigned, at its place in the word
            index = index // lanes
        total += (part * _mix(index, table)).sum()
    return total


def _tensor_index(at: Tensor, dims: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return the row-major index in a tensor of what is at row-major int64 `at` [k] in a box; dims: `Box.merged`."""
    index, stride = torch.zeros_like(at), 1
    for size, offset, extent in reversed(dims):
        index = index + (at % extent + offset) * stride
        at, stride = at // extent, stride * size
    return index


def _mix(index: Tensor, table: Tensor) -> Tensor:
    """mix(k) of digest.py for words int64 [k]."""
    return table[index & (BLOCK - 1)] * _odd(index // BLOCK)


def _odd(index: Tensor) -> Tensor:
    """digest.odd in signed arithmetic, which wraps alike; a shift to the right extends the sign, hence the mask."""
    z = (index + 1) * _signed(STEP)
    z = (z ^ _shifted(z, 30)) * _signed(FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(SECOND)
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def typed(packed: Tensor, at: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """View bytes [at, ...) of uint8 `packed` as a tensor [*shape] of `dtype`."""
    num_bytes = torch.Size(shape).numel() * ITEM_BYTES[dtype]
    return packed[at : at + num_bytes].view(getattr(torch, dtype)).view(shape)
