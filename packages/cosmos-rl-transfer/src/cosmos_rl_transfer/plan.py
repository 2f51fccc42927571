"""Which rank sends which box to which rank, and in which buckets. Pure: two manifests in, a plan out.

    for each tensor (once for all tensors cut alike): for each box a target holds
        cut it at the edges of the source's boxes                       -> units, each with its owners
    largest unit first: give it to the owner with the fewest bytes so far, ties to the lowest rank
    for each (source rank, target rank): pack its units, tensors in order, into buckets

Every byte a target needs is sent exactly once, so bytes are at their lower bound by construction; the busiest
source is compared with a lower bound in `Plan.egress_bound`.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import msgspec

from cosmos_rl_core.types import WeightSpec
from cosmos_rl_transfer.errors import LayoutError
from cosmos_rl_transfer.layout import ITEM_BYTES, Box, Manifest, TensorLayout, is_floating

ALIGN = 64
"""Pieces start at multiples of this, in buckets and in arenas, so that a run of whole tensors is one copy."""


def aligned(num_bytes: int) -> int:
    """Round up to the alignment of pieces."""
    return -(-num_bytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one tensor inside a bucket."""

    name: str
    box: Box
    """In checkpoint coordinates."""
    at: int
    """First byte inside the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Packed bytes that travel together from one source rank to one target rank."""

    source: int
    target: int
    index: int
    """Place among the buckets of the same source and target."""
    pieces: tuple[Piece, ...]
    num_bytes: int
    """With padding between pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The outcome: buckets by (source rank, target rank) and what they cost."""

    streams: Mapping[tuple[int, int], tuple[Bucket, ...]]
    wire_dtypes: Mapping[str, str]
    """By tensor: the dtype its bytes travel in."""
    bytes_out: Mapping[int, int]
    """By source rank: bytes it sends, without padding."""
    bytes_in: Mapping[int, int]
    """By target rank: bytes it receives, without padding."""
    lower_bound: int
    """Fewest bytes that can travel in all: what the targets hold, once each."""
    egress_bound: int
    """Fewest bytes the busiest source can send: the largest, over sets of owners, of what only they hold
    divided by how many they are."""
    digest: str
    """SHA-256 over the buckets; equal on both sides or the sync does not start."""

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_in.values())

    @property
    def ratio(self) -> float:
        """Busiest source's bytes over `egress_bound`: 1.0 is perfect balance."""
        return max(self.bytes_out.values(), default=0) / self.egress_bound if self.egress_bound else 1.0

    def explain(self) -> str:
        """Return the plan as a few lines of text for people."""
        buckets = [b for stream in self.streams.values() for b in stream]
        lines = [
            f"{self.total_bytes:,} bytes in {len(buckets)} buckets, lower bound {self.lower_bound:,}",
            f"busiest source {max(self.bytes_out.values(), default=0):,} bytes, "
            f"lower bound {self.egress_bound:,} ({self.ratio:.3f}x)",
        ]
        lines += [f"source {rank} sends {size:,} bytes" for rank, size in self.bytes_out.items()]
        lines += [f"target {rank} receives {size:,} bytes" for rank, size in self.bytes_in.items()]
        return "\n".join([*lines, f"digest {self.digest}"])


def plan(source: Manifest, target: Manifest, *, bucket_bytes: int, wire_dtype: str | None = None) -> Plan:
    """Plan the transfer of everything `target` holds out of what `source` holds.

    `wire_dtype` replaces the source's dtype of floating tensors on the way. Raises LayoutError with tensor,
    shapes and ranks, where names, shapes or dtypes do not match or nobody holds a part of a target's box.
    """
    if bucket_bytes < max(ITEM_BYTES.values()):
        raise LayoutError(f"bucket_bytes = {bucket_bytes} is smaller than one element")
    check_match(source, target)
    wire = {s.name: wire_dtype_of(s, wire_dtype) for s in source.specs.values()}
    by_name = {layout.spec.name: layout for layout in source.layouts}
    pairs = [(by_name[layout.spec.name], layout) for layout in target.layouts]
    copies = list(_copies(pairs, wire))
    chosen, bytes_out = _assign(copies, source.ranks)
    streams = _buckets(copies, chosen, wire, bucket_bytes)
    bytes_in = dict.fromkeys(target.ranks, 0)
    for copy in copies:
        bytes_in[copy.target] += copy.num_bytes
    held = sum(box.numel * ITEM_BYTES[wire[t.spec.name]] for _, t in pairs for box in t.boxes.values())
    return Plan(
        streams=streams,
        wire_dtypes=wire,
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        lower_bound=held,
        egress_bound=_egress_bound(copies),
        digest=_digest(streams, wire),
    )


def wire_dtype_of(spec: WeightSpec, wire_dtype: str | None) -> str:
    """Return the dtype a tensor travels in."""
    dtype = wire_dtype if wire_dtype and is_floating(spec.dtype) else spec.dtype
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"{spec.name}: dtype {dtype} cannot be transferred; known: {', '.join(ITEM_BYTES)}")
    return dtype


def check_match(source: Manifest, target: Manifest) -> None:
    """Raise LayoutError unless both sides name the same tensors with equal shapes and compatible dtypes."""
    ours, theirs = source.specs, target.specs
    if missing := [name for name in theirs if name not in ours]:
        raise LayoutError(f"the source lacks {_first(missing)} of the target; it has {_first(list(ours))}")
    if unexpected := [name for name in ours if name not in theirs]:
        raise LayoutError(f"the target lacks {_first(unexpected)} of the source")
    ranks = f"source ranks {list(source.ranks)}, target ranks {list(target.ranks)}"
    for name, spec in ours.items():
        other = theirs[name]
        if spec.shape != other.shape:
            raise LayoutError(f"{name}: shape {spec.shape} at the source, {other.shape} at the target ({ranks})")
        if spec.dtype != other.dtype and not (is_floating(spec.dtype) and is_floating(other.dtype)):
            raise LayoutError(f"{name}: dtype {spec.dtype} at the source, {other.dtype} at the target ({ranks})")


def _first(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@dataclass(frozen=True, slots=True)
class _Unit:
    """A box one target rank needs and the ranks that hold all of it."""

    box: Box
    owners: tuple[int, ...]
    target: int


@dataclass(frozen=True, slots=True)
class _Copy:
    tensor: int
    name: str
    unit: _Unit
    num_bytes: int

    @property
    def target(self) -> int:
        return self.unit.target


def _copies(pairs: Sequence[tuple[TensorLayout, TensorLayout]], wire: Mapping[str, str]) -> Iterator[_Copy]:
    """All units of all tensors; tensors of the same shape and cuts share one overlay."""
    classes: dict[tuple[object, ...], list[_Unit]] = {}
    for tensor, (ours, theirs) in enumerate(pairs):
        key = (ours.spec.shape, tuple(ours.boxes.items()), tuple(theirs.boxes.items()))
        if key not in classes:
            classes[key] = list(_overlay(ours, theirs))
        name = ours.spec.name
        for unit in classes[key]:
            yield _Copy(tensor, name, unit, unit.box.numel * ITEM_BYTES[wire[name]])


def _overlay(source: TensorLayout, target: TensorLayout) -> Iterator[_Unit]:
    owners: defaultdict[Box, list[int]] = defaultdict(list)
    for rank, box in sorted(source.boxes.items()):
        owners[box].append(rank)
    for rank, wanted in sorted(target.boxes.items()):
        if not wanted.numel:
            continue
        parts = [part for box in owners if (part := box.intersect(wanted))]
        for cell in _cells(wanted, parts):
            holders = sorted(r for box, ranks in owners.items() if box.contains(cell) for r in ranks)
            if not holders:
                raise LayoutError(
                    f"{source.spec.name} {source.spec.shape}: no source rank of {sorted(source.boxes)} holds "
                    f"offset {cell.offset} shape {cell.shape}, which target rank {rank} needs"
                )
            yield _Unit(cell, tuple(holders), rank)


def _cells(box: Box, parts: Sequence[Box]) -> Iterator[Box]:
    """Cut `box` at every edge of `parts`."""
    intervals = []
    for dim, (low, high) in enumerate(zip(box.offset, box.end)):
        cuts = sorted({low, high, *(p.offset[dim] for p in parts), *(p.end[dim] for p in parts)})
        intervals.append(list(pairwise(cuts)))
    for cell in product(*intervals):
        yield Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))


def _assign(copies: Sequence[_Copy], ranks: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return each copy's sender and the bytes each rank sends: largest first, to the least loaded owner."""
    load = dict.fromkeys(ranks, 0)
    chosen = [0] * len(copies)
    for i in sorted(range(len(copies)), key=lambda i: (-copies[i].num_bytes, i)):
        chosen[i] = min(copies[i].unit.owners, key=lambda rank: (load[rank], rank))
        load[chosen[i]] += copies[i].num_bytes
    return chosen, load


def _egress_bound(copies: Sequence[_Copy]) -> int:
    only: defaultdict[frozenset[int], int] = defaultdict(int)
    for copy in copies:
        only[frozenset(copy.unit.owners)] += copy.num_bytes
    sets = {*only, frozenset().union(*only)} if only else set()
    return max((-(-sum(n for s, n in only.items() if s <= group) // len(group)) for group in sets), default=0)


def _buckets(
    copies: Sequence[_Copy], chosen: Sequence[int], wire: Mapping[str, str], bucket_bytes: int
) -> dict[tuple[int, int], tuple[Bucket, ...]]:
    streams: defaultdict[tuple[int, int], list[tuple[str, Box, int]]] = defaultdict(list)
    for copy, source in zip(copies, chosen):
        item = ITEM_BYTES[wire[copy.name]]
        parts = streams[source, copy.target]
        parts.extend((copy.name, box, box.numel * item) for box in _split(copy.unit.box, item, bucket_bytes))
    return {key: _pack(key, streams[key], bucket_bytes) for key in sorted(streams)}


def _split(box: Box, item: int, bucket_bytes: int) -> Iterator[Box]:
    """Cut a box larger than a bucket along its first dims: whole rows, multiples of ALIGN if possible."""
    if box.numel * item <= bucket_bytes:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    row = math.prod(box.shape[dim + 1 :]) * item
    step = max(1, bucket_bytes // row)
    even = ALIGN // math.gcd(row, ALIGN)
    step = step // even * even or step
    for low in range(0, box.shape[dim], step):
        offset, shape = list(box.offset), list(box.shape)
        offset[dim] += low
        shape[dim] = min(step, box.shape[dim] - low)
        yield from _split(Box(tuple(offset), tuple(shape)), item, bucket_bytes)


def _pack(key: tuple[int, int], parts: Sequence[tuple[str, Box, int]], bucket_bytes: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = 0
    for name, box, size in parts:
        if pieces and aligned(end) + size > bucket_bytes:
            buckets.append(Bucket(*key, len(buckets), tuple(pieces), end))
            pieces, end = [], 0
        pieces.append(Piece(name, box, aligned(end)))
        end = aligned(end) + size
    if pieces:
        buckets.append(Bucket(*key, len(buckets), tuple(pieces), end))
    return tuple(buckets)


def _digest(streams: Mapping[tuple[int, int], tuple[Bucket, ...]], wire: Mapping[str, str]) -> str:
    content = msgspec.msgpack.encode([sorted(wire.items()), [b for key in sorted(streams) for b in streams[key]]])
    return hashlib.sha256(content).hexdigest()
