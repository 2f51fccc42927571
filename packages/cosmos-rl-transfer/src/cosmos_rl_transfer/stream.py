"""One (publisher, target rank) stream: its buckets, and their hashes for the version in a slot."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw, add, bucket_hash, tensor_sum
from cosmos_rl_transfer.plan import Bucket


@dataclass(frozen=True, slots=True)
class StreamDigest:
    """What a subscriber compares with."""

    bucket_hashes: tuple[int, ...]
    tensor_sums: dict[str, int]
    """By tensor: additive hash of what the stream carries of it."""


class Stream:
    """The buckets one publisher sends to one target rank."""

    def __init__(self, arena: Arena, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self._arena = arena
        self._numel: dict[str, int] = {}
        """By tensor: elements the stream carries."""
        for piece in (p for bucket in buckets for p in bucket.pieces):
            self._numel[piece.name] = self._numel.get(piece.name, 0) + piece.box.numel
        packed = (b.num_bytes for b in buckets if arena.flat_start(b) is None)
        self._scratch = np.zeros(max(packed, default=0), np.uint8)

    def packed(self, memory: Raw, bucket: Bucket) -> Raw:
        """Return the bucket's packed bytes: in place, or in a scratch that the next call uses again."""
        start = self._arena.flat_start(bucket)
        if start is not None:
            return memory[start : start + bucket.num_bytes]
        out = self._scratch[: bucket.num_bytes]
        self._arena.gather(memory, bucket, out)
        return out

    def digest(self, memory: Raw, *, box_sums: dict[str, int], pool: Executor) -> StreamDigest:
        """Hash the stream. `box_sums`: hashes of whole boxes from packing, used where the stream has all."""
        if self._scratch.size:
            hashes = tuple(bucket_hash(self.packed(memory, bucket)) for bucket in self.buckets)
        else:
            hashes = tuple(pool.map(lambda bucket: bucket_hash(self.packed(memory, bucket)), self.buckets))
        places = self._arena.places
        sums = {name: box_sums[name] for name, n in self._numel.items() if n == places[name].box.numel}
        for piece in (p for bucket in self.buckets for p in bucket.pieces):
            if self._numel[piece.name] != places[piece.name].box.numel:
                part = tensor_sum(self._arena.piece(memory, piece), piece.box, places[piece.name].shape)
                sums[piece.name] = add(sums.get(piece.name, 0), part)
        return StreamDigest(hashes, sums)
