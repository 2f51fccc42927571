"""A trainer's live tensors as buckets, read in place: gathered and cast in one pass, or passed on as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from cosmos_rl_transfer.content.arena import Arena
from cosmos_rl_transfer.content.digest import copy_sum, tensor_sum
from cosmos_rl_transfer.content.raw import Raw, raw_bytes, same_width, torch_view
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.dtensor import dtype_name, local
from cosmos_rl_transfer.layout.manifest import Box, Manifest
from cosmos_rl_transfer.planning.plan import Bucket, Piece
from cosmos_rl_transfer.transports.base import Run

if TYPE_CHECKING:
    from torch import Tensor

DIRECT_BYTES = 128 << 10
"""Pieces of at least this length that lie in one run are not copied before they are sent."""


def runs_in(arena: Arena, memory: Raw, bucket: Bucket) -> list[Run] | None:
    """Return a bucket's bytes where they lie in an arena's `memory`, or None where they have to be packed."""
    found = []
    for piece in bucket.pieces:
        place = arena.places[piece.name]
        inside = piece.box.within(place.box)
        num_bytes = piece.box.numel * place.item_bytes
        if num_bytes < DIRECT_BYTES or not inside.is_contiguous(place.box.shape):
            return None
        first = place.at + inside.start(place.box.shape) * place.item_bytes
        found.append(Run(memory[first : first + num_bytes], piece.at))
    return found


class LiveWeights:
    """One rank's parts of the weights."""

    def __init__(self, manifest: Manifest, *, rank: int, wire_dtypes: Mapping[str, str]) -> None:
        self._specs = manifest.specs
        self._tied = manifest.tied
        self._boxes: dict[str, Box] = {spec.name: box for spec, box in manifest.held_by(rank)}
        self._wire = wire_dtypes
        self._tensors: dict[str, Tensor] = {}

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise LayoutError unless `weights` are this rank's parts of the manifest."""
        known = self._specs.keys() | self._tied.keys()
        if changed := sorted((weights.keys() - known) | (self._boxes.keys() - weights.keys())):
            raise LayoutError(f"the weights to publish are not those the publisher was made for: {changed[:5]}")
        for name, box in self._boxes.items():
            found = (tuple(local(weights[name]).shape), dtype_name(weights[name]))
            if found != (wanted := (box.shape, self._specs[name].dtype)):
                raise LayoutError(f"{name}: {found} to publish, {wanted} when the publisher was made")

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Read out of these tensors from now on; what was computed for them on a GPU is waited for."""
        self._tensors = {name: local(weights[name]) for name in self._boxes}
        if any(tensor.is_cuda for tensor in self._tensors.values()):
            torch.cuda.current_stream().synchronize()

    def exposable(self) -> list[Raw]:
        """Return the bytes of the tensors that `runs` may pass on."""
        return [raw_bytes(tensor) for name, tensor in self._tensors.items() if self._plain(name, tensor)]

    def runs(self, bucket: Bucket) -> list[Run] | None:
        """Return the bucket's bytes where they lie in memory, or None where they have to be packed."""
        found = []
        for piece in bucket.pieces:
            name = self._name(piece)
            tensor, box = self._tensors[name], self._boxes[name]
            inside = piece.box.within(box)
            if not self._plain(name, tensor) or not inside.is_contiguous(box.shape):
                return None
            first = inside.start(box.shape) * tensor.element_size()
            num_bytes = piece.box.numel * tensor.element_size()
            if num_bytes < DIRECT_BYTES:
                return None
            found.append(Run(raw_bytes(tensor)[first : first + num_bytes], piece.at))
        return found

    def pack(self, bucket: Bucket, out: Raw) -> tuple[int, ...]:
        """Gather and cast a bucket into `out` uint8 [bucket.num_bytes]; return each piece's additive hash.

        The padding stays as it is.
        """
        sums = []
        for piece in bucket.pieces:
            source, shape = self._part(piece), self._specs[self._name(piece)].shape
            target = torch_view(out, piece.at, piece.box.shape, self._wire[self._name(piece)])
            packed = same_width(target)
            if source.device.type == "cpu" and source.dtype == target.dtype:
                sums.append(copy_sum(same_width(source), packed, piece.box, shape))
            else:
                target.copy_(source)
                sums.append(tensor_sum(packed, piece.box, shape))
        return tuple(sums)

    def _part(self, piece: Piece) -> Tensor:
        name = self._name(piece)
        return self._tensors[name][piece.box.within(self._boxes[name]).slices()]

    def _name(self, piece: Piece) -> str:
        """Return the name of a piece here: targets may have names of their own for tied tensors."""
        return self._tied.get(piece.name, piece.name)

    def _plain(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor's bytes are what travels."""
        return tensor.device.type == "cpu" and tensor.is_contiguous() and dtype_name(tensor) == self._wire[name]
