"""The proof of a bucket: xxh3-64 of its pieces' bytes, and the additive hash of each piece."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from cosmos_rl_transfer.content.delta import outward, row_strides
from cosmos_rl_transfer.content.digest import sum_change, tensor_sum
from cosmos_rl_transfer.content.raw import Raw, raw_view
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Box, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece

Shape = tuple[int, ...]


def shapes_of(manifest: Manifest) -> dict[str, Shape]:
    """Return the shape of each of a manifest's tensors, tied names too."""
    shapes = {name: spec.shape for name, spec in manifest.specs.items()}
    return shapes | {alias: shapes[name] for alias, name in manifest.tied.items()}


NOT_HASHED = 0
"""`Proof.hash` of a bucket that stays on GPUs: its additive hashes alone are compared."""


@dataclass(frozen=True, slots=True)
class Proof:
    hash: int
    """xxh3-64 of the pieces' bytes, one after the other, without padding."""
    sums: tuple[int, ...]
    """Additive hash of each piece."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of `shape`, to be copied and hashed."""

    source: Raw
    """Unsigned integers [*box.shape], any strides."""
    target: Raw | None
    """The same, elsewhere; None: nothing is copied. At least one of the two is contiguous."""
    box: Box
    shape: Shape


def packed_pieces(bucket: Bucket, data: Raw) -> Iterable[tuple[BucketPiece, Raw]]:
    """Yield each piece with its elements [*box.shape] in packed bytes uint8 [bucket.num_bytes]."""
    for piece in bucket.pieces:
        yield piece, raw_view(data, piece.at, piece.box.shape, ITEM_BYTES[piece.dtype])


def run_pieces(bucket: Bucket, runs: Iterable[Raw]) -> Iterable[tuple[BucketPiece, Raw]]:
    """Yield each piece with its elements [*box.shape] out of its own bytes uint8 [n]."""
    for piece, run in zip(bucket.pieces, runs):
        yield piece, raw_view(run, 0, piece.box.shape, ITEM_BYTES[piece.dtype])


def prove(pieces: Iterable[tuple[BucketPiece, Raw]], shapes: Mapping[str, Shape]) -> Proof:
    """Hash pieces in their order; each array [*box.shape] is contiguous."""
    return copy_proof([Part(array, None, piece.box, shapes[piece.name]) for piece, array in pieces])


def copy_proof(parts: Sequence[Part]) -> Proof:
    """Copy a bucket and prove the bytes in its targets: part by part, so that a copy is still in a cache."""
    # The target is hashed, not the source: memory that is written meanwhile (a live tensor, a slot that was lost) would
    # else be proven in one state and copied in another.
    state, sums = xxhash.xxh3_64(), list[int]()
    for part in parts:
        array = part.source
        if part.target is not None:
            array = part.target
            np.copyto(array, part.source)
        sums.append(tensor_sum(array, part.box, part.shape))
        packed = array if array.flags.c_contiguous else part.source
        state.update(packed.reshape(-1).view(np.uint8).data)
    return Proof(state.intdigest(), tuple(sums))


def pieces_hash(pieces: Iterable[tuple[BucketPiece, Raw]]) -> int:
    """Return the `hash` of a proof alone."""
    state = xxhash.xxh3_64()
    for _, array in pieces:
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.intdigest()


def gain(piece: BucketPiece, shape: Shape, positions: Raw, *, old: Raw, new: Raw) -> int:
    """Return the change of a piece's additive hash after updating elements at int64 `positions` [k] in its box."""
    at = outward(positions, piece.box.shape, row_strides(shape), piece.box.start(shape))
    return sum_change(at, old, new)


class Proofs:
    """Those of one version, kept for subscribers that want the same buckets. Any thread may call."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._version = -1
        self._known: dict[tuple[BucketPiece, ...], Proof] = {}

    def get(self, version: int, bucket: Bucket) -> Proof | None:
        """Return what was kept for these pieces of a version."""
        with self._guard:
            return self._known.get(bucket.pieces) if version == self._version else None

    def forget(self) -> None:
        """Drop all: versions may be counted anew."""
        with self._guard:
            self._version, self._known = -1, {}

    def keep(self, version: int, bucket: Bucket, proof: Proof) -> None:
        """Keep a proof; those of older versions go."""
        with self._guard:
            if version > self._version:
                self._version, self._known = version, {}
            if version == self._version:
                self._known[bucket.pieces] = proof
