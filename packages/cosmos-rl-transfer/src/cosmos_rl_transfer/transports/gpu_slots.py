"""Slots on this process's GPU with a nonce behind each, for transports from GPU to GPU: CUDA IPC, and NIXL on VRAM.

A subscriber reads the nonce the way that it will read buckets, which shows that the path works and that the memory is
the publisher's.

Slots are allocated outside expandable segments (`PYTORCH_CUDA_ALLOC_CONF`, which policies set by default). torch shares
such a segment by a file descriptor that the other process fetches with pidfd_getfd (`ExpandableSegment::fromShared` in
torch 2.13's CUDACachingAllocator.cpp); kernels before 5.6 lack it, and without the rights of a debugger over the
publisher's process, as in most containers, it fails. RDMA needs memory that is mapped as one allocation, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cosmos_rl_core.hardware_log import log_choice
from cosmos_rl_core.parallel.device import own_device
from cosmos_rl_transfer.content.gpu import SideStream
from cosmos_rl_transfer.transports.base import TransportUnavailable

NONCE_BYTES = 16


def own_gpu(transport: str) -> torch.device:
    """Return this process's GPU. Raises TransportUnavailable where there is none; `transport` is for the message."""
    device = own_device()
    if device.type != "cuda":
        raise TransportUnavailable(f"{transport} needs a GPU, and torch sees none")
    return device


@contextmanager
def outside_expandable_segments() -> Iterator[None]:
    """Switch expandable segments off for the allocations inside; the process's other settings stay."""
    settings: str = torch._C._accelerator_getAllocatorSettings()
    if "expandable_segments:true" not in settings.replace(" ", "").lower():
        yield
        return
    log_choice("weights: slots on the GPU are allocated outside expandable segments")
    torch._C._accelerator_setAllocatorSettings(f"{settings},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


class GpuSlots:
    """Slots uint8 [bucket_bytes] on the GPU of `side`, each followed by the nonce."""

    def __init__(self, side: SideStream, bucket_bytes: int, num_slots: int) -> None:
        self.nonce = os.urandom(NONCE_BYTES)
        with side.current(), outside_expandable_segments():
            nonce = torch.frombuffer(bytearray(self.nonce), dtype=torch.uint8).pin_memory()
            self.blocks = [
                torch.zeros(bucket_bytes + NONCE_BYTES, dtype=torch.uint8, device=side.device) for _ in range(num_slots)
            ]
            """Slot and nonce: uint8 [bucket_bytes + NONCE_BYTES] each."""
            for block in self.blocks:
                block[bucket_bytes:].copy_(nonce, non_blocking=True)
        side.mark().synchronize()
        self.slots = [block[:bucket_bytes] for block in self.blocks]


def nonce_of(block: Tensor, side: SideStream) -> bytes:
    """Return the last NONCE_BYTES of uint8 [n] on the GPU; waits for them alone."""
    return bytes(side.to_host(block[-NONCE_BYTES:], torch.uint8).tolist())
