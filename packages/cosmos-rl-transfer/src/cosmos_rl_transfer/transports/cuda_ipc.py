"""CUDA IPC on one host: the publisher packs into slots on its GPU that the subscriber's process has mapped.

The subscriber copies a bucket from GPU to GPU (NVLink or PCIe) and verifies it there; with staging = "in_place" it goes
straight to the live tensors. Handles are torch's (torch/multiprocessing/reductions.py): each `offer` exports the slots
once more, since a handle counts one process that maps it. Slots and their nonces: gpu_slots.py.

Unproven on hardware: tests replace `export` and `map_exported`. "auto" takes it within a host, after a test
(selftest.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from cosmos_rl_transfer.content.gpu import SideStream
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.transports.base import MappedSlots, Outlet, TransportUnavailable
from cosmos_rl_transfer.transports.gpu_slots import NONCE_BYTES, GpuSlots, nonce_of, own_gpu
from cosmos_rl_transfer.wire.link import Link


class Handle(msgspec.Struct, frozen=True):
    """The arguments by which torch maps memory of another process; see `UntypedStorage._share_cuda_`."""

    memory: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_sync: bool


def export(block: Tensor) -> Handle:
    """Make the storage of a tensor on a GPU available to one other process. Raises RuntimeError."""
    storage: Any = block.untyped_storage()
    _, memory, size, offset, counter, counter_offset, event, event_sync = storage._share_cuda_()
    return Handle(memory, size, offset, counter, counter_offset, event, event_sync)


def map_exported(handle: Handle, device: torch.device) -> Tensor:
    """Map another process's memory for the use of `device`, as uint8 [n]. Raises RuntimeError."""
    kind: Any = torch.UntypedStorage
    storage = kind._new_shared_cuda(device.index, *msgspec.structs.astuple(handle))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class CudaIpc:
    """The CUDA IPC transport, for weights and engines on GPUs of one host."""

    name = "cuda_ipc"

    def open(self, *, bucket_bytes: int, num_slots: int) -> _Outlet:
        """Make slots on this process's GPU."""
        return _Outlet(GpuSlots(SideStream(own_gpu("CUDA IPC")), bucket_bytes, num_slots))

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> MappedSlots:
        """Map the publisher's slots."""
        if "gpu_slots" not in offer:
            raise TransportUnavailable("the publisher's slots are not on a GPU")
        device, nonce = own_gpu("CUDA IPC"), bytes.fromhex(offer["nonce"])
        try:
            handles = msgspec.json.decode(offer["gpu_slots"], type=list[Handle])
            slots = [map_exported(handle, device) for handle in handles]
        except (msgspec.ValidationError, RuntimeError) as error:
            raise TransportUnavailable(f"the publisher's GPU memory cannot be mapped: another host? {error}") from error
        side = SideStream(device)
        if any(nonce_of(slot, side) != nonce for slot in slots):
            raise TransportUnavailable("the publisher's GPU memory is not the one it offered")
        return MappedSlots([slot[:-NONCE_BYTES] for slot in slots])


class _Outlet(Outlet):
    keeps_slot = True
    over_link = False
    direct = False

    def __init__(self, gpu_slots: GpuSlots) -> None:
        self._blocks, self._nonce = gpu_slots.blocks, gpu_slots.nonce
        self.slots: Sequence[Block] = gpu_slots.slots
        try:  # for the first subscriber: a handle that nobody maps would keep its block for ever
            self._ready = [export(block) for block in self._blocks]
        except RuntimeError as error:
            raise TransportUnavailable(f"GPU memory cannot be exported: {error}") from error

    @property
    def offer(self) -> Mapping[str, str]:
        """Handles for one subscriber."""
        handles, self._ready = self._ready or [export(block) for block in self._blocks], []
        return {"gpu_slots": msgspec.json.encode(handles).decode(), "nonce": self._nonce.hex()}

    def close(self) -> None:
        """Drop the slots; torch frees them when no process maps them."""
        self._blocks, self.slots = [], []
