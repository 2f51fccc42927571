"""One rank's tensors laid end to end in one block of bytes, in the dtypes they travel in.

A publisher's snapshot slot and a subscriber's staging are both arenas. Elements are handled as unsigned
integers of their width: nothing here casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cosmos_rl_transfer.content.digest import copy_sum, tensor_sum
from cosmos_rl_transfer.content.raw import Raw, raw_view
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Box, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, Piece, aligned


@dataclass(frozen=True, slots=True)
class Place:
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


@dataclass(frozen=True, slots=True)
class Arena:
    """The places of all tensors one rank holds."""

    places: Mapping[str, Place]
    num_bytes: int

    @classmethod
    def of(cls, manifest: Manifest, *, rank: int, wire_dtypes: Mapping[str, str]) -> Arena:
        """Lay out what `rank` holds, in the manifest's order."""
        places, end = {}, 0
        for spec, box in manifest.held_by(rank):
            places[spec.name] = place = Place(aligned(end), box, wire_dtypes[spec.name], spec.shape)
            end = place.at + place.num_bytes
        return cls(places, end)

    def tensor(self, memory: Raw, name: str) -> Raw:
        """View the part of a tensor that is in the arena."""
        place = self.places[name]
        return raw_view(memory, place.at, place.box.shape, place.item_bytes)

    def piece(self, memory: Raw, piece: Piece) -> Raw:
        """View the elements of a piece; strided where the arena holds more of the tensor."""
        inside = piece.box.within(self.places[piece.name].box)
        return self.tensor(memory, piece.name)[(*inside.slices(), ...)]

    def packed(self, data: Raw, piece: Piece) -> Raw:
        """View the elements of a piece in its bucket's packed bytes."""
        return raw_view(data, piece.at, piece.box.shape, self.places[piece.name].item_bytes)

    def flat_start(self, bucket: Bucket) -> int | None:
        """Return where the bucket's packed bytes already lie as one run, with padding; None if nowhere."""
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
        return base

    def gather(self, memory: Raw, bucket: Bucket, out: Raw) -> tuple[int, ...]:
        """Pack a bucket's bytes from the arena into `out` uint8 [bucket.num_bytes] and return its pieces' sums.

        Padding stays as it is.
        """
        return tuple(self._copied(self.piece(memory, p), self.packed(out, p), p) for p in bucket.pieces)

    def scatter(self, data: Raw, bucket: Bucket, memory: Raw) -> tuple[int, ...]:
        """Write a bucket's packed bytes to their places in the arena and return its pieces' sums."""
        return tuple(self._copied(self.packed(data, p), self.piece(memory, p), p) for p in bucket.pieces)

    def sums(self, memory: Raw, bucket: Bucket) -> tuple[int, ...]:
        """Return the additive hash of each piece as stored in the arena."""
        return tuple(tensor_sum(self.piece(memory, p), p.box, self.places[p.name].shape) for p in bucket.pieces)

    def _copied(self, source: Raw, target: Raw, piece: Piece) -> int:
        return copy_sum(source, target, piece.box, self.places[piece.name].shape)
