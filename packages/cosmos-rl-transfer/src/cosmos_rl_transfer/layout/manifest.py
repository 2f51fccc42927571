"""The part of each tensor that each rank holds, in checkpoint coordinates.

    Manifest            one per side: trainer, rollout replicas
      TensorLayout      one per tensor: its WeightSpec and the box each rank holds
        Box             offset and shape inside the whole tensor

A rank holds at most one box of a tensor. Any cut is allowed: nothing has to divide evenly.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box, Overlay, whole_box
from cosmos_rl_transfer.layout.placement import Placement, Replicate, Shard, StridedShard, shard_box

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ITEM_BYTES",
    "Box",
    "Manifest",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "TensorLayout",
    "is_floating",
    "shard_box",
    "whole_box",
]

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of one element, by torch's name without the prefix."""


def is_floating(dtype: str) -> bool:
    """Say whether `dtype` may be cast on the way."""
    return dtype.startswith(("float", "bfloat"))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor and the part of it each rank holds."""

    spec: WeightSpec
    boxes: dict[int, Box]
    """By rank, ascending. Ranks without a part are left out. Tensors cut alike may share the dict."""


@dataclass(frozen=True)
class Manifest:
    """Everything one side holds."""

    layouts: tuple[TensorLayout, ...]
    tied: dict[str, str] = field(default_factory=dict)
    """Further names of tensors in `layouts`: {"lm_head.weight": "model.embed_tokens.weight"}."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """Ranks that hold one whole copy together, a replica each; empty: all ranks are one replica."""

    def __post_init__(self) -> None:
        """Raises LayoutError for two tensors of one name, and for a tie to a tensor that is not here."""
        names = {layout.spec.name for layout in self.layouts}
        if len(names) != len(self.layouts):
            name, count = Counter(layout.spec.name for layout in self.layouts).most_common(1)[0]
            raise LayoutError(f"{name} is listed {count} times")
        for alias, name in self.tied.items():
            if alias in names or name not in names:
                raise LayoutError(f"{alias} is tied to {name}: the manifest must list the second and not the first")

    @classmethod
    def whole(cls, specs: Sequence[WeightSpec], rank: int = 0) -> Manifest:
        """Describe whole tensors on one rank."""
        return cls(tuple(TensorLayout(spec, {rank: whole_box(spec.shape)}) for spec in specs))

    @classmethod
    def sharded(
        cls,
        specs: Sequence[WeightSpec],
        *,
        mesh_shape: Sequence[int],
        placements: Mapping[str, Sequence[Placement]],
        first_rank: int = 0,
    ) -> Manifest:
        """Describe tensors cut over a mesh whose ranks count row-major from `first_rank`; needs no process.

        `placements` has one entry a mesh axis for each tensor's name; a name left out is replicated.
        """
        coordinates = list(product(*(range(n) for n in mesh_shape)))
        everywhere = (Replicate(),) * len(mesh_shape)
        boxes: dict[tuple[object, ...], dict[int, Box]] = {}
        layouts = []
        for spec in specs:
            chosen = tuple(placements.get(spec.name, everywhere))
            if len(chosen) != len(mesh_shape):
                raise LayoutError(f"{spec.name}: {len(chosen)} placements for a mesh of shape {tuple(mesh_shape)}")
            key = (spec.shape, chosen)
            if key not in boxes:
                shards = (
                    shard_box(spec.shape, mesh_shape=mesh_shape, placements=chosen, coordinate=at) for at in coordinates
                )
                boxes[key] = {first_rank + i: box for i, box in enumerate(shards) if box.numel}
            layouts.append(TensorLayout(spec, boxes[key]))
        return cls(tuple(layouts))

    @classmethod
    def from_tensors(cls, weights: Mapping[str, Tensor], *, rank: int = 0) -> Manifest:
        """Describe live tensors: DTensors by their mesh and placements, others as whole tensors on `rank`.

        A tensor listed under several names is described once, under the first; the others become `tied`.
        """
        from cosmos_rl_transfer.layout.dtensor import describe, ties

        tied = ties(weights)
        layouts = (TensorLayout(*describe(n, t, rank=rank)) for n, t in weights.items() if n not in tied)
        return cls(tuple(layouts), tied)

    @classmethod
    def merge(cls, parts: Iterable[Manifest]) -> Manifest:
        """Join what several ranks, or sets of ranks, hold: tensors as they first appear, ranks ascending.

        Raises LayoutError where two parts disagree on a tensor's shape or dtype, or on what a name is tied to.
        """
        parts = list(parts)
        tied: dict[str, str] = {}
        for alias, name in (pair for part in parts for pair in part.tied.items()):
            if tied.setdefault(alias, name) != name:
                raise LayoutError(f"{alias} is tied to {tied[alias]} on one rank, to {name} on another")
        specs: dict[str, WeightSpec] = {}
        boxes: dict[str, dict[int, Box]] = {}
        for layout in (layout for part in parts for layout in part.layouts):
            if layout.spec.name in tied:
                _check_empty(layout, tied)
                continue
            spec = specs.setdefault(layout.spec.name, layout.spec)
            if spec != layout.spec:
                raise LayoutError(
                    f"{spec.name}: {spec.dtype} {list(spec.shape)} on one rank, "
                    f"{layout.spec.dtype} {list(layout.spec.shape)} on another"
                )
            boxes.setdefault(spec.name, {}).update(layout.boxes)
        layouts = (TensorLayout(spec, dict(sorted(boxes[name].items()))) for name, spec in specs.items())
        return cls(tuple(layouts), tied, tuple(replica for part in parts for replica in part.replicas))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold anything, ascending."""
        return tuple(sorted({rank for boxes in self.cuts for rank in boxes}))

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by replica; all ranks where `replicas` is empty."""
        return self.replicas or (self.ranks,)

    @cached_property
    def specs(self) -> dict[str, WeightSpec]:
        return {layout.spec.name: layout.spec for layout in self.layouts}

    @property
    def cuts(self) -> list[dict[int, Box]]:
        """The distinct ways tensors are cut, boxes by rank, as they first appear."""
        return self._cuts[0]

    @property
    def cut_numbers(self) -> list[int]:
        """By place in `layouts`: the place of a tensor's cut in `cuts`."""
        return self._cuts[1]

    @cached_property
    def cut_of(self) -> dict[str, int]:
        """By tensor: the place of its cut in `cuts`."""
        return dict(zip(self.specs, self.cut_numbers))

    @cached_property
    def overlays(self) -> list[Overlay]:
        """One for each of `cuts`, to lay over what a target wants."""
        return [Overlay(boxes) for boxes in self.cuts]

    @cached_property
    def _cuts(self) -> tuple[list[dict[int, Box]], list[int]]:
        by_identity: dict[int, int] = {}  # tensors cut alike mostly share the dict
        by_value: dict[tuple[tuple[int, Box], ...], int] = {}
        distinct, numbers = [], []
        for layout in self.layouts:
            number = by_identity.get(id(layout.boxes))
            if number is None:
                number = by_value.setdefault(tuple(layout.boxes.items()), len(distinct))
                by_identity[id(layout.boxes)] = number
                if number == len(distinct):
                    distinct.append(layout.boxes)
            numbers.append(number)
        return distinct, numbers

    def canonical(self, name: str) -> str:
        """Return the name a tensor has in `layouts`: its own if it stands there, else the one it is tied to."""
        return name if name in self.specs else self.tied.get(name, name)

    def box(self, name: str, rank: int) -> Box | None:
        """Return what `rank` holds of a tensor, None if nothing."""
        return self.cuts[self.cut_of[name]].get(rank)

    def only(self, ranks: Iterable[int]) -> Manifest:
        """Return what these ranks hold, as one replica: all tensors, the others' boxes left out."""
        chosen = frozenset(ranks)
        kept = [{rank: box for rank, box in boxes.items() if rank in chosen} for boxes in self.cuts]
        return Manifest(tuple(TensorLayout(x.spec, kept[self.cut_of[x.spec.name]]) for x in self.layouts), self.tied)

    def held_by(self, rank: int) -> Iterator[tuple[WeightSpec, Box]]:
        """Yield what `rank` holds, in order."""
        for layout in self.layouts:
            if rank in layout.boxes:
                yield layout.spec, layout.boxes[rank]

    def encode(self) -> bytes:
        """Return the manifest as msgpack, each distinct cut once; equal manifests give equal bytes."""
        tensors = [(layout.spec, number) for layout, number in zip(self.layouts, self.cut_numbers)]
        return msgspec.msgpack.encode(_Wire(self.cuts, tensors, sorted(self.tied.items()), self.replicas))

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read what `encode` wrote. Raises LayoutError on anything else."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise LayoutError(f"these bytes are no manifest: {error}") from error
        if not all(0 <= number < len(wire.cuts) for _, number in wire.tensors):
            raise LayoutError("a tensor names a cut that the manifest does not hold")
        layouts = tuple(TensorLayout(spec, wire.cuts[number]) for spec, number in wire.tensors)
        return cls(layouts, dict(wire.tied), wire.replicas)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the encoded manifest."""
        return hashlib.sha256(self.encode()).hexdigest()


def _check_empty(layout: TensorLayout, tied: Mapping[str, str]) -> None:
    """A rank that holds nothing of a tensor cannot see that it is tied; one that holds a part can."""
    name = layout.spec.name
    if layout.boxes:
        raise LayoutError(
            f"{name} is a tensor of its own on ranks {list(layout.boxes)}, tied to {tied[name]} on others"
        )


class _Wire(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    cuts: list[dict[int, Box]]
    tensors: list[tuple[WeightSpec, int]]
    """With the place of its cut in `cuts`."""
    tied: list[tuple[str, str]]
    replicas: tuple[tuple[int, ...], ...]
