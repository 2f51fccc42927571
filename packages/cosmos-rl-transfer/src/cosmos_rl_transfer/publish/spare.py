"""Memory of copies that are done with, kept for the next ones: a first touch of new memory costs ten copies."""

from __future__ import annotations

import threading

import numpy as np

from cosmos_rl_transfer.content.digest import Raw


class Spare:
    """Blocks of one size. Any thread may call."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Raw] = []
        self._guard = threading.Lock()

    def take(self, num_bytes: int) -> Raw:
        """Return uint8 [num_bytes] with any content; at most a block."""
        with self._guard:
            block = self._blocks.pop() if self._blocks else None
        return (np.empty(self._block_bytes, np.uint8) if block is None else block)[:num_bytes]

    def give(self, taken: Raw) -> None:
        """Keep what `take` returned; nobody may use it any more."""
        assert isinstance(taken.base, np.ndarray), "a part of a block"
        with self._guard:
            self._blocks.append(taken.base)

    def shrink(self) -> None:
        """Let half of what is kept go: the last fence needed none."""
        with self._guard:
            del self._blocks[len(self._blocks) // 2 :]
