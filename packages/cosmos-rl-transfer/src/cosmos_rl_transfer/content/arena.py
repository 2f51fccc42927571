"""One rank's tensors end to end in one block of host memory, in their wire dtypes.

A publisher's copy (publish/outgoing.py) and a subscriber's shadow (pull/landing.py) are arenas. Elements are unsigned
integers of their width. A reader that takes another dtype gets its pieces cast while they are packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cosmos_rl_transfer.content.digest import tensor_sum
from cosmos_rl_transfer.content.proof import Part, Proof, copy_proof
from cosmos_rl_transfer.content.raw import ByteRun, Raw, raw_view, same_width
from cosmos_rl_transfer.content.staging import as_torch, host_memory
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Box, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece, aligned

DIRECT_BYTES = 128 << 10
"""Contiguous pieces of at least this size are sent in place, without a copy."""


@dataclass(frozen=True, slots=True)
class ArenaSlot:
    """The place of one tensor in the arena."""

    at: int
    """First byte in the arena."""
    box: Box
    """The part of the tensor that is stored there, in checkpoint coordinates."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.item_bytes


class Arena:
    """All tensors of one rank."""

    def __init__(self, manifest: Manifest, *, rank: int, wire_dtypes: Mapping[str, str]) -> None:
        """Allocate the parts of `rank`, in the manifest's order. A tied name has the place of its tensor."""
        places, end = dict[str, ArenaSlot](), 0
        for spec, box in manifest.held_by(rank):
            places[spec.name] = place = ArenaSlot(aligned(end), box, wire_dtypes[spec.name], spec.shape)
            end = place.at + place.num_bytes
        self.names = tuple(places)
        """Tensors, without tied names."""
        self.places = places | {alias: places[name] for alias, name in manifest.tied.items() if name in places}
        self.memory = host_memory(end)
        """uint8 [n]."""

    def tensor(self, name: str) -> Raw:
        """View a tensor's part [*box.shape]."""
        place = self.places[name]
        return raw_view(self.memory, place.at, place.box.shape, place.item_bytes)

    def flat(self, name: str) -> Raw:
        """View a tensor's part [n]."""
        place = self.places[name]
        return raw_view(self.memory, place.at, (place.box.numel,), place.item_bytes)

    def piece(self, piece: BucketPiece) -> Raw:
        """View the elements of a piece; strided where the arena holds more of the tensor."""
        inside = piece.box.within(self.places[piece.name].box)
        return self.tensor(piece.name)[(*inside.slices(), ...)]

    def sends(self, bucket: Bucket) -> bool:
        """Whether all pieces travel in the dtypes of the arena."""
        return all(piece.dtype == self.places[piece.name].dtype for piece in bucket.pieces)

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        """Return the bucket's bytes in place, or None where they have to be packed."""
        runs = []
        for piece in bucket.pieces:
            place = self.places[piece.name]
            if piece.dtype != place.dtype:
                return None
            inside = piece.box.within(place.box)
            num_bytes = piece.box.numel * place.item_bytes
            if num_bytes < DIRECT_BYTES or not inside.is_contiguous(place.box.shape):
                return None
            first = place.at + inside.start(place.box.shape) * place.item_bytes
            runs.append(ByteRun(self.memory[first : first + num_bytes], piece.at))
        return runs

    def run(self, bucket: Bucket) -> Raw | None:
        """View the bucket's packed bytes where the arena has them as one run, with padding; None if nowhere."""
        # All pieces have to be at one distance from their places in the bucket, and the gaps between them padding in
        # the arena too: `padded` says whether the piece before reached the end of its tensor there.
        base, end, padded = None, 0, True
        for piece in bucket.pieces:
            place = self.places[piece.name]
            inside = piece.box.within(place.box)
            first = inside.start(place.box.shape) * place.item_bytes
            if not inside.is_contiguous(place.box.shape) or base not in (None, place.at + first - piece.at):
                return None
            if end < piece.at and not (padded and first == 0):
                return None  # the bytes between are not padding here but more of either tensor
            base, end = place.at + first - piece.at, piece.at + piece.box.numel * place.item_bytes
            padded = first + piece.box.numel * place.item_bytes == place.num_bytes
        return None if base is None else self.memory[base : base + bucket.num_bytes]

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return their hashes.

        Casts pieces that travel in another dtype. Padding stays as it is.
        """
        return copy_proof([self._part(self._cast(p), self._packed(out, p), p) for p in bucket.pieces])

    def _cast(self, piece: BucketPiece) -> Raw:
        """Return a piece's elements in the dtype in which it travels."""
        elements, dtype = self.piece(piece), self.places[piece.name].dtype
        if piece.dtype == dtype:
            return elements
        return same_width(as_torch(elements, dtype).to(getattr(torch, piece.dtype)))

    def scatter(self, data: Raw, bucket: Bucket) -> Proof:
        """Write a bucket's packed bytes to their places in the arena; return the hashes of what is there."""
        return copy_proof([self._part(self._packed(data, p), self.piece(p), p) for p in bucket.pieces])

    def prove(self, bucket: Bucket) -> Proof:
        """Return the hashes of a bucket that was received in the arena, at `run`."""
        return copy_proof([self._part(self.piece(p), None, p) for p in bucket.pieces])

    def sums(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the additive hash of each piece as stored in the arena."""
        return tuple(tensor_sum(self.piece(p), p.box, self.places[p.name].shape) for p in bucket.pieces)

    def _packed(self, data: Raw, piece: BucketPiece) -> Raw:
        return raw_view(data, piece.at, piece.box.shape, ITEM_BYTES[piece.dtype])

    def _part(self, source: Raw, target: Raw | None, piece: BucketPiece) -> Part:
        return Part(source, target, piece.box, self.places[piece.name].shape)
