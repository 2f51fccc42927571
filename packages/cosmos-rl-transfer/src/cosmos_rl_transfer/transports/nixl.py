"""NIXL: the subscriber reads slots and live memory of the publisher by itself (RDMA, or one copy on the same host).

UCX chooses the path: InfiniBand and RoCE where there are any, `process_vm_readv` on one host, else its own TCP.

    catalog (registered, at a fixed address)      nonce | generation | size | xxh3 | the agent's metadata

Attaching reads the nonce, which proves that the path works. Memory exposed after a subscriber attached is in a newer
generation of the catalog; `locate` puts the generation in an empty run before the others, and the subscriber rereads
the catalog if its generation differs. GPU memory: nixl_vram.py.
"""

from __future__ import annotations

import base64
import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from cosmos_rl_transfer.content.raw import Raw
from cosmos_rl_transfer.errors import PeerLost, TransferError
from cosmos_rl_transfer.transports.base import ByteRun, Outlet, TransportUnavailable
from cosmos_rl_transfer.transports.nixl_agent import NixlAgent, NixlInlet, Region, agent_of
from cosmos_rl_transfer.wire.link import Link
from cosmos_rl_transfer.wire.messages import Data

_PROBE_S = 5.0
_RETRY_S = 1e-3
_CATALOG_BYTES = 4 << 20
"""Enough for 18,000 pieces of memory at 200 bytes each; pages are allocated when written."""
_HUGE_PAGE = 2 << 20
_NONCE_BYTES = 16
_HEAD = struct.Struct("<QQQ")
"""Generation, size and hash of the metadata."""
_BODY = _NONCE_BYTES + _HEAD.size


class Nixl:
    """NIXL with UCX, from the extra `nixl`."""

    name = "nixl"

    def open(self, *, bucket_bytes: int, num_slots: int) -> _Outlet:
        """Make and register slots."""
        return _Outlet(agent_of("publisher"), bucket_bytes, num_slots)

    def attach(self, link: Link, *, offer: Mapping[str, str], memory: Sequence[Raw]) -> _Inlet:
        """Register `memory` and read the publisher's nonce, to verify the path."""
        if "catalog" not in offer:
            raise TransportUnavailable("the publisher does not serve over NIXL")
        inlet = _Inlet(agent_of("subscriber"), link, memory)
        try:
            inlet.join(offer)
        except BaseException:
            inlet.close()
            raise
        return inlet


class _Outlet(Outlet):
    keeps_slot = True
    over_link = False
    direct = True

    def __init__(self, agent: NixlAgent, bucket_bytes: int, num_slots: int) -> None:
        self._agent = agent
        self._nonce = os.urandom(_NONCE_BYTES)
        self._catalog: Raw = np.zeros(_CATALOG_BYTES, np.uint8)
        self._catalog[:_NONCE_BYTES] = np.frombuffer(self._nonce, np.uint8)
        self._generation = 0
        self._exposed: list[Region] = []
        self._kept: list[Raw] = []
        """Exposed memory, kept alive: its addresses must not be reused while they are registered."""
        self.slots: Sequence[Raw] = _slots(bucket_bytes, num_slots)
        self._own = [_region(memory) for memory in (self._catalog, *self.slots)]
        agent.register(self._own)
        self.offer: Mapping[str, str] = {
            "metadata": base64.b64encode(agent.metadata()).decode(),
            "catalog": str(self._catalog.ctypes.data),
            "nonce": self._nonce.hex(),
        }

    def expose(self, memory: Sequence[Raw]) -> None:
        """Register memory, unless it is already registered, and write a new catalog."""
        regions = _merged(memory)
        if regions == self._exposed:
            return
        stale, self._exposed = self._exposed, []
        if stale:
            self._agent.deregister(stale)
        if regions:
            self._agent.register(regions)
        self._exposed, self._kept = regions, list(memory)
        self._generation += 1
        self._write_catalog(np.frombuffer(self._agent.metadata(), np.uint8))

    def locate(self, runs: Sequence[ByteRun]) -> tuple[tuple[int, int, int], ...]:
        """Return the generation in an empty run, then address, offset and bytes of each run."""
        places = tuple((run.data.ctypes.data, run.at, run.data.nbytes) for run in runs)
        return ((self._generation, 0, 0), *places)

    def close(self) -> None:
        """Deregister everything. Memory that can be read a while longer no longer proves that this is the publisher."""
        self._catalog[:_NONCE_BYTES] = 0
        if self._own:
            self._agent.deregister([*self._own, *self._exposed])
        self._own, self._exposed, self._kept, self.slots = [], [], [], []

    def _write_catalog(self, metadata: Raw) -> None:
        if metadata.nbytes > _CATALOG_BYTES - _BODY:
            raise TransferError(f"{len(self._exposed)} pieces of memory are too many to expose to NIXL at once")
        head = _HEAD.pack(self._generation, metadata.nbytes, xxhash.xxh3_64_intdigest(metadata.data))
        self._catalog[_BODY : _BODY + metadata.nbytes] = metadata
        self._catalog[_NONCE_BYTES:_BODY] = np.frombuffer(head, np.uint8)


class _Inlet(NixlInlet):
    views = False

    def __init__(self, agent: NixlAgent, link: Link, memory: Sequence[Raw]) -> None:
        super().__init__(agent, link)
        self._catalog = 0
        self._generation = 0
        self._head: Raw = np.zeros(_BODY, np.uint8)
        self._memory = [self._head, *(part for part in memory if part.nbytes)]
        """Kept alive while registered."""
        self._regions = [_region(part) for part in self._memory]
        agent.register(self._regions)

    def join(self, offer: Mapping[str, str]) -> None:
        """Read the nonce. Raises TransportUnavailable, with the reason, if the path does not work."""
        self._peer = self._agent.meet(base64.b64decode(offer["metadata"]))
        self._catalog = int(offer["catalog"])
        try:
            self._read_catalog(self._head, timeout_s=min(_PROBE_S, self._link.timeout_s))
        except PeerLost as error:
            self._link.check()
            raise TransportUnavailable(f"NIXL cannot read the publisher's memory: {error}") from error
        if self._head[:_NONCE_BYTES].tobytes().hex() != offer["nonce"]:
            raise TransportUnavailable("NIXL read other memory than the publisher offered")

    def receive(self, data: Data, *, out: Raw | None) -> Raw:
        """Read the bucket's runs into `out`."""
        assert out is not None and out.nbytes == data.num_bytes, "NIXL reads into the caller's memory"
        assert _inside(_region(out), self._regions), "`out` must be in the memory given to attach"
        (generation, _, _), *runs = data.runs
        if any(at < 0 or size < 0 or at + size > out.nbytes for _, at, size in runs):
            raise TransferError(f"bucket {data.bucket}: the publisher named bytes outside its {out.nbytes}")
        if generation > self._generation:
            self._learn(generation)
        base = out.ctypes.data
        self._read([(address, base + at, size) for address, at, size in runs], timeout_s=self._link.timeout_s)
        return out

    def close(self) -> None:
        """Deregister, and forget the publisher."""
        self._leave()
        if self._regions:
            self._agent.deregister(self._regions)
        self._memory, self._regions = [], []

    def _learn(self, generation: int) -> None:
        """Read the catalog until it is whole and at least of this generation."""
        timeout_s = self._link.timeout_s
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._read_catalog(self._head, timeout_s=timeout_s)
            catalog_generation, size, digest = _HEAD.unpack(self._head[_NONCE_BYTES:].tobytes())
            if catalog_generation >= generation and size <= _CATALOG_BYTES - _BODY:
                metadata = self._read_metadata(size, timeout_s=timeout_s)
                if xxhash.xxh3_64_intdigest(metadata) == digest and self._peer is not None:
                    self._agent.relearn(self._peer, metadata)
                    self._generation = catalog_generation
                    return
            time.sleep(_RETRY_S)  # it is being rewritten
        raise PeerLost(f"the publisher's catalog of generation {generation} did not arrive within {timeout_s:g} s")

    def _read_metadata(self, size: int, *, timeout_s: float) -> bytes:
        body = np.zeros(size, np.uint8)
        self._agent.register([_region(body)])
        try:
            self._read_catalog(body, at=_BODY, timeout_s=timeout_s)
        finally:
            self._agent.deregister([_region(body)])
        return body.tobytes()

    def _read_catalog(self, out: Raw, *, at: int = 0, timeout_s: float) -> None:
        self._read([(self._catalog + at, out.ctypes.data, out.nbytes)], timeout_s=timeout_s)


def _slots(bucket_bytes: int, num_slots: int) -> list[Raw]:
    """Allocate slots in huge pages, page faults done: the kernel resolves every page when another process reads."""
    stride = -(-bucket_bytes // _HUGE_PAGE) * _HUGE_PAGE
    mapped = mmap.mmap(-1, stride * num_slots + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        mapped.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(mapped, np.uint8)
    first = -pages.ctypes.data % _HUGE_PAGE
    slots = [pages[first + i * stride :][:bucket_bytes] for i in range(num_slots)]
    for slot in slots:
        slot.fill(0)
    return slots


def _region(memory: Raw) -> Region:
    return memory.ctypes.data, memory.nbytes


def _merged(memory: Sequence[Raw]) -> list[Region]:
    """Return ascending regions of `memory`, adjacent ones merged."""
    merged: list[Region] = []
    for address, size in sorted(_region(part) for part in memory if part.nbytes):
        if merged and address <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = first, max(sum(merged[-1]), address + size) - first
        else:
            merged.append((address, size))
    return merged


def _inside(region: Region, others: Sequence[Region]) -> bool:
    return any(first <= region[0] and sum(region) <= first + size for first, size in others)
