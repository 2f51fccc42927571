"""A publisher's copy of its parts as they travel, for deltas. Versions are read out of it, not out of live memory.

owner     begin(version)       what was read until now may change: a fence of the readers comes before
          refresh(weights)     tensor by tensor: compare, bring up to date, remember what changed
          ... the live tensors may change: nobody reads them any more ...
reader    runs, pack, delta    wait until the bucket's tensors are up to date

Where most of the bytes changed too much to be listed, twice in a row, the next versions are read out of live memory
as without deltas (`bypass`): for 1, 2, 4 ... 32 versions, until a comparison finds less.

The copy costs the rank's parts once in memory; what changed, at most once more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cosmos_rl_transfer.content.arena import Arena
from cosmos_rl_transfer.content.delta import Change, Extent, encode, encoded_bytes, widen
from cosmos_rl_transfer.content.digest import add
from cosmos_rl_transfer.content.positions import inward, outward, row_strides
from cosmos_rl_transfer.content.proof import Form, gain
from cosmos_rl_transfer.content.raw import Raw, raw_view
from cosmos_rl_transfer.errors import Superseded, TransferError
from cosmos_rl_transfer.layout.dtensor import local
from cosmos_rl_transfer.layout.manifest import Manifest
from cosmos_rl_transfer.planning.plan import Bucket, Piece
from cosmos_rl_transfer.publish.changes import Comparison, Found
from cosmos_rl_transfer.publish.live import LiveWeights, runs_in
from cosmos_rl_transfer.transports.base import Run

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 1 / 2
"""Of a bucket's bytes; a delta that takes more is not worth its coding."""
MOST_BYPASSED = 32
"""Versions between two comparisons where most changes: two of 34 are copied for nothing."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A bucket of which few elements changed since the version before."""

    data: Raw
    """uint8 [n]: what `delta.encode` makes."""
    sums: tuple[int, ...]
    """Additive hash of each piece as it is now."""


@dataclass(frozen=True, slots=True)
class _Selected:
    """The changes of one piece."""

    positions: Raw
    """int64 [k], in the piece's box."""
    at: Raw
    """[k]: where they lie in the rank's part."""
    old: Raw


class Outgoing:
    """One rank's parts in their wire dtypes. Any thread may read; one thread owns it."""

    def __init__(
        self,
        manifest: Manifest,
        live: LiveWeights,
        *,
        rank: int,
        wire_dtypes: Mapping[str, str],
        full_every: int,
    ) -> None:
        """Allocate the copy. Every `full_every`-th version is copied without a comparison and sent whole."""
        arena = Arena.of(manifest, rank=rank, wire_dtypes=wire_dtypes)
        self._names = tuple(arena.places)
        aliases = {alias: arena.places[name] for alias, name in manifest.tied.items() if name in arena.places}
        self.arena = Arena({**arena.places, **aliases}, arena.num_bytes)
        self.memory: Raw = np.empty(arena.num_bytes, np.uint8)
        self.memory.fill(0)  # takes the page faults now
        self.version = self.base = -1
        """The version it holds, and the one that deltas start from: -1 for none."""
        self.bypass = False
        """Whether the newest version is read out of live memory."""
        self._bypass_left, self._next_bypass = 0, 0
        self._live = live
        self._canonical = manifest.canonical
        self._full_every, self._since_full = full_every, 0
        self._comparison = Comparison()
        self._found: dict[str, Found | None] = {}
        self._changed = threading.Condition()
        self._behind: set[str] = set()
        """Tensors that are not up to date yet."""
        self._broken = False
        self._sums: dict[tuple[Piece, ...], tuple[int, tuple[int, ...]]] = {}
        """By pieces: a version and their additive hashes in it."""

    @property
    def wants_bypass(self) -> bool:
        """Whether the next version should not be copied."""
        return self._bypass_left > 0

    def start_bypass(self, version: int) -> None:
        """Serve readers out of live memory from now on, without a copy."""
        with self._changed:
            self.version, self.base, self.bypass, self._broken = version, -1, True, False
            self._behind.clear()
            self._bypass_left -= 1

    def begin(self, version: int) -> None:
        """Make readers wait for `version` from now on."""
        with self._changed:
            full = self.version < 0 or self.bypass or self._broken or self._since_full + 1 >= self._full_every
            self.bypass = False
            self._since_full = 0 if full else self._since_full + 1
            self.version, self.base = version, -1 if full else self.version
            self._behind, self._broken = set(self._names), False
            self._sums = {pieces: known for pieces, known in self._sums.items() if known[0] == self.base}

    def refresh(self, weights: Mapping[str, Tensor]) -> None:
        """Bring the copy up to date; `weights` must not change until this returns."""
        try:
            for name in self._names:
                place = self.arena.places[name]
                copy = self._flat(name)
                found = None
                if self.base < 0:
                    self._comparison.renew(local(weights[name]), copy, dtype=place.dtype)
                else:
                    found = self._comparison.refresh(local(weights[name]), copy, dtype=place.dtype)
                with self._changed:
                    self._found[name] = found
                    self._behind.discard(name)
                    self._changed.notify_all()
            if self.base >= 0:
                self._consider_bypass()
        finally:
            with self._changed:
                self._broken = bool(self._behind)
                self._changed.notify_all()

    def _consider_bypass(self) -> None:
        """After a comparison."""
        dense = sum(self.arena.places[name].num_bytes for name in self._names if self._found[name] is None)
        if dense > self.arena.num_bytes / 2:
            self._bypass_left, self._next_bypass = self._next_bypass, min(2 * self._next_bypass or 1, MOST_BYPASSED)
        else:
            self._next_bypass = 0

    def runs(self, bucket: Bucket) -> list[Run] | None:
        """Return the bucket's bytes where they lie, or None where they have to be packed."""
        self._wait(bucket)
        return self._live.runs(bucket) if self.bypass else runs_in(self.arena, self.memory, bucket)

    def pack(self, bucket: Bucket, out: Raw) -> tuple[int, ...]:
        """Write the bucket's packed bytes into `out` uint8 [bucket.num_bytes]; return each piece's additive hash."""
        self._wait(bucket)
        return self._live.pack(bucket, out) if self.bypass else self.arena.gather(self.memory, bucket, out)

    def delta(self, bucket: Bucket, *, base: int, version: int) -> Delta | None:
        """Return what `version` changed in a bucket since `base`; None if that is not known or the bucket is shorter.

        Raises Superseded if the copy went on to another version meanwhile.
        """
        self._wait(bucket)
        if base < 0 or (base, version) != (self.base, self.version):
            return None
        extents = [Extent(p.box.numel, self.arena.places[p.name].item_bytes) for p in bucket.pieces]
        selected: list[_Selected] = []
        most = num_bytes = int(bucket.num_bytes * MOST_BYTES)
        for piece, extent in zip(bucket.pieces, extents):
            found = self._select(piece)
            if found is None or (num_bytes := num_bytes - len(found.positions) * extent.item_bytes) < 0:
                return None
            selected.append(found)
        wide = [widen(found.positions, extent) for found, extent in zip(selected, extents)]
        if encoded_bytes(wide, extents) > most:
            return None
        values = [self._values(*each) for each in zip(bucket.pieces, selected, wide)]
        delta = Delta(
            encode([Change(p, v) for p, v in zip(wide, values)], extents), self._sums_now(version, bucket, selected)
        )
        if self.version != version:
            raise Superseded(f"version {version} gave way to {self.version} while it was read")
        return delta

    def keep_sums(self, version: int, bucket: Bucket, sums: tuple[int, ...]) -> None:
        """Remember the pieces' hashes in a version: those of the next one follow from them."""
        with self._changed:
            if version == self.version:
                self._sums[bucket.pieces] = version, sums

    def _wait(self, bucket: Bucket) -> None:
        needed = {self._canonical(piece.name) for piece in bucket.pieces}
        with self._changed:
            self._changed.wait_for(lambda: self._broken or not needed & self._behind)
            if self._broken:
                raise TransferError(f"version {self.version} could not be copied at the publisher")

    def _select(self, piece: Piece) -> _Selected | None:
        """Return what changed in a piece; None where that is not known."""
        found = self._found[self._canonical(piece.name)]
        if found is None:
            return None
        place = self.arena.places[piece.name]
        which, positions = inward(found.positions, piece.box.within(place.box), place.box.shape)
        return _Selected(positions, found.positions[which], found.old[which])

    def _values(self, piece: Piece, found: _Selected, wide: Raw) -> Raw:
        """Return the values at `wide`, positions in the piece that are those of `found` or more."""
        at = found.at
        if wide is not found.positions:
            place = self.arena.places[piece.name]
            start = piece.box.within(place.box).start(place.box.shape)
            at = outward(wide, piece.box.shape, row_strides(place.box.shape), start)
        return self._flat(piece.name)[at]

    def _sums_now(self, version: int, bucket: Bucket, selected: list[_Selected]) -> tuple[int, ...]:
        with self._changed:
            known, sums = self._sums.get(bucket.pieces, (-1, ()))
        if known != version:
            if known == self.base:
                sums = tuple(add(*pair) for pair in zip(sums, map(self._gain, bucket.pieces, selected)))
            else:
                sums = self.arena.sums(self.memory, bucket)
            self.keep_sums(version, bucket, sums)
        return sums

    def _gain(self, piece: Piece, found: _Selected) -> int:
        place = self.arena.places[piece.name]
        new = self._flat(piece.name)[found.at]
        return gain(piece, Form(place.shape, place.item_bytes), found.positions, old=found.old, new=new)

    def _flat(self, name: str) -> Raw:
        """View a tensor's part as unsigned integers [n]."""
        place = self.arena.places[name]
        return raw_view(self.memory, place.at, (place.box.numel,), place.item_bytes)
