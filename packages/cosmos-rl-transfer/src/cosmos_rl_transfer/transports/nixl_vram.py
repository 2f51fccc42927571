"""NIXL from GPU to GPU: the subscriber reads slots on the publisher's GPU into its own (GPUDirect RDMA, or NVLink).

UCX chooses the path. The publisher packs into slots on its GPU; the subscriber reads into a buffer on its own GPU,
verifies the bucket there, and with staging = "in_place" writes it to the live tensors without host memory. Attaching
reads the nonces behind the slots on the same path (gpu_slots.py). Both processes need their CUDA context in the thread
that registers memory or posts a read.

Unproven on hardware: tests replace `space_of`. "auto" takes it between hosts, after a test (selftest.py).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from cosmos_rl_transfer.content.gpu import SideStream
from cosmos_rl_transfer.content.raw import Block, Raw
from cosmos_rl_transfer.errors import PeerLost, TransferError
from cosmos_rl_transfer.transports.base import Outlet, TransportUnavailable
from cosmos_rl_transfer.transports.gpu_slots import (
    NONCE_BYTES,
    GpuSlots,
    nonce_of,
    outside_expandable_segments,
    own_gpu,
)
from cosmos_rl_transfer.transports.nixl_agent import NixlAgent, NixlInlet, Region, Space, agent_of
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

_PROBE_S = 5.0


class Offered(msgspec.Struct, frozen=True):
    """The slots of a publisher."""

    metadata: str
    """Of its agent, in base64."""
    device: int
    """Index of its GPU in its own process."""
    slots: list[int]
    """Address of each."""
    slot_bytes: int
    """Without the nonce behind it."""
    nonce: str
    """In hexadecimal digits."""


def space_of(device: torch.device) -> Space:
    """Return the memory of a GPU with an index."""
    assert device.index is not None, "the GPU of a process has an index"
    return Space("VRAM_SEG", device.index)


class NixlVram:
    """NIXL with UCX on GPU memory, from the extra `nixl`."""

    name = "nixl_vram"

    def open(self, *, bucket_bytes: int, num_slots: int) -> _Outlet:
        """Make and register slots on this process's GPU."""
        side = SideStream(own_gpu("nixl_vram"))
        return _Outlet(agent_of("publisher-vram"), side, bucket_bytes, num_slots)

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> _Inlet:
        """Register a buffer on this process's GPU and read the publisher's nonces into it, to verify the path."""
        if "gpu_memory" not in offer:
            raise TransportUnavailable("the publisher does not serve GPU memory over NIXL")
        try:
            offered = msgspec.json.decode(offer["gpu_memory"], type=Offered)
        except msgspec.ValidationError as error:
            raise TransportUnavailable(f"the publisher's slots are not understood: {error}") from error
        inlet = _Inlet(agent_of("subscriber-vram"), link, SideStream(own_gpu("nixl_vram")), offered)
        try:
            inlet.join()
        except BaseException:
            inlet.close()
            raise
        return inlet


class _Outlet(Outlet):
    keeps_slot = True
    over_link = False
    direct = False

    def __init__(self, agent: NixlAgent, side: SideStream, bucket_bytes: int, num_slots: int) -> None:
        self._agent, self._device, self._space = agent, side.device, space_of(side.device)
        gpu_slots = GpuSlots(side, bucket_bytes, num_slots)
        self._blocks = gpu_slots.blocks
        self.slots: Sequence[Block] = gpu_slots.slots
        with torch.cuda.device(self._device):
            agent.register([_region(block) for block in self._blocks], self._space)
            metadata = agent.metadata()
        offered = Offered(
            metadata=base64.b64encode(metadata).decode(),
            device=self._space.device,
            slots=[slot.data_ptr() for slot in gpu_slots.slots],
            slot_bytes=bucket_bytes,
            nonce=gpu_slots.nonce.hex(),
        )
        self.offer: Mapping[str, str] = {"gpu_memory": msgspec.json.encode(offered).decode()}

    def close(self) -> None:
        """Deregister and drop the slots."""
        if self._blocks:
            with torch.cuda.device(self._device):
                self._agent.deregister([_region(block) for block in self._blocks], self._space)
        self._blocks, self.slots = [], []


class _Inlet(NixlInlet):
    views = True

    def __init__(self, agent: NixlAgent, link: Link, side: SideStream, offered: Offered) -> None:
        super().__init__(agent, link)
        self._side, self._offered = side, offered
        self._here, self._remote_space = space_of(side.device), space_of(torch.device("cuda", offered.device))
        with side.current(), outside_expandable_segments():
            self._buffer = torch.zeros(offered.slot_bytes + NONCE_BYTES, dtype=torch.uint8, device=side.device)
        side.mark().synchronize()  # the transport writes to it beside every stream
        with torch.cuda.device(side.device):
            agent.register([_region(self._buffer)], self._here)
        self._registered = True

    def join(self) -> None:
        """Read the nonces. Raises TransportUnavailable, with the reason, if the path does not work."""
        self._peer = self._agent.meet(base64.b64decode(self._offered.metadata))
        nonce, at = bytes.fromhex(self._offered.nonce), self._offered.slot_bytes
        for slot in self._offered.slots:
            try:
                self._fill(slot + at, at, NONCE_BYTES, timeout_s=min(_PROBE_S, self._link.timeout_s))
            except PeerLost as error:
                self._link.check()
                raise TransportUnavailable(f"NIXL cannot read the publisher's GPU memory: {error}") from error
            if nonce_of(self._buffer, self._side) != nonce:
                raise TransportUnavailable("NIXL read other memory than the publisher offered")

    def receive(self, data: Data, *, out: Raw | None) -> Block:
        """Read the slot into the buffer on the GPU, which the next bucket overwrites."""
        if not 0 <= data.slot < len(self._offered.slots) or data.num_bytes > self._offered.slot_bytes:
            raise TransferError(f"{data.num_bytes} bytes were announced in slot {data.slot}, which is not offered")
        self._fill(self._offered.slots[data.slot], 0, data.num_bytes, timeout_s=self._link.timeout_s)
        return self._buffer[: data.num_bytes]

    def close(self) -> None:
        """Deregister the buffer, and forget the publisher."""
        self._leave()
        if self._registered:
            self._registered = False
            with torch.cuda.device(self._side.device):
                self._agent.deregister([_region(self._buffer)], self._here)

    def _fill(self, remote: int, at: int, num_bytes: int, *, timeout_s: float) -> None:
        """Read bytes at address `remote` into the buffer at `at`."""
        moves = [(remote, self._buffer.data_ptr() + at, num_bytes)]
        with torch.cuda.device(self._side.device):
            self._read(moves, timeout_s=timeout_s, remote_space=self._remote_space, here=self._here)


def _region(block: Tensor) -> Region:
    return block.data_ptr(), block.nbytes
