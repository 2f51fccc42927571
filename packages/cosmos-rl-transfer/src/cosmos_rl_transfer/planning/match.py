"""Matches tensors of source and target, and groups tensors with equal shards on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout.box import Box
from cosmos_rl_transfer.layout.manifest import ITEM_BYTES, Manifest, is_floating

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClass:
    """Tensors with one wire dtype and equal shards on both sides: planned once."""

    source_cut: int
    """Index among the source's `cuts`."""
    dtype: str
    """Wire dtype of the tensors."""
    boxes: Mapping[int, Box]
    """Box of each target rank."""
    tensors: Ints
    """[n]: indices into `Match.names`, ascending."""

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """The tensors of the target, in its order, each with its source."""

    source: Manifest
    target: Manifest
    names: list[str]
    """Names in the target."""
    origins: list[str]
    """Names in the source."""
    dtypes: list[str]
    """Distinct wire dtypes."""
    tensors: Ints
    """[T, 3]: index of its cut among the source's, and among the target's; index in `dtypes`."""

    @classmethod
    def of(cls, source: Manifest, target: Manifest, wire_dtype: str | None) -> Match:
        """Match two manifests. Raises LayoutError as `check_match`."""
        check_match(source, target)
        names = list(target.specs)
        origins = [source.canonical(name) for name in names] if source.tied else names
        pairs = [(source.specs[origin].dtype, target.specs[name].dtype) for name, origin in zip(names, origins)]
        samples = dict(zip(pairs, origins))
        travels = {
            pair: wire_dtype_of(source.specs[origin], wire_dtype, target_dtype=pair[1])
            for pair, origin in samples.items()
        }
        dtypes = list(dict.fromkeys(travels.values()))
        place = {pair: dtypes.index(wire) for pair, wire in travels.items()}
        columns = (
            [source.cut_of[name] for name in origins],
            target.cut_numbers,
            [place[pair] for pair in pairs],
        )
        return cls(
            source=source,
            target=target,
            names=names,
            origins=origins,
            dtypes=dtypes,
            tensors=np.array(columns, np.int64).T,
        )

    @cached_property
    def wire_dtypes(self) -> dict[str, str]:
        """Wire dtype of each tensor, by the target's name."""
        return dict(zip(self.names, map(self.dtypes.__getitem__, self.tensors[:, 2].tolist())))

    def classes(self, ranks: Iterable[int]) -> list[TensorClass]:
        """Group the tensors that some of the target's `ranks` hold, by all that the plan for these ranks depends on."""
        chosen = sorted(ranks)
        values: dict[tuple[tuple[int, Box], ...], int] = {}
        numbers = [
            values.setdefault(tuple((r, cut[r]) for r in chosen if r in cut and cut[r].numel), len(values))
            for cut in self.target.cuts
        ]
        boxes = [dict(value) for value in values]
        number = np.array(numbers, np.int64)[self.tensors[:, 1]]
        keys = (self.tensors[:, 0] * len(boxes) + number) * len(self.dtypes) + self.tensors[:, 2]
        first, sizes, order = _groups(keys)
        return [
            TensorClass(
                source_cut=int(self.tensors[i, 0]),
                dtype=self.dtypes[self.tensors[i, 2]],
                boxes=boxes[number[i]],
                tensors=members,
            )
            for i, members in sorted(zip(first.tolist(), np.split(order, np.cumsum(sizes)[:-1])))
            if boxes[number[i]]
        ]

    def held_by(self, rank: int) -> object:
        """Return a key of a target rank's boxes: equal for two ranks, of this match or another, with the same bytes."""
        numbers: dict[Box | None, int] = {}
        by_cut = np.array([numbers.setdefault(cut.get(rank), len(numbers)) for cut in self.target.cuts], np.int64)
        boxes = list(numbers)
        used, first, places = np.unique(by_cut[self.tensors[:, 1]], return_index=True, return_inverse=True)
        order = np.argsort(first)
        return [boxes[i] for i in used[order]], np.argsort(order)[places].tobytes(), self.names


def _groups(keys: Ints) -> tuple[Ints, Ints, Ints]:
    """Return first index and size of each group of equal keys, and all indices by group, ascending within each."""
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    return order[starts], np.diff(starts, append=len(keys)), order


def wire_dtype_of(spec: WeightSpec, wire_dtype: str | None, *, target_dtype: str | None = None) -> str:
    """Return a tensor's wire dtype: `wire_dtype` if that makes a floating tensor narrower, else its own.

    target_dtype: takes the place of a `wire_dtype` that is not set.
    """
    if wire_dtype is None and target_dtype is not None and is_floating(target_dtype):
        wire_dtype = target_dtype
    for dtype in (spec.dtype, wire_dtype or spec.dtype):
        if dtype not in ITEM_BYTES:
            raise LayoutError(f"{spec.name}: dtype {dtype} cannot be transferred; known: {', '.join(ITEM_BYTES)}")
    narrower = wire_dtype and is_floating(spec.dtype) and ITEM_BYTES[wire_dtype] < ITEM_BYTES[spec.dtype]
    return wire_dtype if wire_dtype and narrower else spec.dtype


def check_match(source: Manifest, target: Manifest) -> None:
    """Raise LayoutError unless the source has every tensor of the target, with equal shapes and compatible dtypes.

    A tensor is matched by its own name, then by the one that the source ties it to. A source tensor without any of its
    names in the target is an error too; an alias alone is not.
    """
    ours, theirs = source.specs, target.specs
    if list(ours) != list(theirs):
        _check_names(source, target)
    for name, other in theirs.items():
        spec = ours[name] if name in ours else ours[source.tied[name]]
        if spec.shape == other.shape and spec.dtype == other.dtype:
            continue
        ranks = f"source ranks {list(source.ranks)}, target ranks {list(target.ranks)}"
        if spec.shape != other.shape:
            raise LayoutError(f"{name}: shape {spec.shape} at the source, {other.shape} at the target ({ranks})")
        if not (is_floating(spec.dtype) and is_floating(other.dtype)):
            raise LayoutError(f"{name}: dtype {spec.dtype} at the source, {other.dtype} at the target ({ranks})")


def _check_names(source: Manifest, target: Manifest) -> None:
    ours, theirs = source.specs, target.specs
    if missing := [name for name in theirs if source.canonical(name) not in ours]:
        raise LayoutError(f"the source lacks {_first(missing)} of the target; it has {_first(list(ours))}")
    used = {source.canonical(name) for name in theirs}
    if unexpected := [name for name in ours if name not in used and name not in target.tied]:
        raise LayoutError(f"the target lacks {_first(unexpected)} of the source")


def _first(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
