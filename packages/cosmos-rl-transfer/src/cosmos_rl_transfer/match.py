"""Which tensor of the source feeds which of the target, and which tensors are cut alike on both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.box import Box
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout import ITEM_BYTES, Manifest, is_floating

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorClass:
    """Tensors of one element size, cut alike on both sides: planned once."""

    source_cut: int
    """Place in `Match.source_cuts`."""
    item_bytes: int
    wanted: Mapping[int, Box]
    """What each target rank holds."""
    tensors: Ints
    """[n]: places in `Match.names`, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The tensors of the target, in its order, each with what the source has of it."""

    names: list[str]
    """The target's."""
    source_cuts: list[dict[int, Box]]
    """Boxes by source rank: the distinct ones."""
    target_cuts: list[dict[int, Box]]
    tensors: Ints
    """[T, 3]: places in source_cuts and target_cuts, and bytes of an element."""
    wire_dtypes: Mapping[str, str]
    """By name, of the target's tensors and the source's: the dtype its bytes travel in."""

    @classmethod
    def of(cls, source: Manifest, target: Manifest, wire_dtype: str | None) -> Match:
        """Match two manifests. Raises LayoutError as `check_match`."""
        check_match(source, target)
        wire = {name: wire_dtype_of(spec, wire_dtype) for name, spec in source.specs.items()}
        source_numbers, source_cuts = source.cuts
        cut_of = dict(zip(source.specs, source_numbers))
        names, rows = [], []
        for layout, target_cut in zip(target.layouts, target.cuts[0]):
            name = layout.spec.name
            origin = name if name in cut_of else source.tied[name]
            wire[name] = wire[origin]
            names.append(name)
            rows.append((cut_of[origin], target_cut, ITEM_BYTES[wire[origin]]))
        return cls(
            names=names,
            source_cuts=source_cuts,
            target_cuts=target.cuts[1],
            tensors=np.array(rows, np.int64).reshape(-1, 3),
            wire_dtypes=wire,
        )

    def classes(self, ranks: Iterable[int]) -> list[TensorClass]:
        """Group the tensors that some of the target's `ranks` hold, by all that the plan for these ranks depends on."""
        chosen = sorted(ranks)
        values: dict[tuple[tuple[int, Box], ...], int] = {}
        numbers = [
            values.setdefault(tuple((r, cut[r]) for r in chosen if r in cut and cut[r].numel), len(values))
            for cut in self.target_cuts
        ]
        wanted = [dict(value) for value in values]
        keys = self.tensors.copy()
        keys[:, 1] = np.array(numbers, np.int64)[keys[:, 1]]
        found, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse, minlength=len(found)))[:-1])
        return [
            TensorClass(
                source_cut=int(found[i, 0]),
                item_bytes=int(found[i, 2]),
                wanted=wanted[found[i, 1]],
                tensors=members[i],
            )
            for i in np.argsort(first).tolist()
            if wanted[found[i, 1]]
        ]

    def held_by(self, rank: int) -> tuple[object, ...]:
        """Return what a target rank holds: equal for two ranks, of this match or another, that want the same bytes."""
        numbers: dict[Box | None, int] = {}
        by_cut = np.array([numbers.setdefault(cut.get(rank), len(numbers)) for cut in self.target_cuts], np.int64)
        boxes = list(numbers)
        used, first, places = np.unique(by_cut[self.tensors[:, 1]], return_index=True, return_inverse=True)
        order = np.argsort(first)
        return [boxes[i] for i in used[order]], np.argsort(order)[places].tobytes(), self.names


def wire_dtype_of(spec: WeightSpec, wire_dtype: str | None) -> str:
    """Return the dtype a tensor travels in."""
    dtype = wire_dtype if wire_dtype and is_floating(spec.dtype) else spec.dtype
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"{spec.name}: dtype {dtype} cannot be transferred; known: {', '.join(ITEM_BYTES)}")
    return dtype


def check_match(source: Manifest, target: Manifest) -> None:
    """Raise LayoutError unless the source has every tensor of the target, with equal shapes and compatible dtypes.

    A tensor is looked for under its own name, then under those the source ties to it. One that the target does not
    know under any of its names is an error too; an alias alone is not.
    """
    ours, theirs = source.specs, target.specs
    if missing := [name for name in theirs if name not in ours and source.canonical(name) not in ours]:
        raise LayoutError(f"the source lacks {_first(missing)} of the target; it has {_first(list(ours))}")
    known = {*theirs, *target.tied, *(source.tied[name] for name in theirs if name in source.tied)}
    if unexpected := [name for name in ours if name not in known]:
        raise LayoutError(f"the target lacks {_first(unexpected)} of the source")
    for name, other in theirs.items():
        spec = ours.get(name) or ours[source.tied[name]]
        if spec.shape != other.shape:
            raise LayoutError(
                f"{name}: shape {spec.shape} at the source, {other.shape} at the target ({_ranks(source, target)})"
            )
        if spec.dtype != other.dtype and not (is_floating(spec.dtype) and is_floating(other.dtype)):
            raise LayoutError(
                f"{name}: dtype {spec.dtype} at the source, {other.dtype} at the target ({_ranks(source, target)})"
            )


def _ranks(source: Manifest, target: Manifest) -> str:
    return f"source ranks {list(source.ranks)}, target ranks {list(target.ranks)}"


def _first(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
