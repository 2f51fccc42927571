"""What the live tensors lack of a shadow that holds a newer version: whole buckets, and elements of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from cosmos_rl_transfer.planning.plan import Bucket
from cosmos_rl_transfer.pull.patch import Patch

MOST_PATCHED = 1 / 32
"""Of a bucket's elements; beyond it a copy of the bucket is faster than single elements, and needs no list."""


class Pending:
    """Buckets by what has to be written of them. Several threads may add different buckets."""

    def __init__(self) -> None:
        self._whole: dict[tuple[int, int], Bucket] = {}
        self._patches: dict[tuple[int, int], tuple[Patch, ...]] = {}

    def add_whole(self, bucket: Bucket) -> None:
        """Note that the whole bucket differs."""
        key = bucket.source, bucket.index
        self._patches.pop(key, None)
        self._whole[key] = bucket

    def add(self, bucket: Bucket, patches: Callable[[], Iterable[Patch]], *, num_changes: int) -> None:
        """Note that elements of a bucket differ; `patches` is asked only if it pays."""
        key = bucket.source, bucket.index
        if key in self._whole or not num_changes:
            return
        if key in self._patches or num_changes > MOST_PATCHED * sum(piece.box.numel for piece in bucket.pieces):
            self.add_whole(bucket)
        else:
            self._patches[key] = tuple(patches())

    def write(self, copy: Callable[[Bucket], None], *, pool: Executor) -> None:
        """Bring the live tensors up to date; `copy` writes a whole bucket. May be repeated."""
        work: list[Callable[[], None]] = [patch.write for patches in self._patches.values() for patch in patches]
        list(pool.map(lambda write: write(), work))
        list(pool.map(copy, self._whole.values()))
