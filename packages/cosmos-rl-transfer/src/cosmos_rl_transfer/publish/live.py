"""A trainer's live tensors as buckets, read in place: gathered and cast in one pass, or sent as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from cosmos_rl_transfer.content.arena import DIRECT_BYTES
from cosmos_rl_transfer.content.gpu import device_sum, typed
from cosmos_rl_transfer.content.proof import Part, Proof, copy_proof
from cosmos_rl_transfer.content.raw import ByteRun, Raw, raw_view
from cosmos_rl_transfer.content.staging import LivePart
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.dtensor import dtype_name, local
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, BucketPiece

if TYPE_CHECKING:
    from torch import Tensor


class LiveWeights:
    """One rank's parts of the weights."""

    def __init__(self, manifest: Manifest, *, rank: int) -> None:
        self._boxes = {spec.name: (spec, box) for spec, box in manifest.held_by(rank)}
        self._names = manifest.specs.keys() | manifest.tied.keys()
        self._tied = manifest.tied
        self._weights: Mapping[str, Tensor] = {}
        self._parts: dict[tuple[str, str], LivePart] = {}
        """By name and the dtype in which it travels."""

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise LayoutError unless `weights` are this rank's parts of the manifest."""
        if changed := sorted((weights.keys() - self._names) | (self._boxes.keys() - weights.keys())):
            raise LayoutError(f"the weights to publish are not those the publisher was made for: {changed[:5]}")
        for name, (spec, box) in self._boxes.items():
            given = (tuple(local(weights[name]).shape), dtype_name(weights[name]))
            if given != (expected := (box.shape, spec.dtype)):
                raise LayoutError(f"{name}: {given} to publish, {expected} when the publisher was made")

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Read these tensors from now on."""
        self._weights, self._parts = weights, {}

    def exposable(self) -> list[Raw]:
        """Return the bytes of the tensors that `runs` may return parts of."""
        parts = (self._as_sent(name, spec.dtype) for name, (spec, _) in self._boxes.items())
        return [flat for part in parts if (flat := part.flat) is not None]

    def runs(self, bucket: Bucket) -> list[ByteRun] | None:
        """Return the bucket's bytes in place, or None where they have to be packed."""
        runs = []
        for piece in bucket.pieces:
            part = self._part(piece)
            inside, flat, item_bytes = piece.box.within(part.box), part.flat, ITEM_BYTES[part.dtype]
            first, num_bytes = inside.start(part.box.shape) * item_bytes, piece.box.numel * item_bytes
            if flat is None or num_bytes < DIRECT_BYTES or not inside.is_contiguous(part.box.shape):
                return None
            runs.append(ByteRun(flat[first : first + num_bytes], piece.at))
        return runs

    def pack(self, bucket: Bucket, out: Raw) -> Proof:
        """Gather and cast a bucket into `out` uint8 [bucket.num_bytes]; return its hashes. The padding stays."""
        parts = list[Part]()
        for piece in bucket.pieces:
            part = self._part(piece)
            parts.append(part.reading(piece.box, raw_view(out, piece.at, piece.box.shape, ITEM_BYTES[part.dtype])))
        return copy_proof(parts)

    def gather(self, bucket: Bucket, out: Tensor, *, table: Tensor) -> Tensor:
        """Gather and cast a bucket into `out` uint8 [bucket.num_bytes] on the weights' GPU; nothing waits for it.

        Returns each piece's additive hash as int64 [pieces] there. table: as in `device_sum`. The padding stays.
        """
        sums = []
        for piece in bucket.pieces:
            part = self._part(piece)
            packed = typed(out, piece.at, piece.box.shape, part.dtype)
            packed.copy_(part.at(piece.box))
            item_bytes = ITEM_BYTES[part.dtype]
            target = out[piece.at : piece.at + piece.box.numel * item_bytes]
            sums.append(device_sum(target, piece.box, part.shape, item_bytes=item_bytes, table=table))
        return torch.stack(sums)

    def _part(self, piece: BucketPiece) -> LivePart:
        """Return the part of a piece's tensor; targets may have names of their own for tied tensors."""
        return self._as_sent(self._tied.get(piece.name, piece.name), piece.dtype)

    def _as_sent(self, name: str, dtype: str) -> LivePart:
        part = self._parts.get((name, dtype))
        if part is None:
            spec, box = self._boxes[name]
            part = self._parts[name, dtype] = LivePart(self._weights[name], box, shape=spec.shape, dtype=dtype)
        return part
