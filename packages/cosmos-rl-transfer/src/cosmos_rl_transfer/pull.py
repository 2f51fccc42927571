"""Read one version out of borrowed slots into staging, and prove it.

each bucket, several at a time:  read -> xxh3 as lent? else read once more -> additive sums -> scatter
at the end:                      each tensor's sums, added up, as lent?
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait

import numpy as np

from cosmos_rl_transfer.arena import Arena
from cosmos_rl_transfer.digest import Raw, add, bucket_hash, tensor_sum
from cosmos_rl_transfer.errors import WeightMismatch
from cosmos_rl_transfer.feed import Feed
from cosmos_rl_transfer.messages import Lent
from cosmos_rl_transfer.plan import Bucket

log = logging.getLogger(__name__)


class Puller:
    """Reads versions into one rank's staging memory."""

    def __init__(self, arena: Arena, *, rank: int) -> None:
        self.arena = arena
        self.memory: Raw = np.empty(arena.num_bytes, np.uint8)
        self.memory.fill(0)  # takes the page faults now
        self._rank = rank
        self._scratch = threading.local()

    def pull(self, borrowed: Sequence[tuple[Feed, Lent]], *, version: int, pool: Executor) -> None:
        """Fill `memory` with `version`. Returns or raises after the last thread has stopped reading.

        Raises WeightMismatch naming tensor, version and ranks where a bucket is wrong twice or a tensor's
        hash differs, and what the readers raise.
        """
        work = [
            pool.submit(self._fetch, feed, lent, bucket, version) for feed, lent in borrowed for bucket in feed.buckets
        ]
        _, rest = wait(work, return_when=FIRST_EXCEPTION)
        for future in rest:
            future.cancel()
        wait(rest)
        for future in work:
            if not future.cancelled():
                future.result()
        found: Counter[str] = Counter()
        lent_sums: Counter[str] = Counter()
        for future in work:
            _add_up(found, future.result())
        for _, lent in borrowed:
            _add_up(lent_sums, lent.tensor_sums)
        for name in self.arena.places:
            if found[name] != lent_sums[name]:
                ranks = [feed.welcome.rank for feed, _ in borrowed]
                raise WeightMismatch(
                    f"{name} of version {version} arrived at rank {self._rank} with hash {found[name]:016x}, "
                    f"source ranks {ranks} published {lent_sums[name]:016x}"
                )

    def _fetch(self, feed: Feed, lent: Lent, bucket: Bucket, version: int) -> dict[str, int]:
        """Read one bucket to its place and return the additive hashes of its pieces by tensor."""
        start = self.arena.flat_start(bucket)
        if start is None:
            data = self._scratch_bytes(bucket.num_bytes)
        else:
            data = self.memory[start : start + bucket.num_bytes]
        self._read(feed, lent, bucket, data, version)
        sums: Counter[str] = Counter()
        for piece in bucket.pieces:
            part = tensor_sum(self.arena.packed(data, piece), piece.box, self.arena.places[piece.name].shape)
            _add_up(sums, {piece.name: part})
        if start is None:
            self.arena.scatter(data, bucket, self.memory)
        return sums

    def _read(self, feed: Feed, lent: Lent, bucket: Bucket, data: Raw, version: int) -> None:
        assert feed.reader is not None, "a feed is joined before it is read"
        for _ in range(2):
            feed.reader.read(bucket, lent=lent, out=data)
            if bucket_hash(data) == lent.bucket_hashes[bucket.index]:
                return
            log.warning("bucket %d of version %d arrived wrong from rank %d", bucket.index, version, bucket.source)
        names = [piece.name for piece in bucket.pieces]
        more = f" or one of {len(names) - 1} more" if len(names) > 1 else ""
        raise WeightMismatch(
            f"{names[0]}{more} of version {version} arrived wrong twice from rank {bucket.source} at rank "
            f"{bucket.target} (bucket {bucket.index})"
        )

    def _scratch_bytes(self, size: int) -> Raw:
        """Return this thread's scratch, kept from bucket to bucket."""
        held: Raw | None = getattr(self._scratch, "data", None)
        if held is None or held.size < size:
            held = self._scratch.data = np.zeros(size, np.uint8)
        return held[:size]


def _add_up(total: Counter[str], parts: dict[str, int]) -> None:
    for name, part in parts.items():
        total[name] = add(total[name], part)
