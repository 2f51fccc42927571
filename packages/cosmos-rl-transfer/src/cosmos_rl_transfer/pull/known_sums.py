"""What is known of the hashes of what was landed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cosmos_rl_transfer.content.digest import add
from cosmos_rl_transfer.planning.plan import Bucket, Piece


class KnownSums:
    """Additive hashes of the pieces of each bucket as it was landed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Piece, ...], Sequence[int]] = {}
        self.clear = self._known.clear

    def confirm(self, bucket: Bucket, found: Sequence[int], told: Sequence[int]) -> bool:
        """Keep what was found, if it is what was told."""
        if tuple(found) != tuple(told):
            self._known.pop(bucket.pieces, None)
            return False
        self._known[bucket.pieces] = told
        return True

    def follow(
        self, bucket: Bucket, gains: Sequence[int], sums: Sequence[int], *, now: Callable[[], Sequence[int]]
    ) -> bool:
        """Say whether these gains lead to `sums`, and keep them if so. `now` tells today's where they are not known."""
        known = self._known.get(bucket.pieces)
        if any(add(*pair) != wanted for *pair, wanted in zip(known or now(), gains, sums)):
            return False
        self._known[bucket.pieces] = sums
        return True
